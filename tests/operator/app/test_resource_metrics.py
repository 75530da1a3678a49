"""LLMDeployments at /metrics: their conditions, replicas and start-up times."""

from datetime import UTC, datetime, timedelta
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from quire_operator.app.resource_metrics import ResourceMetrics
from quire_operator.deployment.store import Store
from quire_operator.kube.objects import Key
from quire_operator.kube.trimming import trim_child, trim_pod, trim_resource

NOW = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)


def ago(seconds: float) -> str:
    return (NOW - timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def put(store: Store, name: str, *, conditions: dict[str, tuple[str, str]], replicas: int = 2, **model: str) -> Key:
    status = {"conditions": [{"type": t, "status": s, "reason": r} for t, (s, r) in conditions.items()]}
    metadata: dict[str, Any] = {"namespace": "prod", "name": name, "uid": name, "resourceVersion": "1"}
    store.put_resource(trim_resource({"metadata": metadata, "spec": {"model": model}, "status": status}))
    key = Key("prod", name)
    owner = {"kind": "LLMDeployment", "name": name, "uid": name, "controller": True}
    child = {"metadata": {**metadata, "ownerReferences": [owner]}, "spec": {"replicas": replicas}, "status": {}}
    store.put_child(key, trim_child(child, kind="Deployment"))
    return key


def put_pod(store: Store, key: Key, name: str, *, ready: bool, since: str = "", **changes: Any) -> None:
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": since}
    metadata = {"namespace": key.namespace, "name": name, "uid": name, "creationTimestamp": ago(7200)}
    pod = {"metadata": metadata, "status": {"phase": "Running", "conditions": [condition] if since else []}}
    pod["metadata"] |= changes
    store.put_pod(key, trim_pod(pod))


def read(store: Store, *, leading: bool = True) -> dict[tuple[str, ...], float]:
    """Return the value by name of the series and values of its labels."""
    text = ResourceMetrics(store, leading=lambda: leading).text(NOW)
    families = list(text_string_to_metric_families(text))
    assert all(family.type == "gauge" and family.documentation for family in families)
    return {
        (s.name.removeprefix("quire_operator_llmdeployment_"), *s.labels.values()): s.value
        for family in families
        for s in family.samples
    }


def test_condition_metrics_equal_the_status() -> None:
    store = Store()
    put(store, "chat", conditions={"Ready": ("False", "OutOfMemory"), "Degraded": ("True", "OutOfMemory")})
    put(store, "code", conditions={"Ready": ("True", "Serving")})
    told = {series[1:]: value for series, value in read(store).items() if series[0] == "condition"}
    assert told == {
        ("prod", "chat", "Ready", "False", "OutOfMemory"): 1,
        ("prod", "chat", "Degraded", "True", "OutOfMemory"): 1,
        ("prod", "code", "Ready", "True", "Serving"): 1,
    }


def test_model_label_is_the_served_name() -> None:
    store = Store()
    put(store, "chat", conditions={}, servedName='org/"x"\\y\n')
    put(store, "code", conditions={})
    told = read(store)
    assert told["info", "prod", "chat", 'org/"x"\\y\n'] == 1
    assert told["info", "prod", "code", "code"] == 1


def test_replicas_are_counted_by_state_with_the_longest_start() -> None:
    store = Store()
    key = put(store, "chat", conditions={}, replicas=5)
    put_pod(store, key, "ready", ready=True, since=ago(5000))
    put_pod(store, key, "starting", ready=False, since=ago(90))
    put_pod(store, key, "was-ready", ready=False, since=ago(30))
    put_pod(store, key, "leaving", ready=False, since=ago(600), deletionTimestamp=ago(1))
    told = read(store)
    states = {state: told["replicas", "prod", "chat", state] for state in ("asked", "ready", "starting", "terminating")}
    assert states == {"asked": 5, "ready": 1, "starting": 2, "terminating": 1}
    assert told["starting_seconds", "prod", "chat"] == 90
    put_pod(store, key, "pending", ready=False)
    assert read(store)["starting_seconds", "prod", "chat"] == 7200, "no node has taken it: since it was made"


def test_no_starting_replicas_if_all_are_ready() -> None:
    store = Store()
    key = put(store, "chat", conditions={})
    put_pod(store, key, "a", ready=True, since=ago(5))
    assert read(store)["starting_seconds", "prod", "chat"] == 0


def test_malformed_status_does_not_break_metrics() -> None:
    store = Store()
    put(store, "chat", conditions={})
    metadata = {"namespace": "prod", "name": "odd", "resourceVersion": "1"}
    odd = {"metadata": metadata, "spec": "none", "status": {"conditions": ["x", {"type": 3, "status": None}]}}
    store.put_resource(trim_resource(odd))
    assert read(store)["condition", "prod", "odd", "3", "None", ""] == 1


def test_standby_exports_no_resource_metrics() -> None:
    store = Store()
    put(store, "chat", conditions={"Ready": ("True", "Serving")})
    assert read(store, leading=False) == {}


def test_thousand_resources_fit_one_metrics_page() -> None:
    """benchmarks/operator/scale.py measures the time."""
    store = Store()
    conditions = dict.fromkeys(
        ("Ready", "Progressing", "Available", "ModelLoaded", "Autoscaling", "Degraded"), ("True", "AsExpected")
    )
    for number in range(1000):
        key = put(store, f"chat-{number}", conditions=conditions)
        for pod in range(3):
            put_pod(store, key, f"{number}-{pod}", ready=pod > 0, since=ago(60))
    text = ResourceMetrics(store, leading=lambda: True).text(NOW)
    assert text.count("\n") == 12_000 + 2 * 4
