"""The ``status`` of an LLMDeployment, and the Events for its changes: pure.

It is the last stage of ``reconcile``: all findings and results go in, and the whole status comes out. It is written
only if it differs from the stored one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire_common.contract import engine
from quire_operator.domain.canary.progress import Phase
from quire_operator.domain.canary.record import SECTION as ROLLOUT
from quire_operator.domain.cluster_state.observed import Resource
from quire_operator.domain.manifests.objects import selector
from quire_operator.domain.manifests.served_names import status_section
from quire_operator.domain.resource.times import clock_time
from quire_operator.domain.resource.untyped import JSON, items_of, number_of, section_of
from quire_operator.domain.status import conditions as c
from quire_operator.domain.status.conditions import View, conditions, merged
from quire_operator.domain.status.model_status import kept_resolution, model_section, stored_resolution
from quire_operator.domain.status.pod_failures import FailureReason
from quire_operator.domain.status.scaling_status import kept_section, scaling_record, scaling_sections

_BEGINNINGS = ("Creating", "Starting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An Event, which is one line of ``kubectl describe``."""

    warning: bool
    reason: str
    message: str


def status(resource: Resource, view: View, *, cluster_domain: str, now: float) -> dict[str, object]:
    """Return the whole status. ``now`` is used only for conditions that change, and for schedules."""
    key, deployment = resource.key, view.deployment
    pairs = (f"{name}={value}" for name, value in sorted(selector(key.name).items()))
    service = key.name
    port = engine.HTTP_PORT
    result: dict[str, object] = {
        "observedGeneration": resource.generation,
        "replicas": 0 if deployment is None else deployment.replicas,
        "readyReplicas": 0 if deployment is None else deployment.ready,
        "selector": ",".join(pairs),
        "endpoint": f"http://{service}.{key.namespace}.svc.{cluster_domain}:{port}/v1",
        "conditions": merged(
            items_of(resource.status, "conditions"),
            conditions(view),
            generation=resource.generation,
            now=clock_time(now),
        ),
    }
    if view.claim is not None:
        result["servedName"] = status_section(view.claim)
    if view.target is not None:
        result["desiredReplicas"] = view.target
    if deployment is not None and deployment.revision:
        result["currentRevision"] = deployment.revision
    resolution = None if view.spec is None else stored_resolution(resource, view.spec)
    model = model_section(resolution, view.spec, view.pods, view.download)
    if view.spec is None:
        # An invalid spec has no autoscaling; the learned values stay.
        model = kept_resolution(resource) | model
        result |= {
            name: resource.status[name] for name in ("autoscaling", "capacity", ROLLOUT) if name in resource.status
        }
        return result | ({"model": model} if model else {})
    if model:
        result["model"] = model
    record = scaling_record(resource.status)
    if view.spec.autoscaling is not None and record is not None:
        result |= scaling_sections(record, view.spec, now=now)
    if view.rollout is not None and view.rollout:
        result[ROLLOUT] = view.rollout
    elif view.rollout is None and view.spec.rollout.canary_policy is not None and ROLLOUT in resource.status:
        result[ROLLOUT] = resource.status[ROLLOUT]  # the pass was blocked before it got that far
    if kept := kept_section(resource.status, view.spec):
        result["autoscaling"] = kept
    return result


_MINOR = frozenset({"replicas", "currentRevision"})


def is_minor(before: JSON, after: JSON) -> bool:
    """Return whether the change is one of many that follow each other within a second when pods are created.

    These are the number of existing replicas, the revision, and the condition ModelLoaded when its first pod exists.
    """
    figures = [{name: part[name] for name in part if name not in {*_MINOR, "conditions"}} for part in (before, after)]
    old, new = items_of(before, "conditions"), items_of(after, "conditions")
    if figures[0] != figures[1] or len(old) != len(new):
        return False
    changed = [(was, now) for was, now in zip(old, new, strict=True) if was != now]
    return all(
        (now["type"], was.get("reason"), now["reason"]) == (c.MODEL_LOADED, "NoReplica", "Loading")
        for was, now in changed
    )


def events(before: JSON, after: JSON, *, recommends: bool = False) -> tuple[Event, ...]:
    """Return Events for the change from one status to the next: Ready, Degraded, ForeignFields and scaling.

    ``recommends`` is True if decisions are not applied.
    """
    scaling = _scaling_events(before, after, recommends=recommends)
    return (*_condition_events(before, after), *_rollout_events(before, after), *scaling)


_STAGES = {Phase.STARTING: "CanaryStarted", Phase.CANARY: "CanaryStep", Phase.PROMOTING: "CanaryPassed"}


def _rollout_events(before: JSON, after: JSON) -> Sequence[Event]:
    """Return an Event for each stage of a canary. The condition Degraded reports one that failed."""
    old, new = (found if isinstance(found := part.get(ROLLOUT), Mapping) else {} for part in (before, after))
    places = [[part.get(name) for name in ("phase", "canaryRevision", "weightPercent")] for part in (old, new)]
    if places[0] == places[1] or not new:
        return ()
    message = str(new.get("message", ""))
    if new.get("phase") == Phase.STABLE:
        was = old.get("phase")
        ended = "CanaryPromoted" if was == Phase.PROMOTING else "CanaryWithdrawn"
        reason = "" if was in (None, Phase.STABLE) else ended
        return (Event(warning=False, reason=reason, message=message),) if reason else ()
    reason = _STAGES.get(Phase(str(new["phase"])), "")
    return (Event(warning=False, reason=reason, message=message),) if reason else ()


def _condition_events(before: JSON, after: JSON) -> Sequence[Event]:
    known = {condition.get("type"): condition for condition in items_of(before, "conditions")}
    found = []
    for condition in items_of(after, "conditions"):
        kind, is_true = condition["type"], condition["status"] == "True"
        old = known.get(kind, {})
        if (old.get("status"), old.get("reason")) == (condition["status"], condition["reason"]):
            continue
        overdue = kind == c.PROGRESSING and condition["reason"] == FailureReason.DEADLINE_EXCEEDED
        warning = (
            overdue
            or (kind == c.DEGRADED and is_true)
            or (kind == c.AUTOSCALING and condition["reason"] != "NotConfigured")
        )
        # Starting replicas are no news before the first one has served.
        begins = condition["reason"] in _BEGINNINGS and old.get("status") != "True"
        added = kind == c.FOREIGN_FIELDS and is_true
        is_reported = added or (kind == c.READY and not begins) or (warning and not (kind == c.AUTOSCALING and is_true))
        if is_reported:
            found.append(Event(warning=warning, reason=str(condition["reason"]), message=str(condition["message"])))
    # Ready and Degraded often change for the same reason, which is one Event.
    return list({event.reason: event for event in found}.values())


def _scaling_events(before: JSON, after: JSON, *, recommends: bool) -> Sequence[Event]:
    old, new = (items_of(section_of(status, "autoscaling"), "history") for status in (before, after))
    return [_scaling_event(change, recommends=recommends) for change in new if change not in old]


def _scaling_event(change: JSON, *, recommends: bool) -> Event:
    is_up = number_of(change, "to") > number_of(change, "from")
    way = f"{change.get('from')} → {change.get('to')}"
    why = str(change.get("message")).removeprefix(f"{way}: ")
    if recommends:
        reason = "ScaleUpRecommended" if is_up else "ScaleDownRecommended"
        return Event(
            warning=False, reason=reason, message=f"recommended {way} replicas (mode Recommend, not applied): {why}"
        )
    return Event(warning=False, reason="ScaledUp" if is_up else "ScaledDown", message=f"{way} replicas: {why}")
