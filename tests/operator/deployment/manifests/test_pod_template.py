"""The pod of a replica: its security, its probes, the source of its model, and the fields that users may change."""

from collections.abc import Callable
from typing import Any

import pytest
from kube_support.pod_security import SAFE
from rendering import mounts, volumes

from quire_operator.api import PullPolicy
from quire_operator.deployment.pod_template import Images

Pod = Callable[..., Any]
Problems = Callable[..., dict[str, str]]


def engine_of(pod: Any) -> Any:
    (engine,) = (container for container in pod["containers"] if container["name"] == "engine")
    return engine


def with_engine(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "engine"} | fields]}}


def test_pod_runs_unprivileged_on_a_read_only_root(pod: Pod) -> None:
    made = pod(model={"source": "hf://a/b"})
    assert made["securityContext"]["runAsNonRoot"] is True and made["securityContext"]["runAsUser"] > 0
    assert made["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*made["containers"], *made["initContainers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
        assert "/tmp" in mounts(container), "a root that can't be written needs a place for what must be"
    assert not {"hostNetwork", "hostPID", "hostIPC"} & made.keys()


def test_every_mount_has_its_volume(pod: Pod) -> None:
    for model in ({"source": "file:///m"}, {"source": "pvc://c/p"}, {"source": "hf://a/b", "cache": {"size": "1Gi"}}):
        made = pod(model=model)
        containers = (*made["containers"], *made.get("initContainers", ()))
        used = {mount["name"] for container in containers for mount in container["volumeMounts"]}
        assert used <= volumes(made).keys()


def test_probes_use_the_routes_of_the_engine(pod: Pod) -> None:
    engine = engine_of(pod())
    asked = {name: engine[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert asked == {
        "startupProbe": {"path": "/readyz", "port": "http"},
        "readinessProbe": {"path": "/readyz", "port": "http"},
        "livenessProbe": {"path": "/livez", "port": "http"},
    }
    assert engine["ports"] == [{"name": "http", "containerPort": 8000, "protocol": "TCP"}]


@pytest.mark.parametrize("drain", ["0s", "30s", "1h"])
def test_hung_replica_is_killed_without_the_time_to_drain(pod: Pod, drain: str) -> None:
    made = pod(drain={"timeout": drain})
    engine = engine_of(made)
    sleep = engine["lifecycle"]["preStop"]["sleep"]["seconds"]
    for name in ("startupProbe", "livenessProbe"):
        assert sleep < engine[name]["terminationGracePeriodSeconds"] <= 10
    assert "terminationGracePeriodSeconds" not in engine["readinessProbe"], "Kubernetes refuses it there"
    changed = {"name": "engine", "livenessProbe": {"terminationGracePeriodSeconds": 60}}
    made = pod(podTemplate={"spec": {"containers": [changed]}})
    assert engine_of(made)["livenessProbe"]["terminationGracePeriodSeconds"] == 60


def test_replicas_spread_over_nodes_and_share_memory(pod: Pod) -> None:
    made = pod()
    (spread,) = made["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert "/dev/shm" in mounts(engine_of(made))


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        ({}, "256Mi"),
        ({"parallelism": {"tensor": 4}}, "256Mi"),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, "256Mi"),
        ({"parallelism": {"tensor": 4}, "resources": {"limits": {"nvidia.com/gpu": 4}}}, "4Gi"),
        ({"parallelism": {"tensor": 2}, "resources": {"limits": {"amd.com/gpu": 2}}}, "2Gi"),
        ({"parallelism": {"pipeline": 2}, "resources": {"limits": {"nvidia.com/gpu": 2}}}, "2Gi"),
    ],
)
def test_ranks_on_gpus_have_more_shared_memory(pod: Pod, spec: dict[str, Any], limit: str) -> None:
    assert volumes(pod(**spec))["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": limit}


def test_each_rank_on_gpus_of_a_pod_has_one(pod: Pod) -> None:
    engine = engine_of(pod(parallelism={"tensor": 4}, resources={"limits": {"nvidia.com/gpu": 4}}))
    assert engine["resources"] == {"limits": {"nvidia.com/gpu": "4"}}
    args = engine["args"]
    assert [args[args.index(flag) + 1] for flag in ("--device", "--tensor-parallel-size")] == ["cuda", "4"]


def test_resources_and_images_follow_the_spec(pod: Pod) -> None:
    made = pod(
        resources={"limits": {"nvidia.com/gpu": 1, "memory": "16Gi"}},
        engine={"image": "mine:2", "imagePullSecrets": [{"name": "pull"}]},
    )
    assert engine_of(made)["resources"] == {"limits": {"nvidia.com/gpu": "1", "memory": "16Gi"}}
    args = engine_of(made)["args"]
    assert args[args.index("--device") + 1] == "cuda", "it starts on its GPU or not at all"
    assert (engine_of(made)["image"], made["imagePullSecrets"]) == ("mine:2", [{"name": "pull"}])
    assert engine_of(pod())["image"] == "registry.example/engine:1"


@pytest.mark.parametrize("name", ["mig-3g.40gb", "mig-1g.10gb.me", "gpu.shared"])
def test_part_of_a_gpu_is_a_gpu_to_the_engine(pod: Pod, name: str) -> None:
    engine = engine_of(pod(resources={"limits": {f"nvidia.com/{name}": 1, "memory": "16Gi"}}))
    assert engine["resources"] == {"limits": {f"nvidia.com/{name}": "1", "memory": "16Gi"}}
    assert engine["args"][engine["args"].index("--device") + 1] == "cuda", "it would serve from the CPU"


def test_a_replica_on_amd_has_the_image_and_the_device_of_rocm(pod: Pod) -> None:
    images = Images(engine="e:1", rocm_engine="rocm:1")
    limits = {"amd.com/gpu": 1}
    made = pod(images=images, resources={"limits": limits}, model={"source": "hf://org/m"})
    args = engine_of(made)["args"]
    assert args[args.index("--device") + 1] == "rocm"
    assert engine_of(made)["resources"] == {"limits": {"amd.com/gpu": "1"}}
    assert {container["image"] for container in (*made["containers"], *made["initContainers"])} == {"rocm:1"}
    assert engine_of(pod(images=images))["image"] == "e:1"
    assert engine_of(pod(images=images, resources={"limits": limits}, engine={"image": "mine"}))["image"] == "mine"


READ_ONLY_CLAIM = {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}}


