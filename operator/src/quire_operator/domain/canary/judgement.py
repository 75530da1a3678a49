"""The comparison of a canary with the stable revision at equal load: ``judge(policy, tracks) -> results``. Pure.

A canary with a small weight is nearly idle, so that its raw percentiles look good. So each latency of the canary is
compared with the stable revision's latencies at the same load of a replica. A gate such as p95 +15 % asks: is the share
of canary requests slower than 1.15 times the stable p95 at their load above 5 %? The answer has a confidence interval,
which includes the uncertainty of the stable percentile. Where only one track has seen a load, the rise of latencies
with load decides: a canary that is slower at less load is worse, and one that is as fast at more load is not. A canary
that is so slow that its requests pile up beyond every stable load is worse if its latency has grown by more than the
load.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from math import exp, inf, lgamma, log, log1p, sqrt

from quire_common.contract.tracks import INTER_TOKEN_LATENCY, LEVELS, TIME_TO_FIRST_TOKEN, level_range
from quire_operator.domain.canary.figures import Histogram, Track, Tracks, above, count, quantile
from quire_operator.domain.resource import Canary, Gate, GateMetric

_SERIES = {
    GateMetric.TIME_TO_FIRST_TOKEN: TIME_TO_FIRST_TOKEN,
    GateMetric.INTER_TOKEN_LATENCY: INTER_TOKEN_LATENCY,
}
_LEAST_STABLE = 20
"""The fewest latencies of the stable revision from which a percentile at a load level is estimated."""
# The comparison is repeated every few seconds, so each single one must be nearly certain.
_FAIL_DEVIATIONS, _PASS_DEVIATIONS = 3.5, 2.5
_FAIL_ERRORS, _PASS_ERRORS = 1e-3, 2e-3
_FAIL_EARLY, _LEAST_REQUESTS = 1e-6, 50
"""Before minRequests, an error rate fails only if it is above its limit with near certainty. A short outage of one
replica is no error rate, so that very few requests are never judged."""
_CERTAIN_NONE = 6.3
"""The share of errors that n requests without one rule out, times n (0.2 %)."""
_LEAST_COMPARED, _COMPARED_FOR_NONE = 20, 320
"""The fewest compared answers from which a gate fails, and those that rule out differences if none is allowed."""
_DETECTED = 2.0
"""An error rate of so many times the limit must be ruled out before a canary passes."""
_NO_STREAMS = 2
"""After so many times minRequests of warm replicas without a single latency of a kind, there will be none."""
_MOST_REMAINING = 10_000_000


class Verdict(StrEnum):
    WAITING = "Waiting"
    PASSED = "Passed"
    FAILED = "Failed"
    NO_DATA = "NoData"
    """The requests have no such latency, so that the gate does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one track. Latencies are in seconds, at the canary's load."""

    count: int
    median: float | None = None
    percentile: float | None = None
    errors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """The result of one gate."""

    gate: Gate
    verdict: Verdict
    message: str
    stable: Figures
    canary: Figures
    remaining: int | None = None
    """The requests of the canary until a verdict is likely; None if that cannot be said."""
    leaning: Verdict | None = None
    """The verdict that the figures suggest without certainty; None if they suggest none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A latency of both tracks at one load."""

    load: str
    stable: Figures
    canary: Figures


def judge(policy: Canary, tracks: Tracks) -> tuple[GateResult, ...]:
    """Return the result of each gate."""
    return tuple(_JUDGES.get(gate.metric, _judge)(gate, policy, tracks) for gate in policy.gates)


def curve(gate: Gate, tracks: Tracks) -> tuple[CurvePoint, ...]:
    """Return a latency by load for both tracks."""
    metric = _SERIES[gate.metric]
    points = []
    for level in range(LEVELS):
        stable, canary = tracks.stable.histogram(metric, level), tracks.canary.histogram(metric, level)
        if stable or canary:
            points.append(
                CurvePoint(
                    load=level_range(level),
                    stable=_figures([(stable, 1.0)], gate.share),
                    canary=_figures([(canary, 1.0)], gate.share),
                )
            )
    return tuple(points)


