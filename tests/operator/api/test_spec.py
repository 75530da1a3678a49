"""A document becomes values with defaults, or all its problems; nothing is raised for any content."""

from collections.abc import Mapping
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused_specs import REFUSED, Refusal
from specs import llmdeployment

from quire_operator.api import (
    AccessMode,
    Autoscaling,
    AutoscalingMode,
    BucketSource,
    ClaimSource,
    DType,
    FileSource,
    HubSource,
    ImageSource,
    Invalid,
    KVCache,
    LatencyTarget,
    MetricsSource,
    ModelCache,
    PolicyType,
    Preemption,
    PrefixCaching,
    PullSecret,
    RolloutStrategy,
    ScaleDown,
    ScaleUp,
    ScalingTargets,
    SelectPolicy,
    Spec,
    StepPolicy,
)


def document(spec: Mapping[str, object] | None = None, **metadata: object) -> dict[str, object]:
    return llmdeployment(metadata) | {"spec": {"model": {"source": "file://./m"}, **(spec or {})}}


def nested(levels: int) -> dict[str, object]:
    body: dict[str, object] = {"a": 1}
    for _ in range(levels - 1):
        body = {"a": body}
    return body


def parsed(spec: Mapping[str, object] | None = None) -> Spec:
    outcome = Spec.parse(document(spec))
    assert isinstance(outcome, Spec), str(outcome)
    return outcome


def reasons(body: Mapping[str, object]) -> list[str]:
    outcome = Spec.parse(body)
    assert isinstance(outcome, Invalid)
    return [str(problem) for problem in outcome.problems]


PODS_PER_MINUTE = {"type": "Pods", "value": 2, "periodSeconds": 60}
TENTH = {"type": "Percent", "value": 10, "periodSeconds": 30}
DAY = {"cron": "0 8 * * *", "duration": "1h"}


def engine(**fields: object) -> dict[str, object]:
    return {"engine": fields}


def speculating(**fields: object) -> dict[str, object]:
    return engine(speculation=fields)


def scaled(**fields: object) -> dict[str, object]:
    return {"autoscaling": {"maxReplicas": 4} | fields}


def test_only_the_source_is_needed_and_the_rest_has_defaults() -> None:
    spec = parsed()
    assert (spec.name, spec.namespace, spec.replicas, spec.autoscaling) == ("chat", "prod", 1, None)
    assert spec.model.served_name == "chat"
    assert spec.model.source == FileSource(path="m", relative=True)
    assert spec.engine.kv_cache == KVCache(memory_percent=90)
    assert (spec.engine.dtype, spec.engine.max_model_length, spec.engine.block_size) == (DType.AUTO, None, 16)
    assert (spec.engine.max_sequences, spec.engine.max_batched_tokens) == (256, 2048)
    assert (spec.engine.prefix_caching, spec.engine.preemption) == (PrefixCaching.ENABLED, Preemption.AUTO)
    assert (spec.rollout.strategy, spec.rollout.max_surge) == (RolloutStrategy.ROLLING_UPDATE, 1)
    assert spec.drain.timeout_seconds == 120.0


def test_autoscaling_has_the_defaults_of_the_design() -> None:
    assert parsed({"autoscaling": {"maxReplicas": 8}}).autoscaling == Autoscaling(
        mode=AutoscalingMode.ENFORCE,
        min_replicas=1,
        max_replicas=8,
        metrics_source=None,
        targets=ScalingTargets(
            queue_depth=None,
            kv_usage_percent=None,
            first_token_wait=None,
            total_time_to_first_token=None,
            inter_token_latency=None,
            time_to_first_token=None,
        ),
        scale_up=ScaleUp.steps(window_seconds=0.0, max_percent=100, max_step=4, period_seconds=15.0),
        scale_down=ScaleDown.steps(window_seconds=300.0, max_step=1, period_seconds=60.0),
    )


