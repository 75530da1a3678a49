"""The judgement of a canary by what the gateways report about its requests and those of the stable revision. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import exp, lgamma, log, log1p, sqrt

import msgspec

from quire_common.contract.gateway import CANARY, INTER_TOKEN_LATENCY, STABLE, TIME_TO_FIRST_TOKEN, bin_start
from quire_operator.api import Canary, Gate, GateMetric

Histogram = Mapping[int, int]
"""Counts by bin of ``quire_common.contract.gateway``."""


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that one track has served since the canary's revision began."""

    requests: int = 0
    errors: int = 0
    unanswered: int = 0
    """The requests that waited very long for their first byte, more than once if they still wait."""
    latencies: Mapping[str, Histogram] = {}
    """Histograms by metric, of the requests that met the same load on both tracks."""

    def histogram(self, metric: str) -> Histogram:
        """Return the latencies; empty without any."""
        return self.latencies.get(metric, {})

    def __add__(self, other: "Track") -> "Track":
        metrics = {*self.latencies, *other.latencies}
        return Track(
            requests=self.requests + other.requests,
            errors=self.errors + other.errors,
            unanswered=self.unanswered + other.unanswered,
            latencies={name: Counter(self.histogram(name)) + Counter(other.histogram(name)) for name in metrics},
        )


