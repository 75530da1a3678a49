"""``status.rollout``: the record of a canary with the figures of both tracks, written and read again. Pure."""

from collections.abc import Mapping, Sequence

from quire_operator.domain.canary.judgement import Figures, GateResult
from quire_operator.domain.canary.progress import Phase, Record
from quire_operator.domain.resource import GateMetric
from quire_operator.domain.resource.canary import LATENCIES
from quire_operator.domain.resource.times import clock_time, parse_time
from quire_operator.domain.resource.untyped import JSON, number_of

SECTION = "rollout"
_MAX_MESSAGE = 2000


def section(
    record: Record, results: Sequence[GateResult] | None, *, compared_percent: float = 0.0
) -> dict[str, object]:
    """Return ``status.rollout``. Without results, ``with_gates`` adds the last ones.

    ``compared_percent`` is the share of greedy requests whose answers the gateways compare.
    """
    found: dict[str, object] = {
        "phase": record.phase.value,
        "stableRevision": record.stable,
        "weightPercent": record.weight_percent,
        "message": record.message[:_MAX_MESSAGE],
    }
    if record.canary:
        found |= {"canaryRevision": record.canary, "step": record.step + 1}
        found |= {"startTime": clock_time(record.started), "stepStartTime": clock_time(record.step_started)}
    if compared_percent and record.phase is Phase.CANARY:
        found["comparedPerMillion"] = round(compared_percent * 10_000)
    if record.rejected:
        found["rejectedRevision"] = record.rejected
    if results is not None:
        found["gates"] = [_gate(result) for result in results]
    return found


def read(status: JSON) -> Record | None:
    """Return the record; None before the first one."""
    found = status.get(SECTION)
    if not isinstance(found, Mapping) or not isinstance(found.get("stableRevision"), str):
        return None
    phase = found.get("phase")
    return Record(
        stable=str(found["stableRevision"]),
        phase=Phase(phase) if phase in list(Phase) else Phase.STABLE,
        canary=str(found.get("canaryRevision", "")),
        rejected=str(found.get("rejectedRevision", "")),
        step=max(0, number_of(found, "step") - 1),
        weight_percent=number_of(found, "weightPercent"),
        started=parse_time(found.get("startTime")) or 0.0,
        step_started=parse_time(found.get("stepStartTime")) or 0.0,
        message=str(found.get("message", "")),
    )


def with_gates(wanted: dict[str, object], status: JSON, *, record: Record) -> dict[str, object]:
    """Return the section with the stored figures, if they are those of the revision that it is about."""
    stored = status.get(SECTION)
    if "gates" in wanted or not isinstance(stored, Mapping) or "gates" not in stored:
        return wanted
    about = record.canary or (record.rejected if record.phase is Phase.ROLLED_BACK else record.stable)
    of = str(stored.get("canaryRevision") or "")
    is_same = of == about or (not of and stored.get("phase") == record.phase.value)
    return {**wanted, "gates": stored["gates"]} if is_same else wanted


def _gate(result: GateResult) -> dict[str, object]:
    gate = result.gate
    found: dict[str, object] = {
        "metric": gate.metric.value,
        "verdict": result.verdict.value,
        "message": result.message[:_MAX_MESSAGE],
        "stable": _figures(result.stable, gate.metric),
        "canary": _figures(result.canary, gate.metric),
    }
    if gate.metric in LATENCIES:
        found["percentile"] = gate.percentile or 95
    return found


def _figures(figures: Figures, metric: GateMetric) -> dict[str, object]:
    found: dict[str, object] = {"count": figures.count}
    if metric not in LATENCIES:
        found["errors"] = figures.errors
    if figures.median is not None and figures.percentile is not None:
        found |= {"p50Microseconds": _micro(figures.median), "percentileMicroseconds": _micro(figures.percentile)}
    return found


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)