def test_every_spec_field_is_parsed() -> None:
    spec = parsed(
        {
            "model": {
                "source": "hf://meta-llama/Llama-3.1-8B-Instruct@refs/pr/1",
                "servedName": "meta-llama/Llama-3.1-8B",
                "credentials": {"secretName": "hf"},
                "cache": {"size": "50Gi", "storageClassName": "fast", "accessMode": "ReadWriteMany"},
            },
            "engine": {
                "image": "registry.example/engine:1",
                "imagePullSecrets": [{"name": "pull"}],
                "dtype": "BFloat16",
                "maxModelLength": 8192,
                "maxBatchedTokens": 4096,
                "maxSequences": 64,
                "blockSize": 32,
                "kvCache": {"size": "4Gi"},
                "prefixCaching": "Disabled",
                "preemption": "Swap",
                "swapSpace": "2Gi",
                "schedulingPolicy": "Fair",
                "extraArgs": ["--seed", "7"],
            },
            "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}, "requests": {"cpu": "500m"}},
            "replicas": 2,
            "autoscaling": {
                "mode": "Recommend",
                "minReplicas": 2,
                "maxReplicas": 8,
                "metricsSource": "Prometheus",
                "targets": {
                    "queueDepth": 4,
                    "kvUsagePercent": 80,
                    "timeToFirstToken": {"percentile": 99, "threshold": "500ms"},
                },
                "scaleUp": {"window": "15s", "maxPercent": 50, "maxStep": 2, "period": "30s"},
                "scaleDown": {"window": "10m", "maxStep": 2, "period": "1m30s"},
            },
            "rollout": {"strategy": "RollingUpdate", "maxSurge": 0, "maxUnavailable": 1},
            "drain": {"timeout": "5m"},
            "podTemplate": {"spec": {"nodeSelector": {"pool": "gpu"}}},
        }
    )
    assert spec.model.source == HubSource(repository="meta-llama/Llama-3.1-8B-Instruct", revision="refs/pr/1")
    assert spec.model.cache == ModelCache(
        size_bytes=50 * 2**30, storage_class_name="fast", access_mode=AccessMode.READ_WRITE_MANY
    )
    assert spec.model.credentials_secret == "hf"
    assert spec.engine.kv_cache == KVCache(size_bytes=4 * 2**30)
    assert spec.engine.image_pull_secrets == (PullSecret(name="pull"),)
    assert spec.engine.extra_args == ("--seed", "7")
    assert (spec.resources.gpus, spec.resources.memory_limit_bytes) == (1, 64 * 2**30)
    assert spec.resources.limits["nvidia.com/gpu"] == "1"
    assert spec.autoscaling is not None
    assert spec.autoscaling.metrics_source is MetricsSource.PROMETHEUS
    assert spec.autoscaling.targets.time_to_first_token == LatencyTarget(percentile=99, threshold_seconds=0.5)
    assert spec.autoscaling.scale_down == ScaleDown.steps(window_seconds=600.0, max_step=2, period_seconds=90.0)
    assert spec.pod_template == {"spec": {"nodeSelector": {"pool": "gpu"}}}


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hf://gpt2", HubSource(repository="gpt2", revision="main")),
        ("hf://org/name@v1.0", HubSource(repository="org/name", revision="v1.0")),
        ("file:///srv/models/m/", FileSource(path="/srv/models/m", relative=False)),
        ("file://./models//m", FileSource(path="models/m", relative=True)),
        ("file://../m", FileSource(path="../m", relative=True)),
        ("pvc://models/llama/8b", ClaimSource(claim_name="models", path="llama/8b")),
        ("pvc://models", ClaimSource(claim_name="models", path="")),
        ("s3://bucket/a/b/", BucketSource(bucket="bucket", prefix="a/b")),
        ("s3://bucket", BucketSource(bucket="bucket", prefix="")),
        (
            "s3://bucket/m?region=eu-west-1&endpoint=http://minio:9000",
            BucketSource(bucket="bucket", prefix="m", region="eu-west-1", endpoint="http://minio:9000"),
        ),
        (
            "oci://reg.example/org/m:1/models//m",
            ImageSource(registry="reg.example", repository="org/m", tag="1", digest=None, path="models/m"),
        ),
        (
            f"oci://localhost:5000/m@sha256:{'0' * 64}",
            ImageSource(registry="localhost:5000", repository="m", tag=None, digest=f"sha256:{'0' * 64}"),
        ),
    ],
)
def test_sources(text: str, source: object) -> None:
    read = parsed({"model": {"source": text}}).model.source
    assert read == source
    assert parsed({"model": {"source": str(read)}}).model.source == source  # the source that pods download


