"""The autoscaler's record as ``status.autoscaling`` and ``status.capacity``, in both directions.

``status`` writes it, and a new leader reads it. API objects contain no floats. Values that cannot be read, because a
user or another version wrote them, count as absent and influence no decision.
"""

from collections.abc import Mapping
from math import isfinite

from quire_operator.domain.autoscaling.history import Change, ScalingRecord
from quire_operator.domain.autoscaling.rates import Rates
from quire_operator.domain.autoscaling.schedules import recorded_bounds
from quire_operator.domain.resource import Spec
from quire_operator.domain.resource.times import clock_time, format_time, parse_time
from quire_operator.domain.resource.untyped import JSON, items_of, section_of

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
