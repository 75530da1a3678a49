"""Specs that the API server and the parser refuse, for the tests of both: one table of fields, specs and messages."""

from typing import Any, NamedTuple

OBJECT_NAME = "must be a Kubernetes object name: lower-case letters, digits, '-' and '.'"
QUANTITY = 'must be a quantity such as 1, "500m" or "16Gi"'
DAY = 'must be a duration of at most 24h, such as "90s", "500ms" or "1h30m"'
SOURCE = (
    'must be "hf://org/name@revision", "s3://bucket/path", "oci://registry/name:tag", "pvc://claim/path", '
    '"file:///folder" or "file://./folder"'
)
BUCKET = 'must be "s3://bucket/path", optionally followed by ?region=… and &endpoint=https://…'
IMAGE = 'must contain a registry, a name and a tag or digest, such as "oci://registry.example/org/model:1"'


class Refusal(NamedTuple):
    """The field, the spec, the parser's words, and those of the API server if they are others."""

    field: str
    spec: dict[str, Any]
    says: str
    server_says: str = ""


ABSENT = object()


def refused(field: str, value: object, says: str, server_says: str = "", **siblings: object) -> Refusal:
    """Return the refusal of a spec that is valid but for the value of this field, next to these siblings."""
    spec: dict[str, Any] = {"model": {"source": "hf://a/b"}}
    if field.startswith("autoscaling."):
        spec["autoscaling"] = {"maxReplicas": 3}
    section = spec
    *names, last = field.split(".")
    for name in names:
        section = section.setdefault(name, {})
    section.update(siblings)
    section.pop(last, None)
    if value is not ABSENT:
        section[last] = value
    return Refusal(field, spec, says, server_says)