@pytest.mark.parametrize(
    "speculation", [{"method": "NGram"}, {"method": "DraftModel", "draft": {"source": "hf://a/b"}}]
)
def test_gpu_replicas_speculate(speculation: dict[str, object]) -> None:
    resources = {"limits": {"nvidia.com/gpu": "1"}}
    spec = parsed({"engine": {"speculation": speculation}, "resources": resources})
    assert spec.engine.speculation is not None and spec.resources.gpus == 1


def test_existing_claim_can_be_the_cache() -> None:
    model = {"source": "hf://a/b", "cache": {"claimName": "models"}}
    assert parsed({"model": model}).model.cache == ModelCache(claim_name="models")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"model": {"source": "pvc://claim/../other"}}, "model.source: must be"),
        ({"model": {"source": "hf://a/b/c"}}, "model.source: must be"),
        ({"model": {"source": "s3://bucket/m?endpoint=minio"}}, 'model.source: must be "s3://bucket/path"'),
        ({"model": {"source": "oci://reg.example/m:1/../x"}}, "model.source: must be a registry, a name and"),
        (engine(kvCache={"size": "0"}), "engine.kvCache.size: must be an amount of memory"),
        (
            {"parallelism": {"tensor": 4, "nodes": 3}, "resources": {"limits": {"nvidia.com/gpu": 1}}},
            "parallelism.nodes: must divide tensor × pipeline",
        ),
        ({"model": {"source": 7}}, "model.source: must be a non-empty string, got 7"),
        ({"model": "hf://a/b"}, 'model: must be a mapping, got "hf://a/b"'),
        *(
            ({"model": {"source": "hf://a/b", "servedName": name}}, "model.servedName: must start and end with")
            for name in ("two words", "team/", "team.", "-", "/team", "é", "a" * 129)
        ),
        (engine(maxSequnces=4), "engine.maxSequnces: unknown field; did you mean maxSequences?"),
        (engine(maxSequences=True), "engine.maxSequences: must be a whole number, got true"),
        (engine(maxSequences=4.5), "engine.maxSequences: must be a whole number, got 4.5"),
        (engine(maxSequences="4"), 'engine.maxSequences: must be a whole number, got "4"'),
        (engine(maxSequences=10**30), "engine.maxSequences: must be <= 2147483647"),
        (engine(dtype="bfloat16"), "did you mean BFloat16?"),
        (engine(speculation={}), "engine.speculation.method: is required"),
        (speculating(method="ngram"), "did you mean NGram?"),
        (speculating(method="DraftModel", draft={}), "engine.speculation.draft.source: is required"),
        (speculating(method="DraftModel", draft={"source": "a/b"}), "engine.speculation.draft.source: must be"),
        (engine(extraArgs=["--spec-model", "/m"]), "--spec-model is set by spec.engine.speculation.draft.source"),
        (engine(imagePullPolicy="always"), "engine.imagePullPolicy: must be Always, IfNotPresent or Never"),
        (engine(imagePullSecrets=["x"]), "engine.imagePullSecrets[0]: must be a mapping"),
        (engine(imagePullSecrets=[{"name": "a"}] * 17), "imagePullSecrets: must have at most 16 entries, got 17"),
        (
            engine(extraArgs=["--response-store-memory=1GiB"]),
            "extraArgs[0]: --response-store-memory was removed: the en",
        ),
        (engine(extraArgs=["--seed"] * 65), "engine.extraArgs: must have at most 64 entries, got 65"),
        ({"parallelism": {"data": 2}}, "parallelism.data: unknown field"),
        ({"resources": {"limits": {"nvidia.com/gpu": 2}}}, "parallelism.tensor: each rank uses one GPU"),
        (
            {"parallelism": {"tensor": 2}, "resources": {"limits": {"nvidia.com/gpu": 1}}},
            "parallelism.tensor: each rank uses one GPU",
        ),
        (
            {"parallelism": {"tensor": 2, "pipeline": 2}, "resources": {"limits": {"nvidia.com/gpu": 2}}},
            "parallelism.tensor: each rank uses one GPU",
        ),
        (
            {"parallelism": {"tensor": 4, "nodes": 2}, "resources": {"limits": {"nvidia.com/gpu": 4}}},
            "parallelism.tensor: each rank uses one GPU",
        ),
        (
            {"parallelism": {"tensor": 2}, "resources": {"limits": {"nvidia.com/gpu": 2, "cpu": 1}}},
            "parallelism.tensor: must be at most resources.limits.cpu",
        ),
        (
            {"parallelism": {"tensor": 2}, "resources": {"limits": {"cpu": "1500m"}}},
            "parallelism.tensor: must be at most resources.limits.cpu",
        ),
        (
            {"parallelism": {"tensor": 2}, "engine": {"adapters": {}}},
            "parallelism.tensor: does not work with engine.adapters",
        ),
        (
            {"parallelism": {"tensor": 2}} | speculating(method="DraftModel", draft={"source": "hf://a/small"}),
            "parallelism.tensor: does not work with engine.speculation.draft",
        ),
        (
            engine(extraArgs=["--tensor-parallel-size", "2"]),
            "extraArgs[0]: --tensor-parallel-size is set by spec.parallelism.tensor; set it there",
        ),
        (
            {"engine": {"extraArgs": ["--quantization=fp8"]}, "resources": {"limits": {"amd.com/gpu": 1}}},
            "engine.extraArgs: has --quantization fp8, which is for GPUs of NVIDIA in this version",
        ),
        (
            {"resources": {"limits": {"nvidia.com/gpu": 1, "amd.com/gpu": 1}}},
            "resources.limits: has nvidia.com/gpu and amd.com/gpu, and a replica uses GPUs of one kind",
        ),
        (
            {"resources": {"limits": {"nvidia.com/gpu": 1, "nvidia.com/mig-3g.40gb": 1}}},
            "resources.limits: has nvidia.com/gpu and nvidia.com/mig-3g.40gb, and a replica uses GPUs of one kind",
        ),
        (
            {"resources": {"limits": {"nvidia.com/mig-1g.5gb": 1}, "requests": {"nvidia.com/mig-2g.10gb": 1}}},
            "resources.limits: has nvidia.com/mig-1g.5gb and nvidia.com/mig-2g.10gb",
        ),
        ({"resources": {"limits": {"nvidia.com/mig-3g.40gb": "500m"}}}, "must be a whole number of GPUs"),
        ({"resources": {"limits": {"nvidia.com/mig-3g.40gb": 2}}}, "parallelism.tensor: each rank uses one GPU"),
        (
            {"parallelism": {"tensor": 2}, "resources": {"limits": {"nvidia.com/mig-3g.40gb": 2}}},
            "parallelism.tensor: does not work with MIG slices",
        ),
        (
            {"parallelism": {"pipeline": 2, "nodes": 2}, "resources": {"limits": {"nvidia.com/mig-3g.40gb": 1}}},
            "parallelism.tensor: does not work with MIG slices",
        ),
        (
            {"parallelism": {"tensor": 2}, "resources": {"limits": {"nvidia.com/gpu.shared": 2}}},
            "parallelism.tensor: does not work with MIG slices and shared GPUs",
        ),
        *(
            ({"resources": {where: {name: 1}}}, f"resources.{where}: {name} is a device that the engine does not use")
            for where in ("limits", "requests")
            for name in ("gpu.intel.com/i915", "habana.ai/gaudi", "google.com/tpu", "amd.com/cpx_nps4")
        ),
        (
            {"parallelism": {"tensor": 2}, "resources": {"limits": {"amd.com/gpu": 1}}},
            "parallelism.tensor: each rank uses one GPU",
        ),
        ({"autoscaling": {"maxReplicas": 2, "mode": "enforce"}}, "did you mean Enforce?"),
        ({"rollout": {"canary": {}}}, "rollout.canary: is used by strategy Canary only"),
        ({"auth": {"secretName": "My Keys"}}, "auth.secretName: must be the name of a Kubernetes object"),
        (engine(extraArgs=["--api-key-file", "/k"]), "extraArgs[0]: --api-key-file is set by spec.auth"),
        (engine(extraArgs=["--metrics-key-file=/k"]), "extraArgs[0]: --metrics-key-file"),
        (engine(extraArgs=["--device", "cpu"]), "extraArgs[0]: --device is set by spec.resources"),
        (engine(extraArgs=["--kv-cache-dtype", "fp8"]), "extraArgs: has --kv-cache-dtype fp8, which needs a"),
        (engine(extraArgs=["--kv-cache-dtype=fp8"]), "set spec.resources.limits[nvidia.com/gpu] to 1"),
        (
            {"engine": {"extraArgs": ["--quantization", "int8"]}, "resources": {"limits": {"nvidia.com/gpu": 1}}},
            "extraArgs: has --quantization int8, which is for CPUs",
        ),
        (engine(extraArgs=["--quantization=fp8"]), "extraArgs: has --quantization fp8, which needs a GPU"),
        (
            {
                "engine": {"extraArgs": ["--quantization=fp8"], "dtype": "Float16"},
                "resources": {"limits": {"nvidia.com/gpu": 1}},
            },
            "extraArgs: has --quantization fp8, which computes in bfloat16",
        ),
        (
            scaled(schedules=[DAY | {"minReplicas": 5}]),
            "schedules[0].minReplicas: must be at most spec.autoscaling.maxReplicas (4), got 5",
        ),
        (
            scaled(minReplicas=2, schedules=[DAY | {"maxReplicas": 1}]),
            "schedules[0].maxReplicas: must be at least spec.autoscaling.minReplicas (2), got 1",
        ),
        (
            scaled(schedules=[DAY | {"minReplicas": 3, "maxReplicas": 2}]),
            "schedules[0].maxReplicas: must be at least minReplicas (3), got 2",
        ),
        (scaled(schedules=[DAY | {"minReplicas": 2, "zone": "UTC"}]), "schedules[0].zone: unknown field"),
        (
            scaled(schedules=[DAY | {"minReplicas": 2}] * 17),
            "autoscaling.schedules: must have at most 16 entries, got 17",
        ),
        (
            scaled(scaleUp={"maxStep": 2}, behavior={"scaleUp": {}}),
            "autoscaling.behavior.scaleUp: limits the same as spec.autoscaling.scaleUp; keep one",
        ),
        (
            scaled(scaleDown={"window": "10m"}, behavior={"scaleDown": {}}),
            "autoscaling.behavior.scaleDown: limits the same as spec.autoscaling.scaleDown; keep one",
        ),
        (
            scaled(behavior={"scaleUp": {"policies": []}}),
            "autoscaling.behavior.scaleUp.policies: must have between 1 and 10 entries, got 0",
        ),
        (
            scaled(behavior={"scaleUp": {"selectPolicy": "min"}}),
            "autoscaling.behavior.scaleUp.selectPolicy: must be Max, Min or Disabled",
        ),
        (scaled(behavior={"scaleUp": {"tolerance": "0.1"}}), "autoscaling.behavior.scaleUp.tolerance: unknown field"),
        (
            scaled(minReplicas=0, behavior={"scaleUp": {"selectPolicy": "Disabled"}}),
            "autoscaling.behavior.scaleUp.selectPolicy: must not be Disabled while minReplicas is 0",
        ),
        ({"rollout": {"maxSurge": "0%"}}, "rollout.maxUnavailable: must be at least 1"),
        ({"rollout": {"maxSurge": 0, "maxUnavailable": "0%"}}, "rollout.maxUnavailable: must be at least 1"),
        ({"rollout": {"maxSurge": "25"}}, "rollout.maxSurge: must be a whole number or a percentage"),
        ({"rollout": {"maxUnavailable": "-5%"}}, "rollout.maxUnavailable: must be a whole number or a percentage"),
        ({"rollout": {"progressDeadline": "9s"}}, "rollout.progressDeadline: must be >= 10s"),
        ({"podTemplate": []}, "podTemplate: must be a mapping, got a list"),
        ({"podTemplate": {1: "a"}}, "podTemplate: must have keys that are strings, got 1: write it in quotes"),
        ({"podTemplate": {"a": [{True: 1}]}}, "podTemplate: must have keys that are strings, got true"),
        ({"podTemplate": {"a": date(2030, 1, 1)}}, "podTemplate: must have values of JSON, got a date"),
        ({"podTemplate": nested(51)}, "podTemplate: must be nested at most 50 levels deep"),
        ({"podTemplate": nested(10000)}, "podTemplate: must be nested at most 50 levels deep"),
        ({"replcas": 2}, "replcas: unknown field; did you mean replicas?"),
    ],
)
def test_each_wrong_field_is_named_with_valid_values(spec: Mapping[str, object], reason: str) -> None:
    found = reasons(document(spec))
    assert len(found) == 1, found
    assert reason in found[0]


