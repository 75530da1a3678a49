"""The pod of one replica: the engine container and its volumes, with ``spec.podTemplate`` merged in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from quire_common.contract import engine
from quire_operator.api import HubSource, PullPolicy, RemoteSource, Spec
from quire_operator.api.fields import Problem, shown
from quire_operator.api.names import ADAPTERS_SUFFIX, LABEL_APP, LABEL_DEPLOYMENT, LABEL_GROUP_KEY, LABEL_INSTANCE
from quire_operator.deployment import engine_contract
from quire_operator.deployment import volumes as keys
from quire_operator.deployment.pod_rules import ENGINE, contract_problems
from quire_operator.deployment.volumes import (
    DRAFT_VOLUME,
    MODEL_VOLUME,
    MODELS_PATH,
    DraftVolume,
    ModelVolume,
    credentials_environment,
    draft_problem,
    draft_volume,
    file_problem,
    model_volume,
)
from quire_operator.lora import placement as lora

_PATCH = "$patch"
# The merge keys of a pod spec's lists. A list without one has no identity to merge by and is replaced.
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "ports": "containerPort",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
}


def merge(
    base: Mapping[str, object], patch: Mapping[str, object], *, path: str, problems: list[Problem]
) -> dict[str, object]:
    """Return ``base`` with ``patch`` merged in. The patch's errors are added to ``problems``."""
    if patch.get(_PATCH) == "replace":
        return {key: value for key, value in patch.items() if key != _PATCH and value is not None}
    merged = dict(base)
    for key, value in patch.items():
        where = f"{path}.{key}"
        if key.startswith("$"):
            _note_directive(key, value, where, problems)
        elif value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            merged[key] = _merge_map(merged.get(key), value, where, problems)
        elif isinstance(value, list):
            merged[key] = _merge_list(key, merged.get(key), value, where, problems)
        else:
            merged[key] = value
    return merged


def _note_directive(key: str, value: object, where: str, problems: list[Problem]) -> None:
    if key == _PATCH:
        message = f'must be "replace" here, or "delete" on an item of a list; got {shown(value)}'
    else:
        message = "is not supported; write the whole list, or use $patch: delete on an item"
    problems.append(Problem(path=where, message=message))


def _merge_map(base: object, patch: Mapping[str, object], where: str, problems: list[Problem]) -> dict[str, object]:
    return merge(base if isinstance(base, Mapping) else {}, patch, path=where, problems=problems)


def _merge_list(field: str, base: object, patch: Sequence[object], where: str, problems: list[Problem]) -> list[object]:
    key = _MERGE_KEYS.get(field)
    if key is None:
        return list(patch)
    items = list(base) if isinstance(base, list) else []
    for number, item in enumerate(patch):
        at = f"{where}[{number}]"
        if not isinstance(item, Mapping):
            problems.append(Problem(path=at, message=f"must be a mapping, got {shown(item)}"))
        elif key not in item:
            problems.append(Problem(path=f"{at}.{key}", message="is required: items are merged by it"))
        else:
            _merge_item(items, item, key, at, problems)
    return items


def _merge_item(items: list[object], item: Mapping[str, object], key: str, at: str, problems: list[Problem]) -> None:
    same = (i for i, known in enumerate(items) if isinstance(known, Mapping) and known.get(key) == item[key])
    index = next(same, None)
    if item.get(_PATCH) == "delete":
        if index is not None:
            del items[index]
    elif index is None:
        items.append(merge({}, item, path=at, problems=problems))
    else:
        items[index] = _merge_map(items[index], item, at, problems)


JSON = dict[str, object]