def test_init_containers_request_no_more_and_no_device(pod: Pod) -> None:
    amounts = {"cpu": "4", "memory": "16Gi"}
    made = pod(
        resources={"limits": amounts | {"nvidia.com/gpu": 1}, "requests": amounts},
        model={"source": "hf://org/m"},
        auth={"secretName": "keys"},
    )
    for container in made["initContainers"]:
        assert container["resources"] == {"limits": amounts, "requests": amounts}, "else it is Guaranteed no more"
    assert [c["resources"] for c in pod(auth={"secretName": "keys"})["initContainers"]] == [{}]


@pytest.mark.parametrize(
    ("model", "path", "volume"),
    [
        ({"source": "file:///srv/llama"}, "/srv/llama", None),
        ({"source": "file://./models/demo"}, "/models/models/demo", None),
        (
            {"source": "file://./demo", "cache": {"claimName": "c"}},
            "/models/demo",
            {"persistentVolumeClaim": {"claimName": "c"}},
        ),
        ({"source": "pvc://weights/llama/8b"}, "/models/llama/8b", READ_ONLY_CLAIM),
        ({"source": "pvc://weights"}, "/models", READ_ONLY_CLAIM),
        ({"source": "hf://org/m@v1/x"}, "/models/org--m@v1--x", {"emptyDir": {"sizeLimit": "200Gi"}}),
        (
            {"source": "hf://org/m", "cache": {"size": "1Gi"}},
            "/models/org--m@main",
            {"persistentVolumeClaim": {"claimName": "chat-models"}},
        ),
        (
            {"source": "hf://org/m", "cache": {"claimName": "shared"}},
            "/models/org--m@main",
            {"persistentVolumeClaim": {"claimName": "shared"}},
        ),
    ],
)
def test_model_source_sets_path_and_volume(
    pod: Pod, model: dict[str, Any], path: str, volume: dict[str, Any] | None
) -> None:
    made = pod(model=model)
    engine = engine_of(made)
    assert engine["args"][:2] == ["--model", path]
    assert volumes(made).get("models") == volume
    assert mounts(engine).get("/models") == (None if volume is None else True), "the engine only reads it"