@pytest.mark.parametrize("refusal", REFUSED)
def test_parser_refuses_what_the_api_server_refuses(refusal: Refusal) -> None:
    (found,) = reasons(document(refusal.spec))
    assert found.startswith(f"spec.{refusal.field}") and refusal.says in found


@pytest.mark.parametrize(
    ("args", "index", "reason"),
    [
        (["--sede", "3"], 0, "did you mean --seed?"),
        (["--seed", "3", "--port", "1"], 2, "--port is set by quire itself"),
        (["--max-num-seqs=4"], 0, "--max-num-seqs is set by spec.engine.maxSequences"),
        (["--seed"], 0, "--seed needs a value"),
        (["--seed", "x"], 0, '--seed must be a whole number, got "x"'),
        (["--seed", "1", "--seed", "2"], 2, "--seed is given twice"),
        (["seed"], 0, "must be a flag of the engine"),
        (["--lenient", "yes"], 1, "must be a flag of the engine"),
        (["--load-format", "gguf"], 0, "--load-format must be auto, safetensors or dummy"),
    ],
)
def test_extra_arguments_are_checked_against_the_engines_flags(args: list[str], index: int, reason: str) -> None:
    found = reasons(document({"engine": {"extraArgs": args}}))
    assert len(found) == 1, found
    assert found[0].startswith(f"spec.engine.extraArgs[{index}]: ")
    assert reason in found[0]


