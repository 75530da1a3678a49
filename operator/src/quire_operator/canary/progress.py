"""The progress of a canary: its phases and steps, and its record in ``status.rollout``. Pure.

The record is all that a successor knows, so every decision follows from it, the figures of both tracks and ``now``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from quire_common.quantities import format_duration
from quire_operator.api import Canary, CanaryStep, GateMetric, OnFailure, OnInconclusive
from quire_operator.api.fields import JSON, clock_time, number_of, parse_time
from quire_operator.api.rollout import LATENCIES, equal_load
from quire_operator.canary.analysis import Figures, GateResult, Verdict


class Phase(StrEnum):
    STABLE = "Stable"
    """The spec is the stable revision, or its canary has not started yet."""
    STARTING = "Starting"
    """The replicas of the canary start; it gets no requests."""
    CANARY = "Canary"
    PROMOTING = "Promoting"
    """The canary passed; a rolling update replaces the stable replicas."""
    ROLLED_BACK = "RolledBack"
    PAUSED = "Paused"
    """The canary failed and onFailure is Pause: it gets no requests, and its replicas stay."""


HAS_CANARY = frozenset({Phase.STARTING, Phase.CANARY, Phase.PROMOTING, Phase.PAUSED})
"""The phases in which replicas of a canary exist."""
REJECTED = frozenset({Phase.ROLLED_BACK, Phase.PAUSED})
_PAUSE_GRAIN_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    stable: str
    """The revision that serves."""
    phase: Phase = Phase.STABLE
    canary: str = ""
    """The revision that is tried; empty without a canary."""
    rejected: str = ""
    """The last revision that failed: it is not tried again."""
    step: int = 0
    weight_percent: int = 0
    started: float = 0.0
    """When the canary got its first request share; before that, when its replicas were started."""
    step_started: float = 0.0
    message: str = ""

    def current_step(self, policy: Canary) -> CanaryStep:
        """Return the step that the canary is at; the last one if the spec has fewer by now."""
        return policy.steps[min(self.step, len(policy.steps) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    revision: str
    """The revision of the spec."""
    differs: bool
    """True if it replaces replicas: its pods are not those of the stable revision."""
    replicas: int = 0
    """The target of the stable replicas; 0 keeps the weights of the steps."""
    canary_ready: bool = False
    """True if the canary's replicas are ready for the weight of its step."""
    failure: str | None = None
    """The reason why the canary's replicas are broken; None if they are not."""
    results: Sequence[GateResult] | None = None
    """The results of the gates; None while no gateway reports the canary's revision."""
    requests: int = 0
    """The canary's requests."""
    is_promoted: bool = False
    """True if all stable replicas run the stable revision."""
    is_paused: bool = False
    """True if spec.paused is set."""


def advance(before: Record | None, situation: Situation, policy: Canary, *, now: float) -> Record:
    """Return the record after this pass. ``before`` is None before the first one: then the spec is stable."""
    seen = situation
    if before is None:
        return Record(stable=seen.revision)
    if not seen.differs:
        return _settled(before, seen)
    if seen.revision == before.rejected:
        # Its canary stays while it is paused; a canary of another revision was replaced by the revert.
        keeps = before.phase is Phase.PAUSED and before.canary == seen.revision
        if keeps or before.phase is Phase.ROLLED_BACK:
            return before
        text = f"revision {seen.revision} was rejected before and is not tried again: change the spec"
        return Record(stable=before.stable, phase=Phase.ROLLED_BACK, rejected=before.rejected, message=text)
    if before.canary != seen.revision or before.phase not in HAS_CANARY:
        return _begun(before, seen, now=now)
    if before.phase is Phase.STARTING:
        return _starting(before, seen, policy, now=now)
    return _canary(before, seen, policy, now=now)


def _settled(before: Record, seen: Situation) -> Record:
    """Return the record for a spec that needs no canary: unchanged, reverted, or promoted.

    It is the stable one from now on, so that its changes of other objects than pods apply, such as those of the cache.
    """
    if before.phase is Phase.PROMOTING and not seen.is_promoted:
        return before
    message = before.message if before.phase is Phase.STABLE else ""
    if before.phase is Phase.PROMOTING:
        message = f"revision {before.stable} was promoted"
    elif before.phase is not Phase.STABLE:
        message = "the spec was changed back to the stable revision"
    return Record(stable=seen.revision, rejected=before.rejected, message=message)


def _begun(before: Record, seen: Situation, *, now: float) -> Record:
    if seen.is_paused:
        why = "spec.paused is true: no canary starts"
        return Record(stable=before.stable, rejected=before.rejected, message=why)
    return Record(
        stable=before.stable,
        phase=Phase.STARTING,
        canary=seen.revision,
        rejected=before.rejected,
        started=now,
        step_started=now,
        message="the canary's replicas start",
    )


def _starting(before: Record, seen: Situation, policy: Canary, *, now: float) -> Record:
    if seen.failure is not None:
        return _failed(before, seen.failure, policy)
    if not seen.canary_ready or seen.is_paused:
        return before
    weight = _weight(before, seen, policy)
    return replace(
        before, phase=Phase.CANARY, weight_percent=weight, started=now, step_started=now, message=_where(before, policy)
    )


