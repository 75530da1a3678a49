"""How fast requests are sent, as a function of time. Pure.

`Concurrency`: so many are always under way (a closed loop: a slow server gets fewer). `Rate`: so many start a second
whatever comes of them (an open loop, as users are); it may climb evenly from one rate to another.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """`start` per second at the moment `since`, `end` per second after `seconds`, and from then on."""

    start: float
    end: float
    since: float
    seconds: float

    def at(self, now: float) -> float:
        """Requests per second."""
        share = 1.0 if self.seconds <= 0 else min(1.0, max(0.0, (now - self.since) / self.seconds))
        return self.start + (self.end - self.start) * share

    def next_after(self, sent: float, now: float) -> float | None:
        """When the one after that of `sent` is due; None while the rate is zero and stays so."""
        rate = self.at(max(sent, now))
        if rate > 0:
            return sent + 1 / rate
        return now + 0.1 if self.end > 0 else None


Pace = Concurrency | Rate


def steady(per_second: float, now: float) -> Rate:
    return Rate(start=per_second, end=per_second, since=now, seconds=0.0)
