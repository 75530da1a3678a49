"""Each reason of a condition, caused on a real API server and removed again.

Quotas, admission and the scheduler are real. The kubelet's part is written into the pod's status in the kubelet's
words, and such pods are kept from the scheduler; test_pods_and_failures.py has a table of the kubelet's other words.
All cases run side by side in one namespace.
"""

import re
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from kube_support.operators import Namespace, Operators, until

from quire_cluster.control_plane import ControlPlane
from quire_cluster.fake_nodes import FakeNodes

NO_SUCH_SCHEDULER = {"spec": {"schedulerName": "no-such-scheduler"}}
SILENT = "127.0.77.9"
PRIORITY_CLASS = "/apis/scheduling.k8s.io/v1/priorityclasses"

Status = dict[str, Any]


def container(name: str = "engine", **fields: Any) -> Status:
    return {"name": name, "ready": False, "restartCount": 1, "image": "x", "imageID": ""} | fields


def waiting(reason: str, message: str, *, name: str = "engine") -> Status:
    return container(name, state={"waiting": {"reason": reason, "message": message}})


def looping(code: int, message: str, *, reason: str = "Error", name: str = "engine") -> Status:
    back_off = "back-off 40s restarting failed container=engine pod=chat-5d8f9c7b6d-abcde_default(0f3a)"
    ended = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    return waiting("CrashLoopBackOff", back_off, name=name) | {"lastState": ended}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case. `words` are in the message and in the output of kubectl describe."""

    reason: str
    words: str
    kind: str = "Degraded"
    spec: dict[str, Any] = field(default_factory=dict)
    pod: Status | None = None
    """The kubelet's status of the pod; such pods are kept from the scheduler."""
    fix: dict[str, Any] = field(default_factory=dict)
    """The spec that removes the cause; if it is empty, the pod becomes healthy."""

    @property
    def starting_spec(self) -> dict[str, Any]:
        return ({"podTemplate": NO_SUCH_SCHEDULER} if self.pod is not None else {}) | self.spec


def of_class(name: str) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"priorityClassName": name, "schedulerName": "no-such-scheduler"}}}


GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
WITHOUT_GPUS = "fake-without-gpus"

CASES: dict[str, Case] = {
    "memory": Case(
        reason="OutOfMemory",
        words="it exceeded its memory limit",
        pod={"containerStatuses": [looping(137, "", reason="OOMKilled")]},
    ),
    "no-gpu": Case(
        reason="InsufficientGPU",
        words="Insufficient nvidia.com/gpu",
        spec=GPU | {"podTemplate": {"spec": {"nodeSelector": {"kubernetes.io/hostname": WITHOUT_GPUS}}}},
        fix=GPU,
    ),
    "no-node": Case(
        reason="Unschedulable",
        words="didn't match Pod's node affinity/selector",
        spec={"podTemplate": {"spec": {"nodeSelector": {"gpu": "H100"}}}},
        fix={"replicas": 1},
    ),
    "quota-of-claims": Case(
        reason="QuotaExceeded",
        words="exceeded quota: no-claims",
        spec={"model": {"source": "hf://org/model", "cache": {"size": "1Gi"}}},
        fix={"model": {"source": "hf://org/model"}},
    ),
    "quota-of-pods": Case(
        reason="QuotaExceeded", words="exceeded quota: no-pods", spec=of_class("poor"), fix={"replicas": 1}
    ),
    "refused-pods": Case(
        reason="ReplicasRefused",
        words="no PriorityClass with name missing-class was found",
        spec=of_class("missing-class"),
        fix={"replicas": 1},
    ),
    "rejected": Case(
        reason="InvalidSpec",
        words="the API server rejected the Deployment",
        spec={"podTemplate": {"spec": {"nodeSelektor": {"a": "b"}}}},
        fix={"replicas": 1},
    ),
    "taken": Case(reason="NameConflict", words="Service taken already exists and was not created by quire"),
    "asleep": Case(
        kind="Ready", reason="ScaledToZero", words="spec.replicas is 0", spec={"replicas": 0}, fix={"replicas": 1}
    ),
    "no-prometheus": Case(
        kind="Autoscaling",
        reason="PrometheusUnavailable",
        words="--prometheus-url",
        spec={"autoscaling": {"minReplicas": 1, "maxReplicas": 2, "metricsSource": "Prometheus"}},
        fix={"replicas": 1},
    ),
    "silent": Case(
        kind="Autoscaling",
        reason="MetricsStale",
        words="have not reported metrics recently",
        spec={"podTemplate": NO_SUCH_SCHEDULER, "autoscaling": {"minReplicas": 1, "maxReplicas": 2}},
        fix={"replicas": 1},
    ),
}


def set_the_scene(space: Namespace) -> None:
    """Create the obstacles of some cases."""
    space.create(
        "resourcequotas", {"metadata": {"name": "no-claims"}, "spec": {"hard": {"persistentvolumeclaims": "0"}}}
    )
    scope = {"matchExpressions": [{"scopeName": "PriorityClass", "operator": "In", "values": ["poor"]}]}
    space.create(
        "resourcequotas", {"metadata": {"name": "no-pods"}, "spec": {"hard": {"pods": "0"}, "scopeSelector": scope}}
    )
    answer = space.server.client().post(PRIORITY_CLASS, {"metadata": {"name": "poor"}, "value": 1})
    assert answer.status in (201, 409), answer.body
    space.create("services", {"metadata": {"name": "taken"}, "spec": {"ports": [{"port": 1}], "selector": {"a": "b"}}})
    for quota in ("no-claims", "no-pods"):
        until(lambda quota=quota: (space.get("resourcequotas", quota) or {}).get("status", {}).get("hard"))


