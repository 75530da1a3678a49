"""The reduction of raw objects of the API server to the fields that the operator keeps.

An object may lack any field, or have a value of another type in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from quire_common.contract.engine import FETCHED_VERSION
from quire_operator.api import Spec
from quire_operator.api.fields import JSON, Problem, items_of, number_of, section_of, text_of
from quire_operator.api.names import (
    ADAPTER_KIND,
    ANNOTATION_PROGRESS_DEADLINE,
    ANNOTATION_REFRESH_MODEL,
    ANNOTATION_TEMPLATE,
    API_VERSION,
    CANARY_COMPONENT,
    KIND,
    LABEL_COMPONENT,
    LABEL_DEPLOYMENT,
    LABEL_GROUP_INDEX,
    LABEL_GROUP_REVISION,
    WORKER_COMPONENT,
)
from quire_operator.api.schema import without_removed
from quire_operator.kube.objects import (
    HELD_PARTITION,
    LEADER_WORKER_SET,
    Child,
    Condition,
    ContainerState,
    DeploymentState,
    Key,
    Owner,
    Pod,
    Ref,
    Resource,
)
from quire_operator.kube.ownership import ForeignField, fingerprint, foreign_fields, managed_fields, own_entry_time

_MAX_ANNOTATION, _MAX_VERSION, _REVISION_LENGTH = 128, 128, 10
_PAUSED = ("f:spec", "f:paused")
_PARTITION = ("f:spec", "f:rolloutStrategy", "f:rollingUpdateConfiguration", "f:partition")

_FILLED_IN_BY_KUBERNETES = frozenset({"PersistentVolumeClaim"})
"""Kinds whose spec Kubernetes' own controllers write (such as a claim's volume): foreign fields there are expected."""


def key_of_child(body: JSON) -> Key | None:
    """Return the LLMDeployment that an object belongs to: its owner, else the one that its label names."""
    metadata = section_of(body, "metadata")
    owner = _controller(metadata)
    name: object = section_of(metadata, "labels").get(LABEL_DEPLOYMENT)
    if owner is not None and owner.kind == KIND:
        name = owner.name  # the owner decides, so that an edit of the label does not hide the object
    return Key(text_of(metadata, "namespace"), name) if isinstance(name, str) else None


def trim_resource(body: JSON) -> Resource:
    """Return the fields of an LLMDeployment that the operator keeps."""
    metadata = section_of(body, "metadata")
    key = Key(text_of(metadata, "namespace"), text_of(metadata, "name"))
    kept = {
        "apiVersion": body.get("apiVersion"),
        "kind": body.get("kind", KIND),
        "metadata": {"name": key.name, "namespace": key.namespace},
    }
    spec, removed = body.get("spec"), tuple[Problem, ...]()
    if kept["kind"] == KIND and isinstance(spec, Mapping):
        spec, removed = without_removed(Spec, spec, "spec")
    if "spec" in body:
        kept["spec"] = spec
    return Resource(
        key=key,
        uid=text_of(metadata, "uid"),
        version=text_of(metadata, "resourceVersion"),
        generation=number_of(metadata, "generation"),
        deleting="deletionTimestamp" in metadata,
        body=kept,
        status=dict(section_of(body, "status")),
        created=text_of(metadata, "creationTimestamp"),
        refresh_model=text_of(section_of(metadata, "annotations"), ANNOTATION_REFRESH_MODEL)[:_MAX_ANNOTATION],
        removed=removed,
    )


def trim_adapter(body: JSON) -> Resource:
    """Return the fields of an LLMAdapter that the operator keeps; the items of a list have no kind."""
    return trim_resource({"apiVersion": API_VERSION, **body, "kind": ADAPTER_KIND})


def trim_child(body: JSON, *, kind: str) -> Child:
    metadata = section_of(body, "metadata")
    foreign = foreign_fields(managed_fields(body)) if kind not in _FILLED_IN_BY_KUBERNETES else ()
    return Child(
        ref=Ref(kind, text_of(metadata, "name")),
        uid=text_of(metadata, "uid"),
        version=text_of(metadata, "resourceVersion"),
        owner=_controller(metadata),
        deleting="deletionTimestamp" in metadata,
        fingerprint=fingerprint(body),
        foreign=foreign,
        deployment=_STATES[kind](body, foreign) if kind in _STATES else None,
        owner_uids=frozenset(text_of(owner, "uid") for owner in items_of(metadata, "ownerReferences")),
        data=section_of(body, "data") if kind == "ControllerRevision" else None,
    )


def trim_pod(body: JSON) -> Pod:
    metadata, status = section_of(body, "metadata"), section_of(body, "status")
    labels = section_of(metadata, "labels")
    conditions = {text_of(c, "type"): c for c in items_of(status, "conditions")}
    scheduled = conditions.get("PodScheduled", {})
    return Pod(
        name=text_of(metadata, "name"),
        uid=text_of(metadata, "uid"),
        version=text_of(metadata, "resourceVersion"),
        ip=text_of(status, "podIP"),
        phase=text_of(status, "phase"),
        ready=conditions.get("Ready", {}).get("status") == "True",
        deleting="deletionTimestamp" in metadata,
        revision=text_of(labels, LABEL_GROUP_REVISION) or text_of(labels, "pod-template-hash"),
        created=text_of(metadata, "creationTimestamp"),
        unschedulable=text_of(scheduled, "message") if scheduled.get("reason") == "Unschedulable" else "",
        containers=(
            *(_container(c, init=True) for c in items_of(status, "initContainerStatuses")),
            *(_container(c, init=False) for c in items_of(status, "containerStatuses")),
        ),
        deletion_cost=text_of(section_of(metadata, "annotations"), "controller.kubernetes.io/pod-deletion-cost"),
        failed=": ".join(text for text in (text_of(status, "reason"), text_of(status, "message")) if text),
        model_version=_model_version(status),
        is_canary=labels.get(LABEL_COMPONENT) == CANARY_COMPONENT,
        is_worker=labels.get(LABEL_COMPONENT) == WORKER_COMPONENT,
        group=text_of(labels, LABEL_GROUP_INDEX),
        ready_changed=text_of(conditions.get("Ready", {}), "lastTransitionTime"),
    )


def _controller(metadata: JSON) -> Owner | None:
    for owner in items_of(metadata, "ownerReferences"):
        if owner.get("controller"):
            return Owner(kind=text_of(owner, "kind"), name=text_of(owner, "name"), uid=text_of(owner, "uid"))
    return None


def _deployment(body: JSON, foreign: Sequence[ForeignField]) -> DeploymentState:
    metadata, spec, status = section_of(body, "metadata"), section_of(body, "spec"), section_of(body, "status")
    conditions = {text_of(c, "type"): _condition(c) for c in items_of(status, "conditions")}
    return DeploymentState(
        replicas_asked=number_of(spec, "replicas"),
        generation=number_of(metadata, "generation"),
        observed_generation=number_of(status, "observedGeneration"),
        replicas=number_of(status, "replicas"),
        updated=number_of(status, "updatedReplicas"),
        ready=number_of(status, "readyReplicas"),
        available=number_of(status, "availableReplicas"),
        revision=text_of(section_of(metadata, "annotations"), "deployment.kubernetes.io/revision"),
        progressing=conditions.get("Progressing"),
        failure=conditions.get("ReplicaFailure"),
        template_digest=text_of(section_of(metadata, "annotations"), ANNOTATION_TEMPLATE),
        is_held=spec.get("paused") is True and not any(field.path == _PAUSED for field in foreign),
    )


def _leader_worker_set(body: JSON, foreign: Sequence[ForeignField]) -> DeploymentState:
    spec, state = section_of(body, "spec"), _deployment(body, foreign)
    rules = section_of(spec, "rolloutStrategy", "rollingUpdateConfiguration")
    deadline = text_of(section_of(body, "metadata", "annotations"), ANNOTATION_PROGRESS_DEADLINE)
    return replace(
        state,
        available=state.ready,
        # Its controller numbers no revisions, so the template stands for them as soon as it has been observed.
        revision=state.template_digest[:_REVISION_LENGTH] if state.observed_generation else "",
        progressing=None,
        failure=None,
        is_held=rules.get("partition") == HELD_PARTITION and not any(field.path == _PARTITION for field in foreign),
        nodes=number_of(section_of(spec, "leaderWorkerTemplate"), "size"),
        changed=own_entry_time(body),
        deadline_seconds=int(deadline) if deadline.isdecimal() and len(deadline) < 10 else 0,
    )


_STATES = {"Deployment": _deployment, LEADER_WORKER_SET: _leader_worker_set}


def _condition(body: JSON) -> Condition:
    return Condition(
        is_true=body.get("status") == "True", reason=text_of(body, "reason"), message=text_of(body, "message")
    )


def _model_version(status: JSON) -> str:
    """Return the version that the download of a pod reported when it succeeded, or ""."""
    for container in items_of(status, "initContainerStatuses"):
        ended = section_of(container, "state", "terminated")
        message = text_of(ended, "message")
        if message.startswith(FETCHED_VERSION) and not ended.get("exitCode"):
            return message.removeprefix(FETCHED_VERSION).strip()[:_MAX_VERSION]
    return ""


def _container(status: JSON, *, init: bool) -> ContainerState:
    waiting = section_of(status, "state", "waiting")
    ended = section_of(status, "state", "terminated") or section_of(status, "lastState", "terminated")
    return ContainerState(
        name=text_of(status, "name"),
        init=init,
        ready=status.get("ready") is True,
        restarts=number_of(status, "restartCount"),
        waiting_reason=text_of(waiting, "reason"),
        waiting_message=text_of(waiting, "message"),
        ended_reason=text_of(ended, "reason"),
        ended_message=text_of(ended, "message"),
        ended_code=number_of(ended, "exitCode"),
        running="running" in section_of(status, "state"),
    )
