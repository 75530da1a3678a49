"""The reason why replicas do not start, as one word and a sentence, from the status of pods and of their Deployment.

The kubelet writes the reasons into the pod's status, and because of ``terminationMessagePolicy: FallbackToLogsOnError``
also the last lines of a crash.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from quire_common.contract import engine as engine_names
from quire_operator.api import is_gpu
from quire_operator.deployment.pod_template import FETCH, FETCH_DRAFT
from quire_operator.kube.objects import ContainerState, DeploymentState, Pod

_MAX_MESSAGE = 400
_MAX_LINES = 4
_CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-_])|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Colours of a log and other control sequences: the output of a container is shown on users' terminals."""
_NAMES_AN_ERROR = re.compile(r"(?:Fatal|panic|[\w.]*(?:Error|Exception))\b.*:")
"""The last line of a Python traceback, or the first line of a trace in other languages."""
_OUR_WORDS = ("quire: ", "quire-engine: ", "quire-engine cannot start")


class FailureReason(StrEnum):
    """The reasons in order of precedence: the first one that applies is reported."""

    QUOTA_EXCEEDED = "QuotaExceeded"
    REPLICAS_REFUSED = "ReplicasRefused"
    SECRET_MISSING = "SecretMissing"
    CONFIG_ERROR = "ContainerConfigError"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    MODEL_DOWNLOAD_FAILED = "ModelDownloadFailed"
    OUT_OF_MEMORY = "OutOfMemory"
    ENGINE_REFUSED = "EngineRefused"
    CRASH_LOOPING = "CrashLooping"
    POD_FAILED = "PodFailed"
    INSUFFICIENT_GPU = "InsufficientGPU"
    UNSCHEDULABLE = "Unschedulable"
    DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    reason: FailureReason
    message: str


_IMAGE_REASONS = frozenset(
    {"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
_CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_SECRET = re.compile(r"secret \"?[^\"\s]+\"? not found|couldn't find key \S+ in Secret", re.IGNORECASE)


def worst_failure(pods: Sequence[Pod], deployment: DeploymentState | None) -> Failure | None:
    """Return the reason with the highest precedence why a replica does not start, or None if none is known."""
    live = [pod for pod in pods if not pod.deleting and pod.phase != "Failed"]
    found = [failure for pod in live if not pod.ready for failure in _pod_failures(pod)]
    if deployment is not None and deployment.ready < deployment.replicas_asked:
        # An evicted pod stays in the list, and matters only until another one has replaced it.
        found += [_failed(pod) for pod in pods if not pod.deleting and pod.phase == "Failed"]
        found += [failure for pod in pods if pod.group for failure in _restart_failures(pod)]
    if deployment is not None:
        found += _deployment_failures(deployment)
    order = list(FailureReason)
    return min(found, key=lambda failure: order.index(failure.reason), default=None)


def _pod_failures(pod: Pod) -> Iterator[Failure]:
    if pod.unschedulable:
        lacking = re.findall(r"Insufficient ([\w./-]*\w)", pod.unschedulable)
        no_gpu = any(map(is_gpu, lacking))
        reason = FailureReason.INSUFFICIENT_GPU if no_gpu else FailureReason.UNSCHEDULABLE
        yield _failure(reason, f"no node can run pod {pod.name}: {pod.unschedulable}")
    for container in pod.containers:
        if not container.ready:
            yield from _container_failures(pod, container)


def _restart_failures(pod: Pod) -> Iterator[Failure]:
    """Yield why containers restarted, for which the pods of a group are deleted."""
    for container in pod.containers:
        if container.restarts:
            yield from _container_failures(pod, container)


def _failed(pod: Pod) -> Failure:
    return _failure(FailureReason.POD_FAILED, f"pod {pod.name} failed: {pod.failed or 'no reason given'}")


def _container_failures(pod: Pod, container: ContainerState) -> Iterator[Failure]:
    where = f"container {container.name} of pod {pod.name}"
    waiting, message = container.waiting_reason, container.waiting_message
    if waiting in _IMAGE_REASONS:
        yield _failure(FailureReason.IMAGE_PULL_FAILED, f"{where}: {message or waiting}")
    elif waiting in _CONFIG_REASONS:
        missing = _SECRET.search(message) is not None
        reason = FailureReason.SECRET_MISSING if missing else FailureReason.CONFIG_ERROR
        yield _failure(reason, f"{where}: {message or waiting}")
    if container.ended_code or container.ended_reason == "OOMKilled":
        yield _failure(_ended_reason(container), f"{where} {_ended(container)}")


def _ended_reason(container: ContainerState) -> FailureReason:
    if container.ended_reason == "OOMKilled":
        return FailureReason.OUT_OF_MEMORY
    if container.init and container.name in (FETCH, FETCH_DRAFT):
        return FailureReason.MODEL_DOWNLOAD_FAILED
    if container.ended_code == engine_names.CONFIG_ERROR_EXIT_CODE:
        return FailureReason.ENGINE_REFUSED
    return FailureReason.CRASH_LOOPING


def _ended(container: ContainerState) -> str:
    if container.ended_reason == "OOMKilled":
        return "was killed: it exceeded its memory limit"
    words = _last_words(container.ended_message)
    return f"exited with code {container.ended_code}" + (f": {words}" if words else "")


def _last_words(log: str) -> str:
    """Return the cause of an exit from the end of a log.

    This is the last message of our own programs with the advice that follows it, else the last line that names an
    error, else the last line.
    """
    lines = [line for text in log.splitlines() if (line := _CONTROL.sub("", text).strip())]
    ours = [place for place, line in enumerate(lines) if line.startswith(_OUR_WORDS)]
    if ours:
        return " ".join(lines[ours[-1] : ours[-1] + _MAX_LINES])
    errors = [line for line in lines if _NAMES_AN_ERROR.match(line)]
    return " ".join(errors[-1:] or lines[-1:])


def _deployment_failures(deployment: DeploymentState) -> Iterator[Failure]:
    failure, progressing = deployment.failure, deployment.progressing
    if failure is not None and failure.is_true:
        quota = "exceeded quota" in failure.message
        reason = FailureReason.QUOTA_EXCEEDED if quota else FailureReason.REPLICAS_REFUSED
        yield _failure(reason, failure.message)
    if progressing is not None and not progressing.is_true and progressing.reason == "ProgressDeadlineExceeded":
        yield _failure(FailureReason.DEADLINE_EXCEEDED, progressing.message)


def _failure(reason: FailureReason, message: str) -> Failure:
    message = _CONTROL.sub("", message)
    short = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}…"
    return Failure(reason=reason, message=short)
