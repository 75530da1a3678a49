"""The rate of requests as a function of time. Pure.

`Concurrency`: a constant number of running requests (a closed loop: a slow server gets fewer). `Rate`: a number of
requests started per second, whatever their results (an open loop, like users); it may change linearly.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A rate of `start` per second at the time `since`, and `end` per second after `seconds` and from then on."""

    start: float
    end: float
    since: float
    seconds: float

    def at(self, now: float) -> float:
        """Return the requests per second."""
        share = 1.0 if self.seconds <= 0 else min(1.0, max(0.0, (now - self.since) / self.seconds))
        return self.start + (self.end - self.start) * share

    def next_after(self, sent: float, now: float) -> float | None:
        """Return when the request after `sent` ones is due, or None while the rate stays zero."""
        rate = self.at(max(sent, now))
        if rate > 0:
            return sent + 1 / rate
        return now + 0.1 if self.end > 0 else None


Pace = Concurrency | Rate


def steady(per_second: float, now: float) -> Rate:
    return Rate(start=per_second, end=per_second, since=now, seconds=0.0)