KEYED: dict[str, Any] = {"model": {"source": "hf://org/m"}, "auth": {"secretName": "keys"}}


@pytest.mark.parametrize(
    ("engine", "default", "policy"),
    [({}, None, None), ({}, PullPolicy.ALWAYS, "Always"), ({"imagePullPolicy": "Never"}, PullPolicy.ALWAYS, "Never")],
)
def test_every_container_has_the_pull_policy(
    pod: Pod, engine: dict[str, Any], default: PullPolicy | None, policy: str | None
) -> None:
    made = pod(images=Images(engine="e", pull_policy=default), engine=engine, **KEYED)
    containers = made["initContainers"] + made["containers"]
    assert [container.get("imagePullPolicy") for container in containers] == [policy] * 3


def test_no_volume_of_a_pod_can_fill_its_node(pod: Pod) -> None:
    made = pod(images=Images(engine="e", model_size_limit="30Gi"), **KEYED)
    limits = {v["name"]: v["emptyDir"].get("sizeLimit") for v in made["volumes"] if "emptyDir" in v}
    assert limits == {"tmp": "2Gi", "cache": "16Gi", "shm": "256Mi", "models": "30Gi"}


def test_a_hub_model_is_fetched_before_the_engine_starts(make: Callable[..., Any]) -> None:
    images = Images(engine="e", hub_endpoint="http://mirror")
    model = {"source": "hf://org/m@v1", "credentials": {"secretName": "hub"}}
    body: Any = make(images=images, model=model).workload.body
    (fetch,) = body["spec"]["template"]["spec"]["initContainers"]
    assert fetch["image"] == "e", "the engine's, so that an upgrade of the operator restarts nothing"
    command = [*fetch["command"], *fetch["args"]]
    assert command[:4] == ["quire-fetch", "hf://org/m@v1", "--to", "/models/org--m@v1"]
    env = {entry["name"]: entry for entry in fetch["env"]}
    assert env["HF_ENDPOINT"]["value"] == "http://mirror"
    assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert mounts(fetch)["/models"] is False
    engine = engine_of(body["spec"]["template"]["spec"])
    assert "HF_TOKEN" not in {entry["name"] for entry in engine["env"]}, "the engine needs no secret"


def test_missing_keys_are_checked_first(pod: Pod) -> None:
    made = pod(auth={"secretName": "team-keys"}, model={"source": "hf://org/m"}, engine={"image": "mine:2"})
    check, fetch = made["initContainers"]
    assert (check["name"], fetch["name"]) == ("check-api-keys", "fetch-model")
    assert fetch["image"] == "mine:2"
    assert [*check["command"], *check["args"]] == ["quire-engine", "--version"] and check["image"] == "mine:2"
    (variable,) = check["env"]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "team-keys", "key": "keys"}}, "not optional"
    assert check["securityContext"] == engine_of(made)["securityContext"]

    engine = engine_of(made)
    assert engine["args"][-2:] == ["--api-key-file", "/etc/quire/api-keys/keys"]
    assert mounts(engine)["/etc/quire/api-keys"] is True
    assert not [entry for container in (engine, fetch) for entry in container["env"] if "valueFrom" in entry]
    secret = volumes(made)["api-keys"]["secret"]
    assert secret["secretName"] == "team-keys" and secret["optional"] is True
    assert secret["items"] == [{"key": "keys", "path": "keys"}]


def test_no_key_volume_without_auth(pod: Pod) -> None:
    assert "api-key" not in str(pod())


def test_library_caches_are_in_writable_volumes(pod: Pod) -> None:
    engine = engine_of(pod())
    env = {entry["name"]: entry["value"] for entry in engine["env"]}
    writable = [path for path, read_only in mounts(engine).items() if not read_only]
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert any(env[name] == path or env[name].startswith(f"{path}/") for path in writable), name