# --- latencies ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matched:
    """The canary's latencies for which the stable revision has a percentile at a comparable load."""

    count: float
    slow: float
    """The number of those that are above the limit that follows from it."""
    uncertainty: float
    """The variance that the stable percentiles add, relative to that of one request."""

    def deviations(self, expected: float) -> float:
        """Return by how many standard deviations the share of slow requests is above the expected share."""
        if not self.count:
            return 0.0
        return (self.slow / self.count - expected) / sqrt(expected * (1 - expected) * self.variance)

    def leaning(self, expected: float) -> Verdict | None:
        """Return the verdict that the share of slow requests suggests; None from very few."""
        if self.count < _LEAST_STABLE:
            return None
        return Verdict.PASSED if self.slow <= expected * self.count else Verdict.FAILED

    @property
    def variance(self) -> float:
        return 1 / self.count + self.uncertainty if self.count else inf


def _judge(gate: Gate, policy: Canary, tracks: Tracks) -> GateResult:
    metric, expected = _SERIES[gate.metric], 1 - gate.share
    canary = {level: tracks.canary.histogram(metric, level) for level in range(LEVELS)}
    stable = {level: tracks.stable.histogram(metric, level) for level in range(LEVELS)}
    total = sum(map(count, canary.values()))
    strict, lenient = _matched(gate, canary, stable, _Nearest.LIGHTER), _matched(gate, canary, stable, _Nearest.HEAVIER)
    piled_up = _matched(gate, canary, stable, _Nearest.IN_PROPORTION)
    shown = [(stable[level], _weight(canary[level], stable[level])) for level in range(LEVELS)]
    figures = _figures(shown, gate.share), _figures([(each, 1.0) for each in canary.values()], gate.share)

    result = _results(gate, stable=figures[0], canary=figures[1], leaning=strict.leaning(expected))
    if not total and tracks.canary.warm_requests >= _NO_STREAMS * policy.min_requests:
        return result(Verdict.NO_DATA, "no request has this latency, so that the gate does not count")
    if total < policy.min_requests:
        text = f"{total} of {policy.min_requests} requests"
        return result(Verdict.WAITING, text, policy.min_requests - total)
    limit = f"{round(100 * (gate.factor - 1))} %"
    if lenient.count >= policy.min_requests and lenient.deviations(expected) > _FAIL_DEVIATIONS:
        slow = f"{100 * lenient.slow / lenient.count:.1f} % of {round(lenient.count)} requests"
        text = f"{slow} were more than {limit} above the stable p{round(100 * gate.share)} at equal load"
        return result(Verdict.FAILED, f"{text}; at most {100 * expected:.0f} % may be{_shown_increase(*figures)}")
    if piled_up.count >= policy.min_requests and piled_up.deviations(expected) > _FAIL_DEVIATIONS:
        slow = f"{100 * piled_up.slow / piled_up.count:.1f} % of {round(piled_up.count)} requests"
        text = f"requests pile up at the canary, and {slow} were more than {limit} above the stable"
        where = f"p{round(100 * gate.share)} even in proportion to the load"
        return result(Verdict.FAILED, f"{text} {where}{_shown_increase(*figures)}")
    if strict.count >= policy.min_requests and strict.deviations(expected) < -_PASS_DEVIATIONS:
        return result(Verdict.PASSED, f"not more than {limit} above stable at equal load{_shown_increase(*figures)}")
    if strict.count < policy.min_requests:
        return result(
            Verdict.WAITING,
            f"only {round(strict.count)} of {total} requests met a load at which the stable "
            "replicas have served too: a larger weightPercent brings the loads closer",
            None,
        )
    return result(Verdict.WAITING, f"not yet certain{_shown_increase(*figures)}", _remaining(strict, expected))


class _Nearest(Enum):
    """The stable load with which a canary's load is compared if both have seen other loads."""

    LIGHTER = auto()
    HEAVIER = auto()
    IN_PROPORTION = auto()
    """A heavier one, or else the heaviest, whose percentile then counts as if it grew with the number of requests."""