FETCH, FETCH_DRAFT = "fetch-model", "fetch-draft"
USER_ID = 65532
"""The default user and group of replicas."""
STARTUP_SECONDS = 1800
"""The time that weights may take to load before the kubelet restarts the container."""
PRE_STOP_SECONDS = 5
"""The time between the pod leaving the endpoints and SIGTERM, in which clients notice that it leaves."""
_HUNG_GRACE_SECONDS = PRE_STOP_SECONDS + 5
"""The grace period of a replica whose probe has failed: it does not drain, and its requests wait until it ends."""
GROUP_SECRET_KEY = "secret"
"""The key of a group's Secret."""
_EVERYBODYS = ("cpu", "memory", "ephemeral-storage")
_SHARED_MEMORY, _SHARED_MEMORY_OF_RANK_GIB = "256Mi", 1
"""NCCL buffers take some hundred MB of each rank where GPUs cannot reach each other directly. It has some there for
connections between pods too."""
# Far above what is needed, so that a bug fills the pod's own limit instead of the node.
_TMP_LIMIT, _CACHE_LIMIT = "2Gi", "16Gi"
_CACHE_PATH, _TMP_PATH = "/cache", "/tmp"
_PROGRESS_FLAGS = ("--progress-port", str(engine.HTTP_PORT))
_FETCH_FLAGS = ("--termination-log", "/dev/termination-log", *_PROGRESS_FLAGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The settings of pods that apply when the spec has none."""

    engine: str
    """The image that serves and downloads models."""
    rocm_engine: str = "quire-engine-rocm"
    """The same for replicas on AMD's GPUs, whose torch is the build for ROCm."""
    pull_policy: PullPolicy | None = None
    """The pull policy of the engine's image; None leaves it to Kubernetes."""
    model_size_limit: str = "200Gi"
    """The size limit, as a quantity, of the volume into which a pod downloads its own model."""
    hub_endpoint: str | None = None
    """Another address of the model hub, such as a mirror."""
    user_id: int | None = USER_ID
    """The user and group of replicas; None leaves them to the cluster, as OpenShift requires."""
    allowed_exceptions: frozenset[str] = frozenset()
    """The rules of ``pod_security`` that ``spec.podTemplate`` may break."""


def pod_template(
    spec: Spec,
    images: Images,
    *,
    labels: Mapping[str, str],
    selector: Mapping[str, str],
    served_names: Sequence[str],
    group_secret: str | None = None,
) -> JSON | tuple[Problem, ...]:
    """Return the template of pods, or every reason why ``spec.podTemplate`` cannot be merged into it.

    ``served_names`` are the model names that the engine accepts; its answers contain the first. ``group_secret`` is the
    name of the Secret that the pods of a group share; None if a replica is one pod.
    """
    pod = _pod_spec(spec, images, selector=selector, served_names=served_names, group_secret=group_secret)
    base: JSON = {"metadata": {"labels": dict(labels), "annotations": _scrape_annotations()}, "spec": pod}
    problems: list[Problem] = []
    if (message := file_problem(spec.model.source)) is not None:
        problems.append(Problem(path="spec.model.source", message=message))
    if (problem := draft_problem(spec)) is not None:
        problems.append(problem)
    for key in spec.pod_template.keys() - {"metadata", "spec"}:
        problems.append(Problem(path=f"spec.podTemplate.{key}", message="unknown field; there are: metadata, spec"))
    merged = merge(base, spec.pod_template, path="spec.podTemplate", problems=problems)
    fixed = {**selector, **{name: labels[name] for name in (LABEL_APP, LABEL_INSTANCE)}}
    problems += contract_problems(base, merged, selector=fixed, allowed=images.allowed_exceptions)
    return tuple(problems) if problems else merged


def _scrape_annotations() -> JSON:
    # For a Prometheus without its operator, which finds pods by these.
    return {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(engine.HTTP_PORT),
        "prometheus.io/path": engine.METRICS_PATH,
    }


def _pod_spec(
    spec: Spec, images: Images, *, selector: Mapping[str, str], served_names: Sequence[str], group_secret: str | None
) -> JSON:
    volume = model_volume(spec, size_limit=images.model_size_limit)
    draft = draft_volume(spec, volume, size_limit=images.model_size_limit)
    pod: JSON = {
        "serviceAccountName": spec.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": PRE_STOP_SECONDS + ceil(engine_contract.kill_grace_seconds(spec)),
        "securityContext": _pod_security(images.user_id),
        "topologySpreadConstraints": [_spread(spec, selector, in_group=group_secret is not None)],
        "containers": [_engine_container(spec, images, volume, draft, served_names, group_secret)],
        "volumes": _volumes(spec, volume, draft),
    }
    init: list[JSON] = []
    if spec.auth_secret is not None:
        # Before the download, so that a missing key is reported at once.
        image = _image(spec, images)
        check = keys.check_container(spec.auth_secret, image=image, security=_container_security())
        init.append({**check, "resources": _init_resources(spec)})
    if volume.fetch is not None:
        init.append(_fetch_container(spec, images, volume.fetch, volume.model_path))
    if draft is not None and draft.fetch is not None:
        init.append(_fetch_draft_container(spec, images, draft, draft.fetch))
    if init:
        pod["initContainers"] = init
    if pull_secrets := _pull_secrets(spec, volume, draft):
        pod["imagePullSecrets"] = [{"name": name} for name in pull_secrets]
    return pod


def _spread(spec: Spec, selector: Mapping[str, str], *, in_group: bool) -> JSON:
    """Return the constraint that spreads replicas over nodes, or the pods of each group.

    A pod may have one constraint of this kind, and the memory of several nodes is what a group is for.
    """
    labels, key = ({LABEL_DEPLOYMENT: spec.name}, LABEL_GROUP_KEY) if in_group else (selector, "pod-template-hash")
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": dict(labels)},
        "matchLabelKeys": [key],
    }