REFUSED = (
    refused("model", None, 'is required: "hf://org/name@revision", "s3://bucket/path", "', "Required value"),
    refused("model.source", ABSENT, "is required", "Required value"),
    refused("model.source", "http://host/model", SOURCE),
    refused("model.source", "hf://", SOURCE),
    refused("model.source", "pvc://Models/llama", SOURCE),
    refused("model.source", "s3://Models/llama", BUCKET),
    refused("model.source", "s3:///llama", BUCKET),
    refused("model.source", "s3://bucket/llama?profile=me", BUCKET),
    refused("model.source", "oci://llama:1", "must be a registry, a name and a tag or digest", IMAGE),
    refused("model.source", "oci://registry.example/llama", "must be a registry, a name and a tag", IMAGE),
    refused("model.source", "oci://registry.example/llama@sha256:ab", "must be a registry, a name and", IMAGE),
    refused("model.source", "file://host/folder", SOURCE),
    refused("model.servedName", "my model", "must start and end with a letter", source="hf://a/b"),
    refused("model.servedName", "team/", "must start and end with a letter", source="hf://a/b"),
    refused("model.credentials.secretName", "HF", "must be the name of a Kubernetes object: lower-case", OBJECT_NAME),
    refused("model.credentials.secretName", ABSENT, "is required", "Required value"),
    refused("model.cache", {}, "set exactly one of claimName", source="hf://a/b"),
    refused("model.cache", {"claimName": "a"}, "does not apply to oci://", source="oci://registry.example/llama:1"),
    refused("model.cache", {"claimName": "a", "size": "1Gi"}, "set exactly one of claimName", source="hf://a/b"),
    refused("model.cache.storageClassName", "fast", "applies only to a claim that quire creates", claimName="a"),
    refused("model.cache.accessMode", "ReadWriteMany", "applies only to a claim that quire creates", claimName="a"),
    refused("model.cache.retain", "Retain", "applies only to a claim that quire creates", claimName="a"),
    refused("model.cache.size", "fifty", 'must be an amount of memory such as "4Gi" or "512Mi"', QUANTITY),
    refused("engine.dtype", "float16", "must be Auto", 'Unsupported value: "float16": supported values: "Auto"'),
    refused("engine.blockSize", 17, "must be one of", 'Unsupported value: 17: supported values: "16", "32", "64"'),
    refused("engine.prefixCaching", True, "must be Enabled or Disabled", "must be of type string"),
    refused("engine.preemption", "Drop", "must be Auto, Swap or", 'supported values: "Auto", "Swap", "Recompute"'),
    refused("engine.preemption", "Swap", "Swap requires swapSpace"),
    refused("engine.preemption", "Swap", "Swap requires swapSpace", swapSpace="0"),
    refused("engine.speculation.method", "Draft", "must be NGram or", 'supported values: "NGram", "DraftModel"'),
    refused("engine.speculation.method", "Eagle", "Eagle was removed: set method to", draft={"source": "hf://a/b"}),
    refused("engine.speculation.draft", ABSENT, "is required with method DraftModel", method="DraftModel"),
    refused("engine.speculation.draft", {"source": "hf://a/b"}, "applies only to method DraftModel", method="NGram"),
    refused("engine.speculation.required", True, "applies only to method DraftModel", method="NGram"),
    refused(
        "engine.speculation.required", False, "cannot be false", method="DraftModel", draft={"source": "pvc://c/s"}
    ),
    refused("engine.speculation.maxTokens", 16, "must be less than blockSize", method="NGram"),
    refused("engine.schedulingPolicy", "fair", "must be FCFS", 'supported values: "FCFS", "Priority", "Fair"'),
    refused("engine.swapSpace", "much", 'must be an amount of memory such as "4Gi"', QUANTITY),
    refused("engine.maxSequences", 0, "must be >= 1, got 0", "greater than or equal to 1"),
    refused("engine.maxModelLength", 2**31, "must be <= 2147483647", "less than or equal to 2147483647"),
    refused("engine.maxBatchedTokens", 256, "must be at least maxSequences", maxSequences=512),
    refused("engine.kvCache.memoryPercent", 101, "must be <= 100, got 101", "less than or equal to 100"),
    refused("engine.kvCache.size", "-4Gi", "must be an amount of memory", QUANTITY),
    refused("engine.kvCache.size", 4.5, "must be an amount of memory", "must be of type integer,string"),
    Refusal("engine.imagePullSecrets[0].name", {"engine": {"imagePullSecrets": [{}]}}, "is required", "Required value"),
    refused("engine.extraArgs", "--a --b", "must be a list", "must be of type array"),
    refused("resources.limits", {"nvidia.com/gpu": "500m"}, "must be a whole", "nvidia.com/gpu must be a whole number"),
    refused("resources.limits", {"amd.com/gpu": "500m"}, "must be a whole", "amd.com/gpu must be a whole number"),
    refused("resources.limits", {"nvidia.com/gpu": 1}, "has nvidia.com/gpu and", requests={"amd.com/gpu": 1}),
    refused("parallelism.tensor", 0, "must be >= 1, got 0", "greater than or equal to 1"),
    refused("parallelism.tensor", 65, "must be <= 64, got 65", "less than or equal to 64"),
    refused("parallelism.nodes", 3, "must divide tensor", tensor=2, pipeline=2),
    refused("parallelism.nodes", 2, "must divide tensor"),
    Refusal("resources.limits[memory]", {"resources": {"limits": {"memory": "much"}}}, QUANTITY),
    refused("replicas", -1, "must be >= 0, got -1", "greater than or equal to 0"),
    refused("replicas", "two", "must be a whole number", "must be of type integer"),
    refused("autoscaling.maxReplicas", ABSENT, "is required", "Required value"),
    refused("autoscaling.maxReplicas", 0, "must be >= 1, got 0", "greater than or equal to 1"),
    refused("autoscaling.maxReplicas", 3, "must be at least minReplicas", minReplicas=4),
    refused("autoscaling.mode", "Observe", "must be Enforce", 'supported values: "Enforce"', maxReplicas=3),
    refused("autoscaling.metricsSource", "StatsD", "must be Prometheus or Pods", "supported values", maxReplicas=3),
    refused("autoscaling.targets.queueDepth", 0, "must be >= 1", "greater than or equal to 1"),
    refused("autoscaling.targets.timeToFirstToken.percentile", 100, "must be <= 99", "less than or equal to 99"),
    refused("autoscaling.targets.timeToFirstToken.threshold", "0s", "must be >= 1ms", "must be a duration between"),
    refused("autoscaling.scaleUp.window", "90", 'must be a duration such as "90s", "500ms" or "1h30m"', DAY),
    refused("autoscaling.scaleDown.window", "2d", "must be a duration", DAY),
    refused("autoscaling.scaleDown.window", "168h", "must be <= 24h", DAY),
    refused("autoscaling.scaleDown.window", "-5s", 'must be a duration such as "90s", "500ms" or "1h30m"', DAY),
    refused("autoscaling.scaleUp.period", "999ms", "must be >= 1s", "must be a duration between 1s and 24h"),
    refused("autoscaling.scaleUp.maxStep", 0, "must be at least 1 while maxPercent is 0", maxPercent=0),
    Refusal(
        "autoscaling.schedules[0].minReplicas",
        {"autoscaling": {"maxReplicas": 3, "schedules": [{"cron": "0 8 * * *", "duration": "1h"}]}},
        "is required, unless maxReplicas is set",
    ),
    Refusal(
        "autoscaling.schedules[0].cron",
        {"autoscaling": {"maxReplicas": 3, "schedules": [{"cron": "8 * * *", "duration": "1h", "minReplicas": 1}]}},
        "must be a cron expression of five fields",
    ),
    Refusal(
        "autoscaling.schedules[0].duration",
        {"autoscaling": {"maxReplicas": 3, "schedules": [{"cron": "0 8 1 * *", "duration": "744h", "minReplicas": 1}]}},
        "must be <= 168h",
        "must be a duration between 1m and 168h",
    ),
    refused(
        "autoscaling.schedules",
        [{"cron": "0 8 * * *", "duration": "1h", "minReplicas": 99}],
        "must be at most",
        "maxReplicas must",
        maxReplicas=3,
    ),
    Refusal(
        "autoscaling.behavior.scaleUp.policies[0].periodSeconds",
        {"autoscaling": {"maxReplicas": 3, "behavior": {"scaleUp": {"policies": [{"type": "Pods", "value": 1}]}}}},
        "is required",
        "Required value",
    ),
    refused("rollout.maxUnavailable", "0%", "must be at least 1 while maxSurge is 0", maxSurge="0%"),
    refused("rollout.maxSurge", "101%", "must be a whole", "must be a whole number of at least 0 or a percentage up"),
    refused("rollout.strategy", "BlueGreen", "must be RollingUpdate, Recreate or Canary", "supported values"),
    refused("rollout.maxUnavailable", ABSENT, "must be at least 1 while maxSurge is 0", maxSurge=0),
    refused("rollout", {"strategy": "Recreate", "maxSurge": 1}, "strategy Recreate does not use maxSurge and"),
    refused("rollout.windows", [], "was removed: rollouts start at once."),
    refused("auth.secretName", ABSENT, "is required", "Required value"),
    refused("drain.timeout", "24h", "must be <= 1h", "must be a duration of at most 1h"),
    refused("drain.timeout", 90, 'must be a duration such as "90s", "500ms" or "1h30m"', "must be of type string"),
    refused("podTemplate", "nodeSelector", "must be a mapping", "must be of type object"),
)
