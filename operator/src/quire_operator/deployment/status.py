"""The status of an LLMDeployment and its Events: all findings and results go in, the whole status comes out. Pure.

The sections about the model and about scaling are also read again: they are what a successor knows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from quire_common.contract import engine
from quire_operator.api import HubSource, RemoteSource, Spec
from quire_operator.api.fields import JSON, clock_time, format_time, items_of, number_of, parse_time, section_of
from quire_operator.autoscaling.history import Change, ScalingRecord
from quire_operator.autoscaling.rates import Rates
from quire_operator.autoscaling.schedules import recorded_bounds
from quire_operator.canary.progress import SECTION as ROLLOUT
from quire_operator.canary.progress import Phase
from quire_operator.deployment import conditions as c
from quire_operator.deployment.conditions import BlockingCondition, View, conditions, merged
from quire_operator.deployment.download import Download, download_section
from quire_operator.deployment.manifests import selector
from quire_operator.deployment.pod_failures import FailureReason
from quire_operator.deployment.served_names import status_section
from quire_operator.kube.objects import Pod, Resource

SECTION = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    source: str
    revision: str | None
    """None if the hub did not say, for example because the model is private: pods then resolve it themselves."""
    refresh: str
    """The value of the annotation quire.dev/refresh-model at that time."""


def needs_resolution(spec: Spec) -> bool:
    """Return whether the operator can resolve the source, which only hubs answer without credentials."""
    return isinstance(spec.model.source, HubSource) and not spec.model.source.is_pinned


def stored_resolution(resource: Resource, spec: Spec) -> Resolution | None:
    """Return the resolution that still applies; None if the source must be resolved."""
    section = resource.status.get(SECTION)
    if not isinstance(section, Mapping) or section.get("source") != str(spec.model.source):
        return None
    refresh, revision = section.get("refresh", ""), section.get("revision")
    if refresh != resource.refresh_model:
        return None
    found = revision if isinstance(revision, str) and revision else None
    return Resolution(source=str(spec.model.source), revision=found, refresh=resource.refresh_model)


def with_revision(spec: Spec, resolution: Resolution | None) -> Spec:
    """Return the spec with the commit instead of the branch."""
    source = spec.model.source
    if resolution is None or resolution.revision is None or not isinstance(source, HubSource):
        return spec
    return replace(spec, model=replace(spec.model, source=replace(source, revision=resolution.revision)))


def model_section(
    resolution: Resolution | None, spec: Spec | None, pods: Sequence[Pod], download: Download | None
) -> dict[str, object]:
    """Return ``status.model``; empty if there is nothing to say."""
    section: dict[str, object] = {}
    if resolution is not None:
        section["source"] = resolution.source
        if resolution.revision is not None:
            section["revision"] = resolution.revision
        if resolution.refresh:
            section["refresh"] = resolution.refresh
    if versions := pod_versions(pods):
        section["podVersions"] = versions
    if download is not None:
        section["download"] = download_section(download)
    if section and spec is not None:
        section.setdefault("source", str(spec.model.source))
    return section


def kept_resolution(resource: Resource) -> dict[str, object]:
    """Return the part of ``status.model`` that stays while the spec is invalid: progress does not."""
    kept = section_of(resource.status, SECTION)
    return {name: value for name, value in kept.items() if name not in ("podVersions", "download")}


def pod_versions(pods: Sequence[Pod]) -> list[str]:
    """Return the versions that the downloads of live pods reported."""
    return sorted({pod.model_version for pod in pods if pod.model_version and not pod.deleting})


def mixed_versions(spec: Spec, pods: Sequence[Pod], *, is_rolling: bool) -> BlockingCondition | None:
    """Return the problem that replicas of one template serve different versions, or None."""
    versions = pod_versions(pods)
    if is_rolling or len(versions) < 2 or not isinstance(spec.model.source, RemoteSource):
        return None
    return BlockingCondition(
        reason="MixedModelVersions",
        message=(
            f"spec.model.source: {spec.model.source} has changed, and replicas serve different versions of it: "
            f"{', '.join(versions)}; name a commit or digest, or restart the replicas"
        ),
    )


_MAX_MESSAGE = 1024


def scaling_sections(record: ScalingRecord, spec: Spec, *, now: float) -> dict[str, object]:
    """Return the sections of status that contain a record, without empty ones."""
    sections = {
        "autoscaling": autoscaling_status(record) | _fixed_number(record, spec) | _schedule(record, spec, now),
        "capacity": capacity_status(record, block_size=spec.engine.block_size),
    }
    return {name: section for name, section in sections.items() if section}


def _fixed_number(record: ScalingRecord, spec: Spec) -> dict[str, object]:
    """Return the spec.replicas at the time of the decision; absent if it was only recommended."""
    is_in_force = record.desired_replicas is not None and not spec.only_recommends
    return {"specReplicas": spec.replicas} if is_in_force else {}


def _schedule(record: ScalingRecord, spec: Spec, now: float) -> dict[str, object]:
    """Return the schedule that is in force, or for which replicas start already; otherwise empty."""
    found = None if spec.autoscaling is None else recorded_bounds(spec.autoscaling, record, now).schedule
    if found is None:
        return {}
    window = found.schedule
    status: dict[str, object] = {
        "index": found.index,
        "cron": window.cron,
        "timeZone": window.time_zone,
        "minReplicas": found.min_replicas,
        "maxReplicas": found.max_replicas,
        "endTime": clock_time(found.end),
    }
    start = {} if found.since is None else {"startTime": clock_time(found.since)}
    return {"schedule": status | start}


def kept_section(status: JSON, spec: Spec) -> dict[str, object]:
    """Return the part of ``status.autoscaling`` that stays after spec.autoscaling was removed; empty if none does.

    The autoscaler's number of replicas stays in force until spec.replicas changes. So removing the autoscaler does not
    scale down to an outdated number.
    """
    record = scaling_record(status)
    if spec.autoscaling is not None or record is None:
        return {}
    is_same = section_of(status, "autoscaling").get("specReplicas") == spec.replicas
    if not is_same or record.desired_replicas is None or record.desired_replicas <= spec.replicas:
        return {}
    return {"desiredReplicas": record.desired_replicas, "specReplicas": spec.replicas}


def kept_replicas(status: JSON, spec: Spec) -> int | None:
    """Return the autoscaler's last number of replicas if it is still in force after spec.autoscaling was removed."""
    return _count(kept_section(status, spec), "desiredReplicas") or None


