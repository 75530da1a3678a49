"""The status of pods and Deployments, and the reason derived from it."""

from typing import Any

import pytest
from status_views import deployment

from quire_operator.deployment.pod_failures import worst_failure
from quire_operator.kube.objects import Condition, DeploymentState, Key, Pod, is_newer
from quire_operator.kube.trimming import key_of_child, trim_child, trim_pod, trim_resource


def pod_body(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "chat-1",
            "namespace": "prod",
            "uid": "u",
            "resourceVersion": "7",
            "labels": {"quire.dev/llmdeployment": "chat", "pod-template-hash": "abc"},
        },
        "status": {"phase": "Pending"} | status,
    }


def waiting(reason: str, message: str = "", *, name: str = "engine") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"name": name, "ready": False, "restartCount": 0, "state": state}


def crashed(code: int, message: str = "", *, reason: str = "Error", name: str = "engine") -> dict[str, Any]:
    ended = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed container"}}
    return {"name": name, "ready": False, "restartCount": 3, "state": state, "lastState": ended}


def unschedulable(message: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"conditions": [condition]}


STATES: dict[str, tuple[dict[str, Any], str, str]] = {
    "image": (
        {"containerStatuses": [waiting("ImagePullBackOff", 'image "x" not found')]},
        "ImagePullFailed",
        'container engine of pod chat-1: image "x" not found',
    ),
    "bad image name": ({"containerStatuses": [waiting("InvalidImageName")]}, "ImagePullFailed", "InvalidImageName"),
    "secret": (
        {"containerStatuses": [waiting("CreateContainerConfigError", 'secret "hub" not found')]},
        "SecretMissing",
        'secret "hub" not found',
    ),
    "secret key": (
        {"initContainerStatuses": [waiting("CreateContainerConfigError", "couldn't find key token in Secret a/hub")]},
        "SecretMissing",
        "couldn't find key token in Secret a/hub",
    ),
    "no program": (
        {"containerStatuses": [waiting("RunContainerError", 'exec: "quire-engine": executable file not found')]},
        "ContainerConfigError",
        "executable file not found",
    ),
    "config map": (
        {"containerStatuses": [waiting("CreateContainerConfigError", 'configmap "x" not found')]},
        "ContainerConfigError",
        'configmap "x" not found',
    ),
    "download": (
        {"initContainerStatuses": [crashed(1, "fetching\nno such repository: org/x\n", name="fetch-model")]},
        "ModelDownloadFailed",
        "exited with code 1: no such repository: org/x",
    ),
    "download, with advice": (
        {"initContainerStatuses": [crashed(2, "quire: no model a/b\ncheck the spelling\n", name="fetch-model")]},
        "ModelDownloadFailed",
        "exited with code 2: quire: no model a/b check the spelling",
    ),
    "flags": (
        {"containerStatuses": [crashed(2, "quire-engine cannot start:\n  --x: no such flag\n\nquire-engine --help")]},
        "EngineRefused",
        "quire-engine cannot start: --x: no such flag quire-engine --help",
    ),
    "memory": (
        {"containerStatuses": [crashed(137, reason="OOMKilled")]},
        "OutOfMemory",
        "it exceeded its memory limit",
    ),
    "refused": (
        {"containerStatuses": [crashed(2, "no model at /models/x")]},
        "EngineRefused",
        "exited with code 2: no model at /models/x",
    ),
    "crash": (
        {"containerStatuses": [crashed(139, "line 1\nSegmentation fault\n")]},
        "CrashLooping",
        "container engine of pod chat-1 exited with code 139: Segmentation fault",
    ),
    "crash, with frames behind the error": (
        {
            "containerStatuses": [
                crashed(1, "Fatal Python error: no codec\n\nCurrent thread 0x1:\n  <no Python frame>\n")
            ]
        },
        "CrashLooping",
        "exited with code 1: Fatal Python error: no codec",
    ),
    "crash, with a traceback": (
        {"containerStatuses": [crashed(1, 'KeyError: 1\n\n  File "x.py"\na.b.LoadError: y\nmore\n')]},
        "CrashLooping",
        "exited with code 1: a.b.LoadError: y",
    ),
    "no node": (unschedulable("0/3 nodes are available: 3 Insufficient cpu."), "Unschedulable", "3 Insufficient cpu"),
    "no gpu of amd": (
        unschedulable("0/3 nodes are available: 3 Insufficient amd.com/gpu."),
        "InsufficientGPU",
        "no node can run pod chat-1: 0/3 nodes are available",
    ),
    "no slice of a gpu": (
        unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/mig-3g.40gb."),
        "InsufficientGPU",
        "no node can run pod chat-1: 0/3 nodes are available",
    ),
    "no gpu": (
        unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
        "InsufficientGPU",
        "no node can run pod chat-1: 0/3 nodes are available",
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_each_state_of_a_pod_has_its_reason_and_its_cause(case: str) -> None:
    status, reason, words = STATES[case]
    failure = worst_failure([trim_pod(pod_body(**status))], None)
    assert failure is not None
    assert failure.reason == reason and words in failure.message


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"containerStatuses": [waiting("ContainerCreating")]},
        {"containerStatuses": [waiting("PodInitializing")]},
        {"containerStatuses": [{"name": "engine", "ready": False, "restartCount": 0, "state": {"running": {}}}]},
        {"initContainerStatuses": [{"name": "fetch-model", "ready": False, "state": {"terminated": {"exitCode": 0}}}]},
        {"containerStatuses": [crashed(1) | {"ready": True}], "conditions": [{"type": "Ready", "status": "True"}]},
    ],
)
def test_starting_or_healthy_pod_is_no_failure(status: dict[str, Any]) -> None:
    assert worst_failure([trim_pod(pod_body(**status))], None) is None