def test_passed_through_fields_may_be_deeply_nested() -> None:
    assert parsed({"podTemplate": nested(50)}).pod_template == nested(50)


def test_all_problems_are_reported_at_once() -> None:
    found = reasons(
        {
            "apiVersion": "v1",
            "kind": "Deployment",
            "metadata": {"name": "Not A Name"},
            "spec": {
                "model": {},
                "engine": {"blockSize": 3, "dtype": "int4"},
                "replicas": "two",
                "drain": {"timeout": "soon"},
            },
            "sepc": {},
        }
    )
    starts = ["apiVersion:", "kind:", "metadata.name:", "spec.model.source:", "spec.engine.dtype:"]
    starts += ["spec.engine.blockSize:", "spec.replicas:", "spec.drain.timeout:", "sepc:"]
    assert len(found) == len(starts)
    assert all(any(reason.startswith(start) for reason in found) for start in starts), found


@pytest.mark.parametrize("body", [{}, {"spec": None}, {"metadata": []}, {"spec": []}])
def test_empty_document_lists_required_fields(body: dict[str, object]) -> None:
    found = reasons(body)
    assert any("apiVersion: is required" in reason for reason in found)
    assert any(reason.startswith("spec") for reason in found)


def test_null_counts_as_unset() -> None:
    spec = parsed({"autoscaling": None, "engine": None, "replicas": None})
    assert (spec.autoscaling, spec.replicas) == (None, 1)


