"""The children of one LLMDeployment in the cluster: ``desired(spec, target, …) -> Manifests``, pure.

Fields that Kubernetes would default are omitted. The operator owns every field it renders and reverts changes of
others. ``replicas`` is always rendered from the target, because omitting it would reset it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from quire_common.contract import engine
from quire_common.contract.adapters_file import AdapterEntry
from quire_common.contract.engine import GROUP_SECRET_VARIABLE
from quire_operator.api import ImageSource, Invalid, RemoteSource, Retention, RolloutStrategy, Spec, names
from quire_operator.api.fields import Problem
from quire_operator.deployment.manifests import (
    COMPONENT,
    HEADLESS_COMPONENT,
    JSON,
    NO_FEATURES,
    POD_MONITOR,
    PROMETHEUS_RULE,
    ClusterFeatures,
    Manifest,
    Manifests,
    all_tracks,
    digest,
    group_members,
    labels,
    owner_reference,
    selector,
)
from quire_operator.deployment.network import network_policy, pod_monitor, prometheus_rule
from quire_operator.deployment.pod_rules import ENGINE
from quire_operator.deployment.pod_template import STARTUP_SECONDS, Images, pod_template
from quire_operator.deployment.served_names import served_names
from quire_operator.kube.objects import LEADER_WORKER_SET, Ref
from quire_operator.lora.placement import config_map

_MONITORING = "monitoring.coreos.com/v1"
# A rollout may wait this long for the scheduler and the image in addition to the model; a hub needs time to download.
_PROGRESS_MARGIN_SECONDS, _DOWNLOAD_SECONDS = 600, 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """Everything from which children are rendered."""

    spec: Spec
    uid: str
    created: str
    target: int
    template: JSON
    """The template of a replica, or of the leader of a group."""
    features: ClusterFeatures
    adapters: Sequence[AdapterEntry] = ()
    worker_template: JSON | None = None
    """The template of the other pods of a group; None if a replica is one pod."""

    @property
    def template_digest(self) -> str:
        """A hash that is equal for equal pods."""
        shape = self.spec.parallelism
        if self.worker_template is None:
            return digest(self.template)
        return digest({"leader": self.template, "worker": self.worker_template, "size": shape.nodes})


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The parts of a child that its kind determines."""

    fields: JSON
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


def _always(spec: Spec, features: ClusterFeatures) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildKind:
    """One kind of child: where the API serves it, when it is wanted, and how it is rendered."""

    kind: str
    api_version: str
    render: Callable[[Parent], Content]
    suffix: str = ""
    """Follows the name of the LLMDeployment in the child's name."""
    component: str = COMPONENT
    is_wanted: Callable[[Spec, ClusterFeatures], bool] = _always
    is_optional: bool = False
    """True if a cluster may lack the kind, which may also come and go."""
    is_nonblocking: bool = False
    """True if replicas serve without it: a problem with it degrades an LLMDeployment and does not make it unready."""
    is_owned: Callable[[Spec], bool] = lambda spec: True
    """Return whether the garbage collector removes it as soon as its LLMDeployment is deleted."""

    def ref(self, deployment: str) -> Ref:
        """Return the reference to the child of the LLMDeployment with this name."""
        return Ref(self.kind, f"{deployment}{self.suffix}")

    @property
    def plural(self) -> str:
        """The name of the kind in paths of the API."""
        name = self.kind.lower()
        return f"{name.removesuffix('y')}ies" if name.endswith("y") else f"{name}s"

    @property
    def group_and_version(self) -> tuple[str, str]:
        """The API group, which is empty for the core group, and the version."""
        group, _, version = self.api_version.rpartition("/")
        return group, version


def render(child: ChildKind, parent: Parent) -> Manifest:
    spec = parent.spec
    owners = (owner_reference(spec.name, parent.uid),) if child.is_owned(spec) else ()
    return object_of(child, child.render(parent), name=spec.name, namespace=spec.namespace, owners=owners)


def object_of(child: ChildKind, content: Content, *, name: str, namespace: str, owners: Sequence[JSON]) -> Manifest:
    ref = child.ref(name)
    metadata: JSON = {
        "name": ref.name,
        "namespace": namespace,
        "labels": {**content.labels, **labels(name, component=child.component)},
    }
    if owners:
        metadata["ownerReferences"] = list(owners)
    if content.annotations:
        metadata["annotations"] = content.annotations
    body = {"apiVersion": child.api_version, "kind": child.kind, "metadata": metadata, **content.fields}
    return Manifest(ref=ref, body=body)