def _matched(
    gate: Gate, canary: Mapping[int, Histogram], stable: Mapping[int, Histogram], nearest: _Nearest
) -> _Matched:
    """Return the canary's latencies against the stable ones at the same load, or at the nearest comparable one."""
    total = slow = spread = 0.0
    weights: dict[int, float] = {}
    known = [level for level, histogram in stable.items() if count(histogram) >= _LEAST_STABLE]
    for level, histogram in canary.items():
        match = _match(level, known, nearest)
        amount = count(histogram)
        if match is None or not amount:
            continue
        percentile = quantile([(stable[match], 1.0)], gate.share)
        assert percentile is not None
        total += amount
        growth = _growth(match, level) if nearest is _Nearest.IN_PROPORTION else 1.0
        slow += above(histogram, gate.factor * percentile * growth)
        weights[match] = weights.get(match, 0.0) + amount
    for match, weight in weights.items():
        spread += (weight / total) ** 2 / count(stable[match])
    return _Matched(count=total, slow=slow, uncertainty=spread)


def _match(level: int, known: Sequence[int], nearest: _Nearest) -> int | None:
    """Return the stable load level to compare with; None without one."""
    if nearest is _Nearest.LIGHTER:
        return max((other for other in known if other <= level), default=None)
    heavier = min((other for other in known if other >= level), default=None)
    return max(known, default=None) if nearest is _Nearest.IN_PROPORTION and heavier is None else heavier


def _growth(stable: int, canary: int) -> float:
    """Return by how much more requests at most a replica at one level has than one at a lighter level, and itself."""
    return 2.0 ** (canary - stable + 1) if canary > stable else 1.0


def _remaining(matched: _Matched, expected: float) -> int | None:
    """Return how many more requests make the share of slow ones certain, if it stays as it is."""
    if not matched.count:
        return None
    distance = matched.slow / matched.count - expected
    deviations = _FAIL_DEVIATIONS if distance > 0 else _PASS_DEVIATIONS
    if not distance:
        return None
    per_request = expected * (1 - expected) * matched.variance * matched.count
    needed = per_request * (deviations / distance) ** 2 - matched.count
    return None if needed > _MOST_REMAINING else max(1, round(needed))


def _weight(canary: Histogram, stable: Histogram) -> float:
    """Return the weight with which stable latencies at a load count, so that the loads are those of the canary."""
    return count(canary) / count(stable) if stable else 0.0


def _figures(weighted: list[tuple[Histogram, float]], share: float) -> Figures:
    return Figures(
        count=sum(count(histogram) for histogram, _ in weighted),
        median=quantile(weighted, 0.5),
        percentile=quantile(weighted, share),
    )


def _shown_increase(stable: Figures, canary: Figures) -> str:
    if not stable.percentile or not canary.percentile:
        return ""
    return f" ({100 * (canary.percentile / stable.percentile - 1):+.0f} %)"


# --- errors ---


def _judge_errors(gate: Gate, policy: Canary, tracks: Tracks) -> GateResult:
    canary, stable = tracks.canary, tracks.stable
    limit = max(gate.error_limit, _share(stable))

    result = _results(
        gate,
        stable=Figures(count=stable.requests, errors=stable.errors),
        canary=Figures(count=canary.requests, errors=canary.errors),
        leaning=_leaning(canary.errors, canary.requests, limit),
    )
    shown = f"{canary.errors} of {canary.requests} requests failed ({100 * _share(canary):.2f} %)"
    against = f"{100 * gate.error_limit:g} % are allowed, stable has {100 * _share(stable):.2f} %"
    is_early = canary.requests < policy.min_requests
    certain = _FAIL_EARLY if is_early else _FAIL_ERRORS
    is_above = _at_least(canary.errors, canary.requests, gate.error_limit) < certain
    if is_above and canary.requests >= _LEAST_REQUESTS and _is_worse(canary, stable):
        return result(Verdict.FAILED, f"{shown}; {against}")
    if is_early:
        remaining = policy.min_requests - canary.requests
        return result(Verdict.WAITING, f"{canary.requests} of {policy.min_requests} requests", remaining)
    detected = max(_DETECTED * limit, _CERTAIN_NONE / policy.min_requests if not limit else 0.0)
    if _at_most(canary.errors, canary.requests, min(1.0, detected)) < _PASS_ERRORS or limit >= 1:
        return result(Verdict.PASSED, f"{shown}; {against}")
    return result(Verdict.WAITING, f"{shown}; not yet certain; {against}", _remaining_errors(canary, limit))