def autoscaling_status(record: ScalingRecord) -> dict[str, object]:
    """Return ``status.autoscaling``: the decisions."""
    status: dict[str, object] = {}
    if record.desired_replicas is not None:
        status["desiredReplicas"] = record.desired_replicas
    if record.changes:
        status["lastDecision"] = _change_status(record.changes[-1])
        status["history"] = [_change_status(change) for change in record.changes]
    return status


def capacity_status(record: ScalingRecord, *, block_size: int) -> dict[str, object]:
    """Return ``status.capacity``: what one replica was measured to hold and do; empty before the first measurement."""
    start_up = {} if record.start_up_seconds is None else {"startUpSeconds": record.start_up_seconds}
    rates = record.rates
    if rates is None:
        return {**start_up}
    return {
        "kvTokens": round(rates.kv_tokens),
        "kvBlocks": round(rates.kv_tokens) // block_size,
        "prefillTokensPerSecond": _per_second(rates.prefill_seconds_per_token),
        "stepMicroseconds": round(rates.step_seconds * 1e6),
        "decodeNanosecondsPerToken": round(rates.decode_seconds_per_token * 1e9),
        "meanPromptTokens": round(rates.mean_prompt_tokens),
        "meanOutputTokens": round(rates.mean_output_tokens),
        "learntTime": format_time(record.rates_time),
        **start_up,
    }


def _per_second(seconds: float) -> int:
    # 0 stands for no cost at all, so the extreme costs are written as the nearest values that can be represented.
    return 0 if seconds == 0 else max(1, round(1 / max(seconds, 1e-9)))


def scaling_record(status: JSON) -> ScalingRecord | None:
    """Return the record in a whole ``status``; None without a section on autoscaling."""
    recorded, capacity = status.get("autoscaling"), section_of(status, "capacity")
    if not isinstance(recorded, Mapping):
        return None
    desired, changes = recorded.get("desiredReplicas"), map(_change, items_of(recorded, "history"))
    rates = _rates(capacity)
    return ScalingRecord(
        desired_replicas=desired if isinstance(desired, int) and desired >= 0 else None,
        changes=tuple(change for change in changes if change is not None),
        rates=rates,
        rates_time=0.0 if rates is None else parse_time(capacity.get("learntTime")) or 0.0,
        start_up_seconds=_count(capacity, "startUpSeconds") or None,
    )


def _change_status(change: Change) -> dict[str, object]:
    return {
        "time": format_time(change.time),
        "from": change.from_replicas,
        "to": change.to_replicas,
        "reason": change.reason,
        "message": change.message[:_MAX_MESSAGE],
        "inputs": {name: _amount(value) for name, value in change.inputs.items()},
    }


def _change(item: JSON) -> Change | None:
    time, before, after = parse_time(item.get("time")), item.get("from"), item.get("to")
    if time is None or not isinstance(before, int) or not isinstance(after, int):
        return None
    return Change(
        time=time,
        from_replicas=before,
        to_replicas=after,
        reason=str(item.get("reason", "")),
        message=str(item.get("message", "")),
        inputs=_amounts(section_of(item, "inputs")),
    )


def _rates(capacity: JSON) -> Rates | None:
    step, prefill, decode = (
        _count(capacity, "stepMicroseconds"),
        _count(capacity, "prefillTokensPerSecond"),
        _count(capacity, "decodeNanosecondsPerToken"),
    )
    prompt, output, kv = (_count(capacity, name) for name in ("meanPromptTokens", "meanOutputTokens", "kvTokens"))
    if step is None or prefill is None or decode is None or prompt is None or output is None or kv is None:
        return None
    return Rates(
        step_seconds=step / 1e6,
        prefill_seconds_per_token=1 / prefill if prefill else 0.0,
        decode_seconds_per_token=decode / 1e9,
        mean_prompt_tokens=float(prompt),
        mean_output_tokens=float(output),
        kv_tokens=float(kv),
    )


def _count(section: JSON, name: str) -> int | None:
    """Return the number, or None unless it is an integer that is not negative."""
    value = section.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _amounts(section: JSON) -> dict[str, float]:
    amounts: dict[str, float] = {}
    for name, text in section.items():
        try:
            amount = float(str(text))
        except ValueError:
            continue
        if isfinite(amount):
            amounts[str(name)] = amount
    return amounts


def _amount(value: float) -> str:
    return f"{value:.6g}"


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