@pytest.mark.parametrize(
    "status",
    [
        {"containerStatuses": [crashed(1, "fine\n\x1b[1;31mquire: \x1b]0;owned\x07no GPU\x1b[0m\x9b2J\r\n\x1b[0m\n")]},
        {"containerStatuses": [waiting("ErrImagePull", "\x1b[31mquire: no GPU\x07\x00")]},
    ],
)
def test_container_messages_contain_no_control_characters(status: dict[str, Any]) -> None:
    failure = worst_failure((trim_pod(pod_body(**status)),), None)
    assert failure is not None and "no GPU" in failure.message and ": quire: " in failure.message
    assert failure.message.isprintable()


def test_terminating_pod_is_no_failure() -> None:
    body = pod_body(containerStatuses=[crashed(1)])
    body["metadata"]["deletionTimestamp"] = "now"
    assert worst_failure([trim_pod(body)], None) is None


def test_most_specific_reason_is_shown() -> None:
    pods = [trim_pod(pod_body(**STATES[case][0])) for case in ("no node", "crash", "image")]
    failure = worst_failure(pods, None)
    assert failure is not None and failure.reason == "ImagePullFailed"


EVICTED = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}


def test_evicted_pod_is_reported_until_it_is_replaced() -> None:
    pod = trim_pod(pod_body(**EVICTED, containerStatuses=[crashed(137)]))
    failure = worst_failure([pod], deployment(2, 1))
    assert failure is not None and failure.reason == "PodFailed"
    assert failure.message == "pod chat-1 failed: Evicted: The node was low on resource: memory."
    assert worst_failure([pod], deployment(2, 2)) is None


def failed(message: str) -> DeploymentState:
    return deployment(2, 0, failure=Condition(is_true=True, reason="FailedCreate", message=message))


def progressing(is_true: bool, reason: str) -> DeploymentState:
    return deployment(2, 0, progressing=Condition(is_true=is_true, reason=reason, message="timed out"))


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (failed("exceeded quota: q"), "QuotaExceeded"),
        (failed("forbidden"), "ReplicasRefused"),
        (progressing(False, "ProgressDeadlineExceeded"), "ProgressDeadlineExceeded"),
        (progressing(True, "ReplicaSetUpdated"), None),
    ],
)
def test_deployment_failure_is_used_without_pods(state: DeploymentState, reason: str | None) -> None:
    failure = worst_failure([], state)
    assert (None if failure is None else failure.reason) == reason


def test_pods_are_trimmed_to_used_fields() -> None:
    body = pod_body(phase="Running", podIP="10.0.0.1", conditions=[{"type": "Ready", "status": "True"}])
    pod = trim_pod(body)
    assert (pod.name, pod.ip, pod.phase, pod.ready, pod.revision) == ("chat-1", "10.0.0.1", "Running", True, "abc")


@pytest.mark.parametrize("body", [{}, {"metadata": None}, {"status": []}, {"metadata": {"labels": "x"}, "status": "?"}])
def test_an_odd_object_is_trimmed_without_raising(body: dict[str, Any]) -> None:
    assert isinstance(trim_pod(body), Pod)
    assert trim_child(body, kind="Deployment").owner is None
    assert trim_resource(body).generation == 0
    assert key_of_child(body) is None


def test_child_is_found_by_its_owner_despite_another_label() -> None:
    metadata = {
        "name": "chat",
        "namespace": "prod",
        "labels": {"quire.dev/llmdeployment": "other"},
        "ownerReferences": [{"kind": "LLMDeployment", "name": "chat", "uid": "u", "controller": True}],
    }
    assert key_of_child({"metadata": metadata}) == Key("prod", "chat")
    metadata["ownerReferences"] = [{"kind": "ReplicaSet", "name": "chat-1", "uid": "r", "controller": True}]
    assert key_of_child({"metadata": metadata}) == Key("prod", "other")


@pytest.mark.parametrize(
    ("version", "than", "newer"), [("10", "9", True), ("9", "10", False), ("9", "9", False), ("x", "9", True)]
)
def test_versions_are_compared_as_numbers(version: str, than: str, newer: bool) -> None:
    assert is_newer(version, than) is newer