def _cache_claim(parent: Parent) -> Content:
    cache = parent.spec.model.cache
    assert cache is not None
    claim: JSON = {
        "accessModes": [cache.access_mode.value],
        "resources": {"requests": {"storage": str(cache.size_bytes)}},
    }
    if cache.storage_class_name is not None:
        claim["storageClassName"] = cache.storage_class_name
    return Content(fields={"spec": claim})


def _service(parent: Parent) -> Content:
    # Gateways of 0.1 route by these until an upgrade has replaced them; later ones read status.servedName.
    served = {names.ANNOTATION_SERVED_NAME: parent.spec.model.served_name}
    if parent.created:
        served[names.ANNOTATION_SENIORITY] = f"{parent.created}/{parent.uid}"
    return Content(fields={"spec": {"selector": selector(parent.spec.name), "ports": [port()]}}, annotations=served)


def _headless_service(parent: Parent) -> Content:
    service: JSON = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector(parent.spec.name),
        "ports": [port()],
    }
    return Content(fields={"spec": service})


def port() -> JSON:
    return {
        "name": engine.HTTP_PORT_NAME,
        "port": engine.HTTP_PORT,
        "protocol": "TCP",
        "targetPort": engine.HTTP_PORT_NAME,
    }


def _network_policy(parent: Parent) -> Content:
    return _policy_content(parent.spec.name, parent.features, nodes=parent.spec.parallelism.nodes)


def _policy_content(name: str, features: ClusterFeatures, *, nodes: int) -> Content:
    assert features.network_peers is not None
    selector = all_tracks(name) if nodes == 1 else group_members(name)
    policy = network_policy(features.network_peers, selector=selector, nodes=nodes)
    return Content(fields={"spec": policy})


def departed_policy(
    name: str, namespace: str, features: ClusterFeatures, *, owners: Sequence[JSON], nodes: int
) -> Manifest:
    """Return the NetworkPolicy of an LLMDeployment that is gone, for what is left of it: its workload and pods.

    ``nodes`` is the number of pods of a replica.
    """
    content = _policy_content(name, features, nodes=nodes)
    return object_of(POLICY, content, name=name, namespace=namespace, owners=owners)


def _pod_disruption_budget(parent: Parent) -> Content:
    name = parent.spec.name
    budget: JSON = {
        # Without one of its pods, no pod of a group is ready. So one unavailable pod is one unavailable group.
        "maxUnavailable": 1,
        # A replica that is not ready serves no requests, so a drain need not wait for it.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": group_members(name) if parent.spec.parallelism.is_group else all_tracks(name),
    }
    return Content(fields={"spec": budget})


def _deployment(parent: Parent) -> Content:
    spec = parent.spec
    deployment: JSON = {
        "replicas": parent.target,
        "selector": {"matchLabels": selector(spec.name)},
        "strategy": _strategy(spec),
        "progressDeadlineSeconds": progress_deadline_seconds(spec),
        "revisionHistoryLimit": 3,
        "template": parent.template,
    }
    return Content(fields={"spec": deployment}, annotations={names.ANNOTATION_TEMPLATE: parent.template_digest})


def _leader_worker_set(parent: Parent) -> Content:
    spec = parent.spec
    # All fields that its controller or webhook would default are rendered, so that they change nothing of ours.
    groups: JSON = {
        "replicas": parent.target,
        "leaderWorkerTemplate": {
            "size": spec.parallelism.nodes,
            "leaderTemplate": parent.template,
            "workerTemplate": parent.worker_template,
            "restartPolicy": "RecreateGroupOnPodRestart",
        },
        "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": _group_limits(spec, parent.target)},
        # A leader is not ready before its workers have joined.
        "startupPolicy": "LeaderCreated",
        "networkConfig": {"subdomainPolicy": "Shared"},
    }
    annotations = {
        names.ANNOTATION_TEMPLATE: parent.template_digest,
        names.ANNOTATION_PROGRESS_DEADLINE: str(progress_deadline_seconds(spec)),
    }
    return Content(fields={"spec": groups}, annotations=annotations)


def _group_limits(spec: Spec, groups: int) -> JSON:
    """Return the limits of a rollout as numbers, because LeaderWorkerSets refuse percentages that both round to 0."""
    if spec.rollout.strategy is RolloutStrategy.RECREATE:
        surge, unavailable = 0, max(1, groups)
    else:
        surge = rounded(spec.rollout.max_surge, groups, up=True)
        unavailable = rounded(spec.rollout.max_unavailable, groups, up=False)
    return {"partition": 0, "maxSurge": surge, "maxUnavailable": unavailable if surge else max(1, unavailable)}