def _pod_security(user_id: int | None) -> JSON:
    ids: JSON = {} if user_id is None else {"runAsUser": user_id, "runAsGroup": user_id, "fsGroup": user_id}
    return {
        "runAsNonRoot": True,
        **ids,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _pull_secrets(spec: Spec, volume: ModelVolume, draft: DraftVolume | None) -> list[str]:
    """Return the pull secrets of the pod's images, of which models may be some."""
    model = spec.model.credentials_secret if volume.image is not None else None
    named = [secret.name for secret in spec.engine.image_pull_secrets]
    of_draft = None if draft is None else draft.pull_secret
    return list(dict.fromkeys((*named, *(secret for secret in (model, of_draft) if secret is not None))))


def _engine_container(
    spec: Spec,
    images: Images,
    volume: ModelVolume,
    draft: DraftVolume | None,
    served_names: Sequence[str],
    group_secret: str | None,
) -> JSON:
    mounts = [*_cache_mounts(), {"name": "shm", "mountPath": "/dev/shm"}]
    if volume.volume is not None:
        mounts.append({"name": MODEL_VOLUME, "mountPath": MODELS_PATH, "readOnly": True})
    if draft is not None and draft.volume is not None:
        mounts.append({**draft.mount, "readOnly": True})
    if spec.auth_secret is not None:
        mounts.append(keys.key_mount())
    if spec.engine.adapters is not None:
        mounts.append(lora.adapters_mount())
    grace = {"terminationGracePeriodSeconds": _HUNG_GRACE_SECONDS}
    return {
        "name": ENGINE,
        **_image(spec, images),
        "command": [engine.ENGINE_COMMAND],
        "args": engine_contract.engine_args(
            spec,
            model_path=volume.model_path,
            draft_path=None if draft is None else draft.model_path,
            served_names=served_names,
            api_key_file=None if spec.auth_secret is None else keys.KEY_FILE,
            adapters_file=None if spec.engine.adapters is None else lora.ADAPTERS_FILE,
            join_seconds=None if group_secret is None else STARTUP_SECONDS,
        ),
        "ports": [{"name": engine.HTTP_PORT_NAME, "containerPort": engine.HTTP_PORT, "protocol": "TCP"}],
        "env": _engine_environment(spec, images, group_secret),
        "resources": _resources(spec),
        "startupProbe": {**_probe(engine.READY_PATH, period=5, timeout=3, failures=STARTUP_SECONDS // 5), **grace},
        "readinessProbe": _probe(engine.READY_PATH, period=5, timeout=3, failures=2),
        "livenessProbe": {**_probe(engine.LIVE_PATH, period=10, timeout=5, failures=3), **grace},
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _container_security(),
        "volumeMounts": mounts,
    }


def _fetch_container(spec: Spec, images: Images, source: RemoteSource, model_path: str) -> JSON:
    container = _downloading_container(spec, images, source)
    mounts = [*_cache_mounts(), {"name": MODEL_VOLUME, "mountPath": MODELS_PATH}]
    env = [*container["env"], *credentials_environment(source, spec.model.credentials_secret)]
    args = [str(source), "--to", model_path, *_FETCH_FLAGS]
    return {"name": FETCH, **container, "args": args, "env": env, "volumeMounts": mounts}


def _fetch_draft_container(spec: Spec, images: Images, draft: DraftVolume, source: RemoteSource) -> JSON:
    """Return the container that downloads the draft model; the pod's reported version stays the target's."""
    speculation = spec.engine.speculation
    assert speculation is not None and speculation.draft is not None
    optional = not speculation.required
    container = _downloading_container(spec, images, source)
    secret = speculation.draft.credentials_secret
    env = [*container["env"], *credentials_environment(source, secret, optional=optional)]
    args = [str(source), "--to", draft.model_path, *_PROGRESS_FLAGS, *(["--optional"] if optional else [])]
    return {"name": FETCH_DRAFT, **container, "args": args, "env": env, "volumeMounts": [*_cache_mounts(), draft.mount]}


def _downloading_container(spec: Spec, images: Images, source: RemoteSource) -> dict[str, Any]:
    """Return what the containers that download models have in common."""
    env = _environment()
    if images.hub_endpoint is not None and isinstance(source, HubSource):
        env.append({"name": "HF_ENDPOINT", "value": images.hub_endpoint})
    return {
        # The engine's image, so that an upgrade of the operator changes no pod template.
        **_image(spec, images),
        "command": [engine.FETCH_COMMAND],
        "env": env,
        "resources": _init_resources(spec),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _container_security(),
    }


def _cache_mounts() -> list[JSON]:
    return [{"name": "tmp", "mountPath": _TMP_PATH}, {"name": "cache", "mountPath": _CACHE_PATH}]


def _image(spec: Spec, images: Images) -> JSON:
    """Return the image of a container and its pull policy, which is absent if none is set."""
    policy = spec.engine.image_pull_policy or images.pull_policy
    default = images.rocm_engine if spec.resources.on_amd else images.engine
    image: JSON = {"image": spec.engine.image or default}
    return image if policy is None else {**image, "imagePullPolicy": policy.value}


def _engine_environment(spec: Spec, images: Images, group_secret: str | None) -> list[JSON]:
    """Return the variables of the engine, which downloads adapters itself."""
    # What envFrom of podTemplate brings is not known here, and the variables of this list win.
    env: list[JSON] = [*_environment(), {"name": engine.FLAGS_ONLY_VARIABLE, "value": "1"}]
    if group_secret is not None:
        reference: JSON = {"secretKeyRef": {"name": group_secret, "key": GROUP_SECRET_KEY}}
        env.append({"name": engine.GROUP_SECRET_VARIABLE, "valueFrom": reference})
    if spec.engine.adapters is not None and images.hub_endpoint is not None:
        env.append({"name": "HF_ENDPOINT", "value": images.hub_endpoint})
    return env + lora.adapters_environment(spec)


def _environment() -> list[JSON]:
    # The root is read-only and the user has no home directory, so caches of libraries go to the two empty volumes.
    paths = {
        "HOME": _TMP_PATH,
        "XDG_CACHE_HOME": _CACHE_PATH,
        "HF_HOME": f"{_CACHE_PATH}/huggingface",
        "NUMBA_CACHE_DIR": f"{_CACHE_PATH}/numba",
        "TRITON_CACHE_DIR": f"{_CACHE_PATH}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{_CACHE_PATH}/torchinductor",
    }
    return [{"name": name, "value": value} for name, value in paths.items()]


def _resources(spec: Spec) -> JSON:
    amounts = {"limits": dict(spec.resources.limits), "requests": dict(spec.resources.requests)}
    return {name: amount for name, amount in amounts.items() if amount}


def _init_resources(spec: Spec) -> JSON:
    """Return the resources of an init container: those of the engine without devices.

    So it needs no more of a node or a quota than the engine, and the pod keeps its quality of service class, which
    depends on all its containers.
    """
    amounts = {"limits": spec.resources.limits, "requests": spec.resources.requests}
    kept = {name: {of: amount[of] for of in _EVERYBODYS if of in amount} for name, amount in amounts.items()}
    return {name: amount for name, amount in kept.items() if amount}


def _probe(path: str, *, period: int, timeout: int, failures: int) -> JSON:
    return {
        "httpGet": {"path": path, "port": engine.HTTP_PORT_NAME},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def _container_security() -> JSON:
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def _shared_memory(spec: Spec) -> str:
    if not spec.resources.gpus or spec.parallelism.ranks == 1:
        return _SHARED_MEMORY
    return f"{spec.resources.gpus * _SHARED_MEMORY_OF_RANK_GIB}Gi"


def _volumes(spec: Spec, volume: ModelVolume, draft: DraftVolume | None) -> list[JSON]:
    volumes: list[JSON] = [
        {"name": "tmp", "emptyDir": {"sizeLimit": _TMP_LIMIT}},
        {"name": "cache", "emptyDir": {"sizeLimit": _CACHE_LIMIT}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _shared_memory(spec)}},
    ]
    if volume.volume is not None:
        volumes.append({"name": MODEL_VOLUME, **volume.volume})
    if draft is not None and draft.volume is not None:
        volumes.append({"name": DRAFT_VOLUME, **draft.volume})
    if spec.auth_secret is not None:
        volumes.append(keys.key_volume(spec.auth_secret))
    if spec.engine.adapters is not None:
        volumes.append(lora.adapters_volume(f"{spec.name}{ADAPTERS_SUFFIX}"))
    return volumes
