"""The tracks of a model with a canary: which one a request goes to, and what each of them has served.

Between ``fleet``, which has the replicas of both, and ``proxy``. Requests of one session stay on one track: its hash
decides. All other requests are divided one by one, so that the shares are those of the weight after any number of
requests. A weight that rises leaves the sessions of the canary there.

The figures start again with each revision of the canary. A replica that has just become ready is not compared: its
caches are empty and its kernels may still be compiled.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field

from quire_common.contract.gateway import CANARY, STABLE, CanaryRoute
from quire_common.contract.tracks import INTER_TOKEN_LATENCY, TIME_TO_FIRST_TOKEN, bin_of
from quire_gateway.answers import Result

WARM_UP_SECONDS = 60.0
_BUCKETS = 10_000
_MOST_DEBT = 50.0
"""The number of requests by which sessions may distort the shares before the others stop making up for it."""


@dataclass(slots=True)
class TrackFigures:
    """The requests that one track has served since the canary's revision began."""

    requests: int = 0
    warm_requests: int = 0
    """The number of them whose latencies are recorded."""
    errors: int = 0
    levels: dict[int, dict[str, Counter[int]]] = field(default_factory=dict)
    """Histograms of latencies by load level and metric."""

    def record(self, metric: str, level: int, seconds: float) -> None:
        """Add one latency of a request that met this load."""
        self.levels.setdefault(level, {}).setdefault(metric, Counter())[bin_of(seconds)] += 1

    def page(self) -> dict[str, object]:
        """Return the figures as they are sent."""
        levels = {str(level): metrics for level, metrics in sorted(self.levels.items())}
        return {
            "requests": self.requests,
            "warmRequests": self.warm_requests,
            "errors": self.errors,
            "levels": levels,
        }


@dataclass(slots=True)
class ComparedAnswers:
    """The sampled requests that both tracks have answered for a comparison."""

    counts: Counter[Result] = field(default_factory=Counter)

    def record(self, result: Result) -> None:
        """Count one comparison."""
        self.counts[result] += 1

    def page(self) -> dict[str, int]:
        """Return the figures as they are sent."""
        different = self.counts[Result.DIFFERENT]
        return {
            "compared": self.counts[Result.SAME] + different,
            "different": different,
            "nearTies": self.counts[Result.NEAR_TIE],
            "failed": self.counts[Result.FAILED],
        }


class Tracks:
    """The two tracks of one model."""

    def __init__(self, route: CanaryRoute) -> None:
        self.route = route
        self.figures = {STABLE: TrackFigures(), CANARY: TrackFigures()}
        self.answers = ComparedAnswers()
        self._uncompared = 0.0
        """The comparisons that are due."""
        self._debt = 0.0
        """The requests that the canary should have got and has not."""

    def update(self, route: CanaryRoute) -> None:
        """Apply a new weight. Another revision starts with new figures."""
        if route.revision != self.route.revision:
            self.figures = {STABLE: TrackFigures(), CANARY: TrackFigures()}
            self.answers = ComparedAnswers()
        if route != self.route:
            self._debt = 0.0
        self.route = route

    def choose(self, session: str | None) -> str:
        """Return the track of a new request."""
        share = self.route.weight_percent / 100
        is_canary = self._debt + share >= 0.5 if session is None else _bucket(session) < share * _BUCKETS
        # A weight of 0 must not make up for anything.
        debt = self._debt + share - is_canary if share else 0.0
        self._debt = max(-_MOST_DEBT, min(_MOST_DEBT, debt))
        return CANARY if is_canary and share else STABLE

    def is_compared(self) -> bool:
        """Return whether a greedy request is part of the sample of comparisons."""
        self._uncompared += self.route.compared_percent / 100
        if self._uncompared < 1.0:
            return False
        self._uncompared -= 1.0
        return True

    def page(self) -> dict[str, object]:
        """Return the figures of both tracks as they are sent."""
        tracks = {name: figures.page() for name, figures in self.figures.items()}
        return {"revision": self.route.revision, "tracks": tracks, "answers": self.answers.page()}


class TrackedAttempt:
    """The measurement of one attempt at one replica: an answer or an error, and its latencies."""

    def __init__(self, figures: TrackFigures, *, level: int, is_warm: bool, now: float) -> None:
        self._figures, self._level, self._is_warm, self._sent = figures, level, is_warm, now
        self._first: float | None = None
        self._last = 0.0
        self._events = 0
        self._is_done = False

    def note_bytes(self, now: float, *, events: int) -> None:
        """Record that a part of the answer arrived, with so many whole events of a stream."""
        if self._first is None:
            self._first = now
            if self._is_warm:
                self._figures.record(TIME_TO_FIRST_TOKEN, self._level, now - self._sent)
        self._events += events
        self._last = now

    def end(self, *, is_error: bool) -> None:
        """Count the request once: as answered, or as an error of this track."""
        if self._is_done:
            return
        self._is_done = True
        self._figures.requests += 1
        self._figures.warm_requests += self._is_warm
        self._figures.errors += is_error
        if not is_error and self._is_warm and self._first is not None and self._events >= _LEAST_EVENTS:
            gap = (self._last - self._first) / (self._events - 1)
            self._figures.record(INTER_TOKEN_LATENCY, self._level, gap)


_LEAST_EVENTS = 4
"""A stream with fewer events says little about the time between two tokens."""


def _bucket(session: str) -> int:
    digest = hashlib.blake2b(session.encode(), digest_size=8).digest()
    return int.from_bytes(digest) % _BUCKETS