def _canary(before: Record, seen: Situation, policy: Canary, *, now: float) -> Record:
    failed = [result for result in seen.results or () if result.verdict is Verdict.FAILED]
    reasons = [f"{result.gate}: {result.message}" for result in failed]
    if seen.failure is not None:
        reasons.insert(0, seen.failure)
    if reasons:
        return _failed(before, "; ".join(reasons), policy)
    step, weight = before.current_step(policy), _weight(before, seen, policy)
    if seen.is_paused:
        # The time of a pause does not count for the step. It moves seldom: each change is a write that causes a pass.
        is_late = now - before.step_started >= _PAUSE_GRAIN_SECONDS
        started = now if is_late else before.step_started
        return replace(before, step_started=started, message="spec.paused is true: the weight stays, and no step ends")
    if before.weight_percent != weight:
        if not seen.canary_ready:
            return replace(before, message=f"{_where(before, policy)}: more replicas of the canary start")
        # Also when the spec changes the weight of the step, or the autoscaler the number of stable replicas.
        before = replace(before, weight_percent=weight, step_started=now)
    left = before.step_started + step.duration_seconds - now
    results = seen.results
    if results is None:
        text = "no gateway reports this canary: requests that do not pass the gateway are not divided"
        return replace(before, message=f"{_where(before, policy)}: {text}")
    standing = f"{_where(before, policy)}: {_progress(before, seen, policy, left=left, now=now)}"
    if left > 0 or seen.requests < policy.min_requests:
        return replace(before, message=standing)
    if before.step < len(policy.steps) - 1:
        following = replace(before, step=before.step + 1, step_started=now)
        return replace(following, message=f"{_where(following, policy)}: more replicas of the canary start")
    uncertain = [result for result in results if result.verdict is Verdict.WAITING]
    if uncertain and seen.requests < policy.most_requests:
        return replace(before, message=standing)
    rule = f"after {seen.requests} requests of the canary (maxRequests {policy.most_requests})"
    if failed := [result for result in uncertain if not _counts_as_passed(result, policy)]:
        reasons = [f"{result.gate}: {result.message}" for result in failed]
        why = f"not certain {rule}, counted as failed (onInconclusive: {policy.on_inconclusive})"
        return _failed(before, f"{'; '.join(reasons)}; {why}", policy)
    passed = f"; {', '.join(str(result.gate) for result in uncertain)} counted as passed {rule}" if uncertain else ""
    return replace(
        before,
        phase=Phase.PROMOTING,
        stable=before.canary,
        message=f"the canary passed{passed}; its revision replaces the stable replicas",
    )


def _weight(record: Record, seen: Situation, policy: Canary) -> int:
    """Return the share of the requests that the canary gets in its step."""
    weight = record.current_step(policy).weight_percent
    return equal_load(weight, seen.replicas)[1] if seen.replicas else weight


def _counts_as_passed(result: GateResult, policy: Canary) -> bool:
    """Return whether a gate without a certain verdict passes."""
    if policy.on_inconclusive is OnInconclusive.ESTIMATE:
        return result.leaning is Verdict.PASSED
    return policy.on_inconclusive is OnInconclusive.PASS


def _failed(before: Record, why: str, policy: Canary) -> Record:
    is_kept = policy.on_failure is OnFailure.PAUSE
    return replace(
        before,
        phase=Phase.PAUSED if is_kept else Phase.ROLLED_BACK,
        canary=before.canary if is_kept else "",
        rejected=before.canary,
        weight_percent=0,
        message=f"revision {before.canary} failed with {before.weight_percent} % of the requests: {why}",
    )


def _where(record: Record, policy: Canary) -> str:
    step = min(record.step, len(policy.steps) - 1)
    return f"step {step + 1} of {len(policy.steps)} ({policy.steps[step].weight_percent} %)"


def _progress(record: Record, seen: Situation, policy: Canary, *, left: float, now: float) -> str:
    """Return what the step still needs, and how long that will take."""
    elapsed = now - record.started
    needed = max(policy.min_requests - seen.requests, 0)
    open_gates = [result for result in seen.results or () if result.verdict is Verdict.WAITING]
    is_last = record.step >= len(policy.steps) - 1
    if not seen.requests:
        text = f"no request has reached the canary in {_rounded(elapsed)}; {policy.min_requests} are needed"
    elif needed:
        seconds = needed * elapsed / seen.requests
        text = f"{seen.requests} requests, about {needed} more for a verdict: {_rounded(max(left, seconds))}"
    else:
        text = f"{seen.requests} requests, {_rounded(left)} left" if left > 0 else f"{seen.requests} requests"
    waiting = "; ".join(f"{result.gate}: {result.message}" for result in open_gates)
    return f"{text}; {waiting}" if is_last and left <= 0 and waiting else text


def _rounded(seconds: float) -> str:
    """Return a duration that is exact enough for people, and changes seldom."""
    grain = 60.0 if seconds >= 300 else 15.0
    return format_duration(max(grain, round(seconds / grain) * grain))


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