def test_status_and_foreign_metadata_are_ignored() -> None:
    body = document(labels={"a": "b"}, resourceVersion="3", managedFields=[]) | {"status": {"replicas": 3}}
    assert isinstance(Spec.parse(body), Spec)


@pytest.mark.parametrize(("replicas", "initial"), [(1, 2), (3, 3), (9, 4)])
def test_autoscaling_starts_from_replicas_within_its_bounds(replicas: int, initial: int) -> None:
    spec = parsed({"replicas": replicas, "autoscaling": {"minReplicas": 2, "maxReplicas": 4}})
    assert spec.initial_replicas == initial


FIELD_NAMES = st.sampled_from(
    [
        *("apiVersion", "kind", "metadata", "name", "namespace", "spec", "model", "source", "servedName", "cache"),
        *("size", "claimName", "engine", "dtype", "kvCache", "memoryPercent", "extraArgs", "blockSize"),
        *("maxSequences", "maxBatchedTokens", "imagePullSecrets", "resources", "limits", "requests"),
        *("nvidia.com/gpu", "memory", "autoscaling", "minReplicas", "maxReplicas", "targets", "timeToFirstToken"),
        *("threshold", "scaleUp", "window", "rollout", "strategy", "maxSurge", "drain", "timeout", "podTemplate"),
        *("replicas"),
    ]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(
        ["quire.dev/v1alpha1", "LLMDeployment", "chat", "hf://a/b", "file://./m", "4Gi", "1e99", "300s", "--seed", "-"]
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(FIELD_NAMES | st.text(max_size=5) | st.integers(), inner, max_size=6)
    ),
    max_leaves=25,
)