class Answers(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The sampled requests that both tracks answered for a comparison."""

    compared: int = 0
    """The comparisons that count: the same answer, or a different one."""
    different: int = 0
    near_ties: int = 0
    """Answers that part where the model itself found two tokens nearly equally likely; they do not count."""
    failed: int = 0
    """Comparisons without an answer of both tracks."""

    def __add__(self, other: "Answers") -> "Answers":
        return Answers(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracks:
    stable: Track = Track()
    canary: Track = Track()
    answers: Answers = Answers()


class _Model(msgspec.Struct, frozen=True):
    revision: str
    tracks: dict[str, Track]
    answers: Answers = Answers()


class _Page(msgspec.Struct, frozen=True):
    models: dict[str, _Model]


TracksPage = Mapping[tuple[str, str], Tracks]
"""The tracks by model and revision of the canary."""


def read_tracks(body: bytes) -> TracksPage:
    """Return what one gateway reports. Raises ``ValueError``."""
    page = msgspec.json.decode(body, type=_Page, strict=False)
    return {
        (model, found.revision): Tracks(
            stable=found.tracks.get(STABLE, Track()), canary=found.tracks.get(CANARY, Track()), answers=found.answers
        )
        for model, found in page.models.items()
    }


def summed(pages: Iterable[TracksPage]) -> TracksPage:
    total: dict[tuple[str, str], Tracks] = {}
    for page in pages:
        for key, tracks in page.items():
            before = total.get(key, Tracks())
            total[key] = Tracks(
                stable=before.stable + tracks.stable,
                canary=before.canary + tracks.canary,
                answers=before.answers + tracks.answers,
            )
    return total


def count(histogram: Histogram) -> int:
    return sum(histogram.values())


def quantile(histogram: Histogram, share: float) -> float | None:
    """Return a quantile in seconds; None without latencies."""
    left = share * count(histogram)
    if not left:
        return None
    for number in sorted(histogram):
        if left <= histogram[number]:
            return bin_start(number + left / histogram[number])
        left -= histogram[number]
    return bin_start(max(histogram) + 1)


def above(histogram: Histogram, seconds: float) -> float:
    """Return how many latencies are above a limit; the bin that contains it counts in proportion."""
    total = 0.0
    for number, amount in histogram.items():
        start, end = bin_start(number), bin_start(number + 1)
        if seconds <= start:
            total += amount
        elif seconds < end:
            total += amount * (end - seconds) / (end - start)
    return total


_SERIES = {GateMetric.TIME_TO_FIRST_TOKEN: TIME_TO_FIRST_TOKEN, GateMetric.INTER_TOKEN_LATENCY: INTER_TOKEN_LATENCY}
_FAIL_DEVIATIONS, _PASS_DEVIATIONS = 3.5, 2.5
_FAIL_SHARE, _PASS_ERRORS, _PASS_ANSWERS = 1e-3, 1e-4, 2e-3
"""The probabilities of a wrong verdict about a share of errors or of different answers. Few answers are compared."""
_FAIL_EARLY, _MIN_REQUESTS = 1e-6, 50
"""Before minRequests, an error rate fails only if it is above its limit with near certainty. A short outage of one
replica is no error rate, so that very few requests are never judged."""
_MIN_COMPARED, _COMPARED_FOR_NONE = 20, 320
"""The fewest compared answers from which a gate fails, and those that rule out differences if none is allowed."""
_DETECTED = 2.0
"""A share of so many times the limit must be ruled out before a canary passes."""
_NO_STREAMS = 2
"""After the first tokens of so many times minRequests without a single latency of a kind, there will be none."""
_HUNG = 4.0
"""A canary hangs if it has more than so many times its part of the requests without a first byte."""


class Verdict(StrEnum):
    WAITING = "Waiting"
    PASSED = "Passed"
    FAILED = "Failed"
    NO_DATA = "NoData"
    """The requests have no such latency, so that the gate does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one track. Latencies are in seconds."""

    count: int
    median: float | None = None
    percentile: float | None = None
    errors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    gate: Gate
    verdict: Verdict
    message: str
    stable: Figures
    canary: Figures
    leaning: Verdict | None = None
    """The verdict that the figures suggest without certainty; None if they suggest none."""


def judge(policy: Canary, tracks: Tracks) -> tuple[GateResult, ...]:
    return tuple(_JUDGES.get(gate.metric, _judge_latency)(gate, policy, tracks) for gate in policy.gates)


def hang(tracks: Tracks, weight_percent: int) -> str | None:
    """Return how many of the canary's requests get no answer, if that cannot be chance; None otherwise."""
    share, canary = weight_percent / 100, tracks.canary.unanswered
    total = canary + tracks.stable.unanswered
    if canary <= _HUNG * share / (1 - share) * tracks.stable.unanswered:
        return None
    if _at_least(canary, total, share) >= _FAIL_EARLY:
        return None
    return f"its requests wait for their first byte: {canary} times 30 s, against {tracks.stable.unanswered} at stable"


def _judge_latency(gate: Gate, policy: Canary, tracks: Tracks) -> GateResult:
    metric, expected = _SERIES[gate.metric], 1 - gate.share
    stable, canary = tracks.stable.histogram(metric), tracks.canary.histogram(metric)
    total, known = count(canary), count(stable)
    figures = _figures(stable, gate.share), _figures(canary, gate.share)
    limit = None if figures[0].percentile is None else gate.factor * figures[0].percentile
    slow = 0.0 if limit is None else above(canary, limit)
    is_known = min(total, known) >= _MIN_COMPARED
    leaning = (Verdict.PASSED if slow <= expected * total else Verdict.FAILED) if is_known else None
    result = _results(gate, stable=figures[0], canary=figures[1], leaning=leaning)
    first_tokens = count(tracks.canary.histogram(TIME_TO_FIRST_TOKEN))
    if not total and first_tokens >= _NO_STREAMS * policy.min_requests:
        return result(Verdict.NO_DATA, "no request has this latency, so that the gate does not count")
    if min(total, known) < policy.min_requests:
        text = f"{min(total, known)} of {policy.min_requests} requests at equal load per replica"
        if not total and tracks.canary.requests >= policy.min_requests:
            text += ", which this weight does not reach with these replicas: 50 % always does"
        return result(Verdict.WAITING, text)
    deviations = (slow / total - expected) / sqrt(expected * (1 - expected) * (1 / total + 1 / known))
    stated = f"{100 * slow / total:.1f} % of {total} requests were more than {round(100 * (gate.factor - 1))} %"
    text = f"{stated} above the stable p{round(100 * gate.share)}; {100 * expected:.0f} % may be"
    if figures[0].percentile and figures[1].percentile:
        text += f" ({100 * (figures[1].percentile / figures[0].percentile - 1):+.0f} %)"
    if deviations > _FAIL_DEVIATIONS:
        return result(Verdict.FAILED, text)
    if deviations < -_PASS_DEVIATIONS:
        return result(Verdict.PASSED, text)
    return result(Verdict.WAITING, f"not yet certain: {text}")


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
    is_above = _at_least(canary.errors, canary.requests, gate.error_limit) < (_FAIL_EARLY if is_early else _FAIL_SHARE)
    if is_above and canary.requests >= _MIN_REQUESTS and _is_worse(canary, stable):
        return result(Verdict.FAILED, f"{shown}; {against}")
    if is_early:
        return result(Verdict.WAITING, f"{canary.requests} of {policy.min_requests} requests")
    if _is_within(canary.errors, canary.requests, limit, _PASS_ERRORS, for_none=policy.min_requests):
        return result(Verdict.PASSED, f"{shown}; {against}")
    return result(Verdict.WAITING, f"{shown}; not yet certain; {against}")


def _judge_answers(gate: Gate, policy: Canary, tracks: Tracks) -> GateResult:
    found, limit = tracks.answers, gate.error_limit
    result = _results(
        gate,
        stable=Figures(count=found.compared),
        canary=Figures(count=found.compared, errors=found.different),
        leaning=_leaning(found.different, found.compared, limit) if found.compared >= _MIN_COMPARED else None,
    )
    sampled = f"{policy.compared_percent:g} % of the requests with temperature 0"
    if not found.compared:
        why = ", and a comparison failed on a replica" if found.failed else ""
        return result(Verdict.WAITING, f"no answer was compared yet: {sampled} are repeated on both tracks{why}")
    ties = f", {found.near_ties} more at a near tie" if found.near_ties else ""
    shown = f"{found.different} of {found.compared} compared answers differ{ties}; {100 * limit:g} % may"
    if found.compared < _MIN_COMPARED:
        return result(Verdict.WAITING, f"{shown}; at least {_MIN_COMPARED} are needed")
    if _at_least(found.different, found.compared, limit) < _FAIL_SHARE:
        return result(Verdict.FAILED, shown)
    if _is_within(found.different, found.compared, limit, _PASS_ANSWERS, for_none=_COMPARED_FOR_NONE):
        return result(Verdict.PASSED, shown)
    return result(Verdict.WAITING, f"{shown}; not yet certain")


_JUDGES = {GateMetric.ERROR_RATE: _judge_errors, GateMetric.ANSWERS: _judge_answers}


def _results(
    gate: Gate, *, stable: Figures, canary: Figures, leaning: Verdict | None
) -> Callable[[Verdict, str], GateResult]:
    """Return a function that creates results of a gate from a verdict and a message."""

    def result(verdict: Verdict, message: str) -> GateResult:
        return GateResult(gate=gate, verdict=verdict, message=message, stable=stable, canary=canary, leaning=leaning)

    return result


def _figures(histogram: Histogram, share: float) -> Figures:
    return Figures(count=count(histogram), median=quantile(histogram, 0.5), percentile=quantile(histogram, share))


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


def _is_within(events: int, count: int, limit: float, probability: float, *, for_none: int) -> bool:
    """Return whether twice the limit is ruled out; with a limit of 0, whether ``for_none`` requests had no event."""
    detected = min(1.0, _DETECTED * limit or -1.01 * log(probability) / for_none)
    return limit >= 1 or _at_most(events, count, detected) < probability


def _at_most(events: int, count: int, share: float) -> float:
    """Return the probability of at most so many events with this share."""
    if share <= 0:
        return 1.0
    if share >= 1:
        return 1.0 if events >= count else 0.0
    total = sum(exp(_log_binomial(k, count, share)) for k in range(min(events, count) + 1))
    return min(1.0, total)


def _at_least(events: int, count: int, share: float) -> float:
    """Return the probability of at least so many events with this share."""
    return 1.0 if events <= 0 else max(0.0, 1.0 - _at_most(events - 1, count, share))


def _log_binomial(k: int, n: int, share: float) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) + k * log(share) + (n - k) * log1p(-share)
