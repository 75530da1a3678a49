"""The reduction of raw objects of the API server to the fields that the operator keeps.

``handlers``, ``adapters`` and ``reconcile`` call it for what they read. An object may lack any field, or have a value
of another type in it.
"""

from collections.abc import Mapping, Sequence

from quire_common.contract.engine import FETCHED_VERSION
from quire_operator.domain.cluster_state.observed import (
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
from quire_operator.domain.cluster_state.ownership import (
    ForeignField,
    fingerprint,
    foreign_fields,
    managed_fields,
    own_entry_time,
)
from quire_operator.domain.resource.names import (
    ADAPTER_KIND,
    ANNOTATION_PROGRESS_DEADLINE,
    ANNOTATION_REFRESH_MODEL,
    ANNOTATION_ROLLOUT_NOW,
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

JSON = Mapping[str, object]
_MAX_ANNOTATION, _MAX_VERSION, _REVISION_LENGTH = 128, 128, 10
_PAUSED = ("f:spec", "f:paused")
_PARTITION = ("f:spec", "f:rolloutStrategy", "f:rollingUpdateConfiguration", "f:partition")

_FILLED_IN_BY_KUBERNETES = frozenset({"PersistentVolumeClaim"})
"""Kinds whose spec Kubernetes' own controllers write (such as a claim's volume): foreign fields there are expected."""


def key_of_child(body: JSON) -> Key | None:
    """Return the LLMDeployment that an object belongs to: its owner, else the one that its label names."""
    metadata = _map(body, "metadata")
    owner = _controller(metadata)
    name: object = _map(metadata, "labels").get(LABEL_DEPLOYMENT)
    if owner is not None and owner.kind == KIND:
        name = owner.name  # the owner decides, so that an edit of the label does not hide the object
    return Key(_text(metadata, "namespace"), name) if isinstance(name, str) else None


def trim_resource(body: JSON) -> Resource:
    """Return the fields of an LLMDeployment that the operator keeps."""
    metadata = _map(body, "metadata")
    key = Key(_text(metadata, "namespace"), _text(metadata, "name"))
    kept = {
        "apiVersion": body.get("apiVersion"),
        "kind": body.get("kind", KIND),
        "metadata": {"name": key.name, "namespace": key.namespace},
    }
    if "spec" in body:
        kept["spec"] = body["spec"]
    return Resource(
        key=key,
        uid=_text(metadata, "uid"),
        version=_text(metadata, "resourceVersion"),
        generation=_number(metadata, "generation"),
        deleting="deletionTimestamp" in metadata,
        body=kept,
        status=dict(_map(body, "status")),
        created=_text(metadata, "creationTimestamp"),
        refresh_model=_text(_map(metadata, "annotations"), ANNOTATION_REFRESH_MODEL)[:_MAX_ANNOTATION],
        rollout_now=_text(_map(metadata, "annotations"), ANNOTATION_ROLLOUT_NOW)[:_MAX_ANNOTATION],
    )


def trim_adapter(body: JSON) -> Resource:
    """Return the fields of an LLMAdapter that the operator keeps; the items of a list have no kind."""
    return trim_resource({"apiVersion": API_VERSION, **body, "kind": ADAPTER_KIND})


def trim_child(body: JSON, *, kind: str) -> Child:
    """Return the fields of a child that the operator keeps."""
    metadata = _map(body, "metadata")
    foreign = foreign_fields(managed_fields(body)) if kind not in _FILLED_IN_BY_KUBERNETES else ()
    return Child(
        ref=Ref(kind, _text(metadata, "name")),
        uid=_text(metadata, "uid"),
        version=_text(metadata, "resourceVersion"),
        owner=_controller(metadata),
        deleting="deletionTimestamp" in metadata,
        fingerprint=fingerprint(body),
        foreign=foreign,
        deployment=_STATES[kind](body, foreign) if kind in _STATES else None,
        owner_uids=frozenset(_text(owner, "uid") for owner in _maps(metadata, "ownerReferences")),
        data=_map(body, "data") if kind == "ControllerRevision" else None,
    )


def trim_pod(body: JSON) -> Pod:
    """Return the fields of a pod that the operator keeps."""
    metadata, status = _map(body, "metadata"), _map(body, "status")
    labels = _map(metadata, "labels")
    conditions = {_text(c, "type"): c for c in _maps(status, "conditions")}
    scheduled = conditions.get("PodScheduled", {})
    return Pod(
        name=_text(metadata, "name"),
        uid=_text(metadata, "uid"),
        version=_text(metadata, "resourceVersion"),
        ip=_text(status, "podIP"),
        phase=_text(status, "phase"),
        ready=conditions.get("Ready", {}).get("status") == "True",
        deleting="deletionTimestamp" in metadata,
        revision=_text(labels, LABEL_GROUP_REVISION) or _text(labels, "pod-template-hash"),
        created=_text(metadata, "creationTimestamp"),
        unschedulable=_text(scheduled, "message") if scheduled.get("reason") == "Unschedulable" else "",
        containers=(
            *(_container(c, init=True) for c in _maps(status, "initContainerStatuses")),
            *(_container(c, init=False) for c in _maps(status, "containerStatuses")),
        ),
        deletion_cost=_text(_map(metadata, "annotations"), "controller.kubernetes.io/pod-deletion-cost"),
        failed=": ".join(text for text in (_text(status, "reason"), _text(status, "message")) if text),
        model_version=_model_version(status),
        is_canary=labels.get(LABEL_COMPONENT) == CANARY_COMPONENT,
        is_worker=labels.get(LABEL_COMPONENT) == WORKER_COMPONENT,
        group=_text(labels, LABEL_GROUP_INDEX),
        ready_changed=_text(conditions.get("Ready", {}), "lastTransitionTime"),
    )


def _controller(metadata: JSON) -> Owner | None:
    for owner in _maps(metadata, "ownerReferences"):
        if owner.get("controller"):
            return Owner(kind=_text(owner, "kind"), name=_text(owner, "name"), uid=_text(owner, "uid"))
    return None


def _deployment(body: JSON, foreign: Sequence[ForeignField]) -> DeploymentState:
    metadata, spec, status = _map(body, "metadata"), _map(body, "spec"), _map(body, "status")
    conditions = {_text(c, "type"): _condition(c) for c in _maps(status, "conditions")}
    return DeploymentState(
        replicas_asked=_number(spec, "replicas"),
        generation=_number(metadata, "generation"),
        observed_generation=_number(status, "observedGeneration"),
        replicas=_number(status, "replicas"),
        updated=_number(status, "updatedReplicas"),
        ready=_number(status, "readyReplicas"),
        available=_number(status, "availableReplicas"),
        revision=_text(_map(metadata, "annotations"), "deployment.kubernetes.io/revision"),
        progressing=conditions.get("Progressing"),
        failure=conditions.get("ReplicaFailure"),
        template_digest=_text(_map(metadata, "annotations"), ANNOTATION_TEMPLATE),
        is_held=spec.get("paused") is True and not any(field.path == _PAUSED for field in foreign),
    )


def _leader_worker_set(body: JSON, foreign: Sequence[ForeignField]) -> DeploymentState:
    metadata, spec, status = _map(body, "metadata"), _map(body, "spec"), _map(body, "status")
    annotations = _map(metadata, "annotations")
    rules = _map(_map(spec, "rolloutStrategy"), "rollingUpdateConfiguration")
    digest, observed = _text(annotations, ANNOTATION_TEMPLATE), _number(status, "observedGeneration")
    deadline = _text(annotations, ANNOTATION_PROGRESS_DEADLINE)
    is_held = rules.get("partition") == HELD_PARTITION and not any(field.path == _PARTITION for field in foreign)
    return DeploymentState(
        replicas_asked=_number(spec, "replicas"),
        generation=_number(metadata, "generation"),
        observed_generation=observed,
        replicas=_number(status, "replicas"),
        updated=_number(status, "updatedReplicas"),
        ready=_number(status, "readyReplicas"),
        available=_number(status, "readyReplicas"),
        # Its controller numbers no revisions, so the template stands for them as soon as it has been observed.
        revision=digest[:_REVISION_LENGTH] if observed else "",
        progressing=None,
        failure=None,
        template_digest=digest,
        is_held=is_held,
        nodes=_number(_map(spec, "leaderWorkerTemplate"), "size"),
        changed=own_entry_time(body),
        deadline_seconds=int(deadline) if deadline.isdecimal() and len(deadline) < 10 else 0,
    )


_STATES = {"Deployment": _deployment, LEADER_WORKER_SET: _leader_worker_set}


def _condition(body: JSON) -> Condition:
    return Condition(is_true=body.get("status") == "True", reason=_text(body, "reason"), message=_text(body, "message"))


def _model_version(status: JSON) -> str:
    """Return the version that the download of a pod reported when it succeeded, or ""."""
    for container in _maps(status, "initContainerStatuses"):
        ended = _map(_map(container, "state"), "terminated")
        message = _text(ended, "message")
        if message.startswith(FETCHED_VERSION) and not ended.get("exitCode"):
            return message.removeprefix(FETCHED_VERSION).strip()[:_MAX_VERSION]
    return ""


def _container(status: JSON, *, init: bool) -> ContainerState:
    waiting = _map(_map(status, "state"), "waiting")
    ended = _map(_map(status, "state"), "terminated") or _map(_map(status, "lastState"), "terminated")
    return ContainerState(
        name=_text(status, "name"),
        init=init,
        ready=status.get("ready") is True,
        restarts=_number(status, "restartCount"),
        waiting_reason=_text(waiting, "reason"),
        waiting_message=_text(waiting, "message"),
        ended_reason=_text(ended, "reason"),
        ended_message=_text(ended, "message"),
        ended_code=_number(ended, "exitCode"),
        running="running" in _map(status, "state"),
    )


def _map(body: JSON, key: str) -> JSON:
    value = body.get(key)
    return value if isinstance(value, Mapping) else {}


def _maps(body: JSON, key: str) -> list[JSON]:
    value = body.get(key)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, Sequence) else []


def _text(body: JSON, key: str) -> str:
    value = body.get(key)
    return value if isinstance(value, str) else ""


def _number(body: JSON, key: str) -> int:
    value = body.get(key)
    return value if isinstance(value, int) else 0