@pytest.fixture(scope="module")
def scene(crd_installed: ControlPlane, operators: Operators, fake_nodes: FakeNodes) -> Iterator[Namespace]:
    name = f"conditions-{uuid.uuid4().hex[:8]}"
    assert crd_installed.client().post("/api/v1/namespaces", {"metadata": {"name": name}}).ok
    space = Namespace(crd_installed, name)
    fake_nodes.add(WITHOUT_GPUS, gpus=0)
    set_the_scene(space)
    operator = operators.start(*space.flags(), identity=space.name, tick_seconds=1.0)
    space.wait_holder(operator.identity)
    yield space
    operator.kill()
    crd_installed.client().delete(f"{PRIORITY_CLASS}/poor")
    crd_installed.client().delete(f"/api/v1/namespaces/{name}")


def say(space: Namespace, name: str, status: Status) -> bool:
    """Write a kubelet's status to the pods of this LLMDeployment; return True if there were any."""
    bodies = [(pod, space.get("pods", pod)) for pod in space.pods(name)]
    pods = [pod for pod, body in bodies if body is not None and body["status"].get("phase") != "Failed"]
    return any([space.write_pod_status(pod, {"phase": "Pending"} | status) for pod in pods])


@pytest.fixture(scope="module")
def caused(scene: Namespace) -> Namespace:
    """Return the namespace in which every cause exists and was reported."""
    for name, case in CASES.items():
        scene.apply(name, **case.starting_spec)
    for name, case in CASES.items():
        if case.pod is not None:
            until(lambda name=name, pod=case.pod: say(scene, name, pod))
    until(lambda: scene.run_pods("silent", address=SILENT))
    for name, case in CASES.items():
        scene.wait_reason(name, case.kind, case.reason)
    return scene


@pytest.fixture(scope="module")
def described(caused: Namespace) -> dict[str, str]:
    """Return the output of kubectl describe for each LLMDeployment, as one line."""
    text = caused.server.kubectl("describe", "llmd", "-n", caused.name)
    parts = re.split(r"^Name:\s+(\S+)$", text, flags=re.MULTILINE)[1:]
    return {name: " ".join(part.split()) for name, part in zip(parts[::2], parts[1::2], strict=True)}


def events_of(space: Namespace, name: str) -> Counter[str]:
    """Return the number of its Events by reason."""
    ours = (e for e in space.items("events") if e["involvedObject"].get("kind") == "LLMDeployment")
    return Counter(e["reason"] for e in ours if e["involvedObject"]["name"] == name)


@pytest.mark.parametrize("name", CASES)
def test_cause_is_in_condition_event_and_kubectl_output(
    name: str, caused: Namespace, described: dict[str, str]
) -> None:
    case = CASES[name]
    condition = caused.condition(name, case.kind)
    assert (condition["reason"], case.words in condition["message"]) == (case.reason, True), condition
    assert " ".join(case.words.split()) in described[name] and f"Reason: {case.reason}" in described[name]
    until(lambda: events_of(caused, name)[case.reason], why=lambda: events_of(caused, name))
    assert events_of(caused, name)[case.reason] == 1, "once, for it turned once"
    if case.kind == "Degraded":
        assert condition["status"] == "True"
        assert caused.condition(name, "Ready")["status"] == "False"
        assert caused.condition(name, "Progressing")["status"] == "False"


def test_the_table_of_kubectl_get_names_the_reason(caused: Namespace) -> None:
    table = caused.server.kubectl("get", "llmd", "-n", caused.name)
    rows = {line.split()[0]: line.split()[1:3] for line in table.splitlines()[1:]}
    assert rows["no-gpu"] == ["False", "InsufficientGPU"] and rows["asleep"] == ["True", "ScaledToZero"]
    print(table)


@pytest.fixture(scope="module")
def fixed(caused: Namespace) -> Namespace:
    """Return the namespace after every cause was removed."""
    caused.delete("services", "taken")
    caused.touch("taken", "once-the-name-is-free")
    for name, case in CASES.items():
        if case.fix:
            caused.apply(name, **case.fix)
    for name, case in CASES.items():
        if case.pod is not None:
            until(lambda name=name: replaced(caused, name))
    return caused


def replaced(space: Namespace, name: str) -> bool:
    """Return True if the pods are healthy; one that has failed for good is replaced by another."""
    return say(space, name, {}) and bool(space.run_pods(name))


@pytest.mark.parametrize("name", CASES)
def test_condition_recovers_when_the_cause_is_removed(name: str, fixed: Namespace) -> None:
    case = CASES[name]
    if case.kind == "Autoscaling":
        fixed.wait_reason(name, "Autoscaling", "NotConfigured")
    else:
        fixed.wait_reason(name, "Ready", "Serving")
        fixed.wait_reason(name, "Degraded", "AsExpected")
        assert fixed.condition(name, "Progressing")["reason"] == "Complete"
        until(lambda: events_of(fixed, name)["Serving"])
    assert events_of(fixed, name)[case.reason] == 1, "and was not reported again"