@given(VALUES)
def test_parsing_any_document_never_raises(body: object) -> None:
    outcome = Spec.parse(body)  # type: ignore[arg-type]
    assert isinstance(outcome, Spec) or outcome.problems
    if isinstance(outcome, Invalid):
        assert all(len(str(problem)) < 1500 for problem in outcome.problems)


@given(st.dictionaries(FIELD_NAMES, VALUES, max_size=8))
def test_parsing_any_spec_never_raises(spec: dict[str, object]) -> None:
    outcome = Spec.parse(document(spec))
    assert isinstance(outcome, Spec) or outcome.problems


def behavior(**directions: object) -> Autoscaling:
    found = parsed({"autoscaling": {"maxReplicas": 8, "behavior": directions}}).autoscaling
    assert found is not None
    return found


def test_behavior_of_an_hpa_is_understood_with_its_defaults() -> None:
    found = behavior(
        scaleUp={"stabilizationWindowSeconds": 30, "selectPolicy": "Min", "policies": [PODS_PER_MINUTE, TENTH]},
        scaleDown={},
    )
    assert found.scale_up == ScaleUp(
        window_seconds=30.0,
        policies=(
            StepPolicy(type=PolicyType.PODS, value=2, period_seconds=60.0),
            StepPolicy(type=PolicyType.PERCENT, value=10, period_seconds=30.0),
        ),
        select=SelectPolicy.MIN,
    )
    whole = StepPolicy(type=PolicyType.PERCENT, value=100, period_seconds=15.0)
    assert found.scale_down == ScaleDown(window_seconds=300.0, policies=(whole,))
    assert behavior(scaleUp={}).scale_up == ScaleUp.steps(
        window_seconds=0.0, max_percent=100, max_step=4, period_seconds=15.0
    )


def test_direction_without_behavior_keeps_its_own_limits() -> None:
    spec = parsed(
        {
            "autoscaling": {
                "maxReplicas": 8,
                "behavior": {"scaleUp": {"policies": [PODS_PER_MINUTE]}},
                # As the API server fills it in, which is no second opinion.
                "scaleUp": {"window": "0s", "maxPercent": 100, "maxStep": 4, "period": "15s"},
                "scaleDown": {"window": "10m", "maxStep": 2, "period": "90s"},
            }
        }
    )
    assert spec.autoscaling is not None
    assert [policy.value for policy in spec.autoscaling.scale_up.policies] == [2]
    assert spec.autoscaling.scale_down == ScaleDown.steps(window_seconds=600.0, max_step=2, period_seconds=90.0)


@pytest.mark.parametrize(
    ("surge", "unavailable"), [("25%", 0), (0, "10%"), ("100%", "100%"), ("0%", 1), ("5%", "0%"), (2, "50%")]
)
def test_rollout_accepts_percentages(surge: object, unavailable: object) -> None:
    found = parsed({"rollout": {"maxSurge": surge, "maxUnavailable": unavailable}}).rollout
    assert (found.max_surge, found.max_unavailable) == (surge, unavailable)
    assert found.surges is (surge != "0%" and surge != 0)
