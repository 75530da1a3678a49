"""A model with a canary: which version a request goes to, and what each has served. Pure."""

import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from quire_common.contract.gateway import (
    CANARY,
    EQUAL_LOAD,
    INTER_TOKEN_LATENCY,
    STABLE,
    TIME_TO_FIRST_TOKEN,
    CanaryRoute,
    bin_of,
)

WARM_UP_SECONDS = 60.0
PATIENCE_SECONDS = 30.0
"""A request counts as unanswered after such a time without a first byte, and again each time while it still waits."""
_BUCKETS = 10_000
_MOST_DEBT = 50.0
"""The number of requests by which sessions may distort the shares before the others stop making up for it."""


@dataclass(slots=True)
class TrackFigures:
    """The requests that one track has served since the canary's revision began."""

    requests: int = 0
    errors: int = 0
    latencies: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    """Histograms by metric."""
    late: int = 0
    """The requests that ended, or got their first byte, after they had counted as unanswered."""
    waiting: dict[int, float] = field(default_factory=dict)
    """The times at which requests without a first byte were sent, by an id of the attempt."""

    def page(self, now: float) -> dict[str, object]:
        """Return the figures as they are sent."""
        unanswered = self.late + sum(int((now - sent) // PATIENCE_SECONDS) for sent in self.waiting.values())
        counts = {"requests": self.requests, "errors": self.errors, "unanswered": unanswered}
        return {**counts, "latencies": self.latencies}


class Tracks:
    """The two tracks of one model."""

    def __init__(self, route: CanaryRoute) -> None:
        self.route = route
        self.figures = {STABLE: TrackFigures(), CANARY: TrackFigures()}
        self._debt = 0.0
        """The requests that the canary should have got and has not."""

    def update(self, route: CanaryRoute) -> None:
        """Apply a new weight. Another revision starts with new figures."""
        if route.revision != self.route.revision:
            self.figures = {STABLE: TrackFigures(), CANARY: TrackFigures()}
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

    def is_equal_load(self, *, stable: int, canary: int) -> bool:
        """Return whether a replica of the canary gets as many requests as a stable one, with so many ready replicas."""
        weight = self.route.weight_percent
        expected = (100 - weight) * canary
        return weight > 0 and abs(weight * stable - expected) <= EQUAL_LOAD * expected

    def page(self, now: float) -> dict[str, object]:
        """Return the figures of both tracks as they are sent."""
        tracks = {name: figures.page(now) for name, figures in self.figures.items()}
        return {"revision": self.route.revision, "tracks": tracks}


class TrackedAttempt:
    """The measurement of one attempt at one replica: an answer or an error, and its latencies."""

    def __init__(self, figures: TrackFigures, *, is_warm: bool, is_compared: bool, now: float) -> None:
        self._figures, self._is_compared, self._sent = figures, is_compared, now
        self._first: float | None = None
        if is_warm:
            figures.waiting[id(self)] = now
        self._last = 0.0
        self._events = 0
        self._is_done = False

    def note_bytes(self, now: float, *, events: int) -> None:
        """Record that a part of the answer arrived, with so many whole events of a stream."""
        if self._first is None:
            self._first = now
            self.stop_waiting(now)
            if self._is_compared:
                self._figures.latencies[TIME_TO_FIRST_TOKEN][bin_of(now - self._sent)] += 1
        self._events += events
        self._last = now

    def stop_waiting(self, now: float) -> None:
        """Record that the attempt has a first byte, or that it ended without one."""
        sent = self._figures.waiting.pop(id(self), now)
        self._figures.late += now - sent >= PATIENCE_SECONDS

    def end(self, *, is_error: bool) -> None:
        """Count the request once: as answered, or as an error of this track."""
        if self._is_done:
            return
        self._is_done = True
        self._figures.requests += 1
        self._figures.errors += is_error
        if not is_error and self._is_compared and self._first is not None and self._events >= _LEAST_EVENTS:
            gap = (self._last - self._first) / (self._events - 1)
            self._figures.latencies[INTER_TOKEN_LATENCY][bin_of(gap)] += 1


_LEAST_EVENTS = 4
"""A stream with fewer events says little about the time between two tokens."""


def _bucket(session: str) -> int:
    digest = hashlib.blake2b(session.encode(), digest_size=8).digest()
    return int.from_bytes(digest) % _BUCKETS