# --- answers ---


def _judge_answers(gate: Gate, policy: Canary, tracks: Tracks) -> GateResult:
    found, limit = tracks.answers, gate.error_limit

    result = _results(
        gate,
        stable=Figures(count=found.compared),
        canary=Figures(count=found.compared, errors=found.different),
        leaning=_leaning(found.different, found.compared, limit) if found.compared >= _LEAST_COMPARED else None,
    )
    sampled = f"{policy.compared_percent:g} % of the requests with temperature 0"
    if not found.compared:
        why = ", and a comparison failed on a replica" if found.failed else ""
        text = f"no answer was compared yet: {sampled} are repeated on both tracks{why}"
        return result(Verdict.WAITING, text, None)
    ties = f", {found.near_ties} more at a near tie" if found.near_ties else ""
    shown = f"{found.different} of {found.compared} compared answers differ{ties}; {100 * limit:g} % may"
    if found.compared < _LEAST_COMPARED:
        return result(Verdict.WAITING, f"{shown}; at least {_LEAST_COMPARED} are needed", None)
    if _at_least(found.different, found.compared, limit) < _FAIL_ERRORS:
        return result(Verdict.FAILED, shown)
    detected = max(_DETECTED * limit, _CERTAIN_NONE / _COMPARED_FOR_NONE if not limit else 0.0)
    if limit >= 1 or _at_most(found.different, found.compared, min(1.0, detected)) < _PASS_ERRORS:
        return result(Verdict.PASSED, shown)
    # Only a part of the canary's requests is compared.
    return result(Verdict.WAITING, f"{shown}; not yet certain", None)


_JUDGES = {GateMetric.ERROR_RATE: _judge_errors, GateMetric.ANSWERS: _judge_answers}


def _results(gate: Gate, *, stable: Figures, canary: Figures, leaning: Verdict | None) -> Callable[..., GateResult]:
    """Return a function that creates results of a gate from a verdict, a message and the remaining requests."""

    def result(verdict: Verdict, message: str, remaining: int | None = 0) -> GateResult:
        return GateResult(
            gate=gate,
            verdict=verdict,
            message=message,
            stable=stable,
            canary=canary,
            remaining=remaining,
            leaning=leaning,
        )

    return result


def _leaning(events: int, count: int, limit: float) -> Verdict | None:
    if not count:
        return None
    return Verdict.PASSED if events <= limit * count else Verdict.FAILED


def _share(track: Track) -> float:
    return track.errors / track.requests if track.requests else 0.0


def _is_worse(canary: Track, stable: Track) -> bool:
    """Return whether the canary's error rate is above the stable one by more than chance."""
    if not stable.errors:
        return True
    both = (canary.errors + stable.errors) / (canary.requests + stable.requests)
    spread = sqrt(both * (1 - both) * (1 / canary.requests + 1 / stable.requests))
    return spread > 0 and (_share(canary) - _share(stable)) / spread > _FAIL_DEVIATIONS


def _remaining_errors(canary: Track, limit: float) -> int | None:
    share = _share(canary)
    if not limit or share >= _DETECTED * limit:
        return None
    # The interval of a rare event shrinks with the root of the number of events.
    distance = max(_DETECTED * limit - share, 0.1 * limit)
    needed = 3.0**2 * _DETECTED * limit / distance**2 - canary.requests
    return max(1, round(min(needed, _MOST_REMAINING)))


def _at_most(errors: int, requests: int, share: float) -> float:
    """Return the probability of at most so many errors with this error rate."""
    if share <= 0:
        return 1.0
    if share >= 1:
        return 1.0 if errors >= requests else 0.0
    total = sum(exp(_log_binomial(k, requests, share)) for k in range(min(errors, requests) + 1))
    return min(1.0, total)


def _at_least(errors: int, requests: int, share: float) -> float:
    """Return the probability of at least so many errors with this error rate."""
    return 1.0 if errors <= 0 else max(0.0, 1.0 - _at_most(errors - 1, requests, share))


def _log_binomial(k: int, n: int, share: float) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) + k * log(share) + (n - k) * log1p(-share)