def rounded(limit: int | str, replicas: int, *, up: bool) -> int:
    if isinstance(limit, int):
        return limit
    share = int(limit.removesuffix("%")) * replicas
    return -(-share // 100) if up else share // 100


def progress_deadline_seconds(spec: Spec) -> int:
    """Return the maximum time between two replicas becoming ready during a rollout."""
    if spec.rollout.progress_deadline_seconds is not None:
        return ceil(spec.rollout.progress_deadline_seconds)
    sources = (spec.model.source, None if spec.draft is None else spec.draft.source)
    download = _DOWNLOAD_SECONDS * sum(isinstance(source, RemoteSource | ImageSource) for source in sources)
    return STARTUP_SECONDS + _PROGRESS_MARGIN_SECONDS + download


def _strategy(spec: Spec) -> JSON:
    if spec.rollout.strategy is RolloutStrategy.RECREATE:
        return {"type": "Recreate"}
    if spec.replaces_in_place:
        return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    limits = {"maxSurge": spec.rollout.max_surge, "maxUnavailable": spec.rollout.max_unavailable}
    return {"type": "RollingUpdate", "rollingUpdate": limits}


def _pod_monitor(parent: Parent) -> Content:
    options = parent.features.monitoring
    assert options is not None
    monitor = pod_monitor(options, selector=all_tracks(parent.spec.name))
    return Content(fields={"spec": monitor}, labels=options.pod_monitor_labels)


def _prometheus_rule(parent: Parent) -> Content:
    options = parent.features.monitoring
    assert options is not None
    rule = prometheus_rule(parent.spec, options)
    assert rule is not None
    return Content(fields={"spec": rule}, labels=options.rule_labels)


POLICY = ChildKind(
    kind="NetworkPolicy",
    api_version="networking.k8s.io/v1",
    render=_network_policy,
    is_wanted=lambda spec, features: features.network_peers is not None,
    is_nonblocking=True,
    # Its pods drain for up to an hour after the LLMDeployment was deleted; until then the policy must apply.
    is_owned=lambda spec: False,
)
CHILDREN = (
    # In the order in which they are created: the objects that pods need come before the Deployment.
    ChildKind(
        kind="PersistentVolumeClaim",
        api_version="v1",
        render=_cache_claim,
        suffix=names.CACHE_CLAIM_SUFFIX,
        is_wanted=lambda spec, features: spec.model.cache is not None and spec.model.cache.is_created,
        is_owned=lambda spec: spec.model.cache is None or spec.model.cache.retain is Retention.DELETE,
    ),
    ChildKind(
        kind="ConfigMap",
        api_version="v1",
        render=lambda parent: Content(fields=config_map(parent.adapters)),
        suffix=names.ADAPTERS_SUFFIX,
        is_wanted=lambda spec, features: spec.engine.adapters is not None,
        is_nonblocking=True,
    ),
    ChildKind(
        kind="ServiceAccount",
        api_version="v1",
        render=lambda parent: Content(fields={"automountServiceAccountToken": False}),
    ),
    ChildKind(kind="Service", api_version="v1", render=_service),
    ChildKind(
        kind="Service",
        api_version="v1",
        render=_headless_service,
        suffix=names.HEADLESS_SUFFIX,
        component=HEADLESS_COMPONENT,
    ),
    POLICY,
    ChildKind(kind="PodDisruptionBudget", api_version="policy/v1", render=_pod_disruption_budget),
    ChildKind(
        kind="Deployment",
        api_version="apps/v1",
        render=_deployment,
        is_wanted=lambda spec, features: not spec.parallelism.is_group,
    ),
    ChildKind(
        kind=LEADER_WORKER_SET,
        api_version="leaderworkerset.x-k8s.io/v1",
        render=_leader_worker_set,
        suffix=names.GROUP_SUFFIX,
        is_wanted=lambda spec, features: spec.parallelism.is_group,
        is_optional=True,
    ),
    ChildKind(
        kind=POD_MONITOR,
        api_version=_MONITORING,
        render=_pod_monitor,
        is_wanted=lambda spec, features: features.creates(POD_MONITOR),
        is_optional=True,
        is_nonblocking=True,
    ),
    ChildKind(
        kind=PROMETHEUS_RULE,
        api_version=_MONITORING,
        render=_prometheus_rule,
        is_wanted=lambda spec, features: features.creates(PROMETHEUS_RULE) and spec.autoscaling is not None,
        is_optional=True,
        is_nonblocking=True,
    ),
)
OPTIONAL_KINDS = frozenset(child.kind for child in CHILDREN if child.is_optional)
NONBLOCKING_KINDS = frozenset(child.kind for child in CHILDREN if child.is_nonblocking)
MONITORING_KINDS = OPTIONAL_KINDS & NONBLOCKING_KINDS
WORKLOAD_KINDS = frozenset({"Deployment", LEADER_WORKER_SET})
UNOWNED_KINDS = frozenset({POLICY.kind, "PersistentVolumeClaim"})
"""Kinds whose objects may outlive their LLMDeployment, so that they have no controller."""


def desired(
    spec: Spec,
    target: int,
    *,
    uid: str,
    images: Images,
    created: str = "",
    features: ClusterFeatures = NO_FEATURES,
    adapters: Sequence[AdapterEntry] = (),
) -> Manifests | Invalid:
    """Return the children of the LLMDeployment with this ``uid`` and creation time, with ``target`` replicas.

    ``adapters`` are those that its replicas are to serve.
    """
    templates = _templates(spec, images, served_names(spec, features.served_names), uid)
    if not isinstance(templates, Templates):
        return Invalid(name=spec.name, namespace=spec.namespace, problems=templates)
    parent = Parent(
        spec=spec,
        uid=uid,
        created=created,
        target=target,
        template=templates.leader,
        worker_template=templates.worker,
        features=features,
        adapters=adapters,
    )
    return Manifests(children=tuple(render(child, parent) for child in CHILDREN if child.is_wanted(spec, features)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Templates:
    leader: JSON
    """The template of the replica itself, or of the leader of a group."""
    worker: JSON | None = None


def group_secret_name(manifests: Manifests) -> str | None:
    """Return the name of the Secret that pods of groups need; None if replicas are single pods."""
    template: Any = manifests.workload.body["spec"]
    if "leaderWorkerTemplate" not in template:
        return None
    containers = template["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"]
    env = next(container["env"] for container in containers if container["name"] == ENGINE)
    found = next(entry for entry in env if entry["name"] == GROUP_SECRET_VARIABLE)
    return str(found["valueFrom"]["secretKeyRef"]["name"])


def _templates(spec: Spec, images: Images, served: Sequence[str], uid: str) -> Templates | tuple[Problem, ...]:
    if not spec.parallelism.is_group:
        alone = _template(spec, images, served, names.COMPONENT, None)
        return Templates(leader=alone) if isinstance(alone, dict) else alone
    # Another template has another secret, so its name follows from the template without it. It also follows from the
    # uid, so that a Secret that exists before the LLMDeployment is never used: the operator cannot see whose it is.
    draft = _template(spec, images, served, names.COMPONENT, "")
    if not isinstance(draft, dict):
        return draft
    unique = digest({"template": draft, "size": spec.parallelism.nodes, "uid": uid})
    secret = f"{spec.name}{names.GROUP_SUFFIX}-{unique[:10]}"
    leader = _template(spec, images, served, names.COMPONENT, secret)
    worker = _template(spec, images, served, names.WORKER_COMPONENT, secret)
    assert isinstance(leader, dict) and isinstance(worker, dict)  # they differ from the draft in names only
    return Templates(leader=leader, worker=worker)


def _template(
    spec: Spec, images: Images, served: Sequence[str], component: str, group_secret: str | None
) -> JSON | tuple[Problem, ...]:
    return pod_template(
        spec,
        images,
        labels=labels(spec.name, component=component),
        selector=selector(spec.name, component=component),
        served_names=served,
        group_secret=group_secret,
    )


def all_problems(invalid: Invalid, images: Images) -> tuple[Problem, ...]:
    """Return the problems of a document, and those that show only when its pod template is merged."""
    spec = invalid.readable
    if spec is None:
        return invalid.problems
    templates = _templates(spec, images, (spec.model.served_name,), "")
    return invalid.problems if isinstance(templates, Templates) else (*invalid.problems, *templates)


def child_refs(spec: Spec, features: ClusterFeatures = NO_FEATURES) -> tuple[Ref, ...]:
    """Return the names of the children, which are known before anything else about them."""
    return tuple(child.ref(spec.name) for child in CHILDREN if child.is_wanted(spec, features))