def test_path_outside_the_models_volume_is_refused(problems: Problems) -> None:
    assert "is outside /models" in problems(model={"source": "file://../m"})["spec.model.source"]


def test_pod_template_lists_are_merged_by_name(pod: Pod) -> None:
    made = pod(
        podTemplate={
            "spec": {
                "nodeSelector": {"gpu": "h100"},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                "priorityClassName": "high",
                "volumes": [
                    {"name": "shm", "emptyDir": {"sizeLimit": "8Gi"}},
                    {"name": "extra", "configMap": {"name": "x"}},
                ],
                "containers": [
                    {
                        "name": "engine",
                        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "HOME", "value": "/home"}],
                        "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
                        "startupProbe": {"failureThreshold": 999},
                    },
                    {"name": "sidecar", "image": "s", "securityContext": SAFE},
                ],
            }
        }
    )
    assert made["nodeSelector"] == {"gpu": "h100"} and made["priorityClassName"] == "high"
    assert made["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert [container["name"] for container in made["containers"]] == ["engine", "sidecar"]
    engine = engine_of(made)
    env = {entry["name"]: entry["value"] for entry in engine["env"]}
    assert (env["NCCL_DEBUG"], env["HOME"], env["XDG_CACHE_HOME"]) == ("INFO", "/home", "/cache")
    assert {"/extra", "/tmp", "/dev/shm"} <= mounts(engine).keys()
    assert volumes(made)["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert (engine["startupProbe"]["failureThreshold"], engine["startupProbe"]["periodSeconds"]) == (999, 5)


ENGINE_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "privileged engine": ({"securityContext": {"privileged": True}}, "securityContext.privileged"),
    "another port": ({"ports": [{"containerPort": 9000}]}, "ports"),
    "other arguments": ({"args": ["--port", "1"]}, "args"),
    "another image": ({"image": "x"}, "image"),
    "no readiness probe": ({"readinessProbe": None}, "readinessProbe"),
    "another question": ({"livenessProbe": {"httpGet": {"path": "/"}}}, "livenessProbe"),
    "no drain": ({"lifecycle": None}, "lifecycle"),
    "another /tmp": ({"volumeMounts": [{"name": "cache", "mountPath": "/tmp"}]}, "volumeMounts[mountPath=/tmp]"),
    "our capabilities back": (
        {"securityContext": {"capabilities": {"drop": ["CHOWN"]}}},
        "securityContext.capabilities.drop",
    ),
    "a root that can be written": (
        {"securityContext": {"readOnlyRootFilesystem": False}},
        "securityContext.readOnlyRootFilesystem",
    ),
    "no promise of security": ({"securityContext": None}, "securityContext.allowPrivilegeEscalation"),
    "other resources": ({"resources": {"limits": {"memory": "1Gi"}}}, "resources.limits"),
    "flags by other objects": (
        {"envFrom": [{"secretRef": {"name": "s"}}, {"prefix": "QUIRE_ENGINE_", "configMapRef": {"name": "c"}}]},
        "envFrom[1].prefix",
    ),
    "flags by unknown keys": ({"env": [{"name": "QUIRE_FLAGS_ONLY", "value": ""}]}, "env[name=QUIRE_FLAGS_ONLY]"),
    "flags by the environment": ({"env": [{"name": "QUIRE_ENGINE_PORT", "value": "9"}]}, "env[name=QUIRE_ENGINE_PORT]"),
    "silence at the end": ({"terminationMessagePolicy": "File"}, "terminationMessagePolicy"),
    "a probe that asks twice": ({"livenessProbe": {"exec": {"command": ["true"]}}}, "livenessProbe"),
}
"""Fields of the engine's container, and the path of the problem in it."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too little grace": ({"spec": {"terminationGracePeriodSeconds": 30}}, "spec.terminationGracePeriodSeconds"),
    "no engine": ({"spec": {"containers": [{"name": "engine", "$patch": "delete"}]}}, "spec.containers[name=engine]"),
    "another selector": (
        {"metadata": {"labels": {"quire.dev/llmdeployment": "x"}}},
        "metadata.labels[quire.dev/llmdeployment]",
    ),
    "another container at our port": (
        {"spec": {"containers": [{"name": "s", "ports": [{"containerPort": 8000}]}]}},
        "spec.containers[name=s].ports",
    ),
    "another port of our name, found first": (
        {"spec": {"initContainers": [{"name": "s", "ports": [{"containerPort": 1, "name": "http"}]}]}},
        "spec.initContainers[name=s].ports",
    ),
    "another account": ({"spec": {"serviceAccountName": "admin"}}, "spec.serviceAccountName"),
    "another account by its old name": ({"spec": {"serviceAccount": "admin"}}, "spec.serviceAccount"),
    "links of services": ({"spec": {"enableServiceLinks": True}}, "spec.enableServiceLinks"),
    "a node of its own": ({"spec": {"nodeName": "gpu-1"}}, "spec.nodeName"),
    "a volume called like ours": (
        {"spec": {"volumes": [{"name": "tmp", "hostPath": {"path": "/"}}]}},
        "spec.volumes[name=tmp]",
    ),
    "a volume of ours away": ({"spec": {"volumes": [{"name": "shm", "$patch": "delete"}]}}, "spec.volumes[name=shm]"),
    "an unknown section": ({"nodeSelector": {"a": "b"}}, "nodeSelector"),
    **{
        name: (with_engine(**fields), f"spec.containers[name=engine].{path}")
        for name, (fields, path) in ENGINE_REFUSED.items()
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_pod_template_that_breaks_the_contract_is_refused(problems: Problems, case: str) -> None:
    template, path = REFUSED[case]
    assert f"spec.podTemplate.{path}" in problems(podTemplate=template)


def test_key_and_download_containers_may_not_be_changed(problems: Problems) -> None:
    template = {
        "spec": {
            "initContainers": [{"name": "check-api-keys", "command": ["true"]}, {"name": "fetch-model", "image": "x"}],
            "volumes": [{"name": "api-keys", "secret": {"secretName": "other"}}],
            "containers": [{"name": "engine", "volumeMounts": [{"name": "tmp", "mountPath": "/etc/quire/api-keys"}]}],
        }
    }
    found = problems(podTemplate=template, auth={"secretName": "keys"}, model={"source": "hf://a/b"})
    assert set(found) == {
        "spec.podTemplate.spec.initContainers[name=check-api-keys].command",
        "spec.podTemplate.spec.initContainers[name=fetch-model].image",
        "spec.podTemplate.spec.volumes[name=api-keys]",
        "spec.podTemplate.spec.containers[name=engine].volumeMounts[mountPath=/etc/quire/api-keys]",
    }


ALLOWED: dict[str, dict[str, Any]] = {
    "a cache that lasts": {"spec": {"volumes": [{"name": "cache", "emptyDir": None, "persistentVolumeClaim": {}}]}},
    "a larger /tmp": {"spec": {"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "9Gi"}}]}},
    "claims of devices": with_engine(resources={"claims": [{"name": "gpu"}]}),
    "a sidecar with ports": {
        "spec": {"containers": [{"name": "s", "securityContext": SAFE, "ports": [{"containerPort": 9, "name": "m"}]}]}
    },
    "another seccomp profile": {
        "spec": {"securityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": "p"}}}
    },
    "a proxy for downloads": {
        "spec": {"initContainers": [{"name": "fetch-model", "env": [{"name": "HTTPS_PROXY", "value": "http://p"}]}]}
    },
    "another user": {"spec": {"securityContext": {"runAsUser": 1000, "fsGroup": 1000}}},
    "other spreading": {
        "spec": {"topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "X"}]}
    },
}


@pytest.mark.parametrize("case", ALLOWED)
def test_harmless_pod_template_fields_are_allowed(children: Callable[..., Any], case: str) -> None:
    assert children(podTemplate=ALLOWED[case], model={"source": "hf://a/b"})


def test_all_problems_are_found_at_once(problems: Problems) -> None:
    template = {"spec": {"hostNetwork": True, "containers": [{"name": "engine", "args": []}, {"image": "nameless"}]}}
    assert len(problems(podTemplate=template, model={"source": "file://../m"})) == 4
