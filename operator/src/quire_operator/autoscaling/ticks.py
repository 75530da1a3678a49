"""The log of the autoscaler's decisions: the newest tick in full, and equal ticks in a row as one entry.

``quire up`` keeps the log in its state file, and the operator serves it at /decisions. Pure. Holding has reasons like
scaling, so both are logged.
"""

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from quire_operator.api import MetricsSource
from quire_operator.autoscaling.decide import Decision


class DemandTerm(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    need: float
    """A number of replicas, not rounded."""
    detail: str


class MetricsState(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The source of a tick's metrics and its state."""

    source: MetricsSource
    problem: str | None = None
    """The reason why the source gave no metrics."""
    oldest_seconds: float | None = None
    """The age of the oldest among the ready replicas' newest samples; None if there never was one."""


class Tick(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One decision, for another number of replicas or for the same."""

    time: datetime
    from_replicas: int = msgspec.field(name="from")
    to_replicas: int = msgspec.field(name="to")
    reason: str
    message: str
    """One sentence with the figures."""
    enforced: bool
    inputs: Mapping[str, float]
    terms: tuple[DemandTerm, ...] = ()
    metrics: MetricsState | None = None
    """None if it was not recorded."""

    @property
    def is_change(self) -> bool:
        return self.from_replicas != self.to_replicas


class Stretch(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Ticks in a row with the same decision."""

    since: datetime
    ticks: int
    last: Tick


Log = tuple[Stretch, ...]
"""The oldest stretch first."""


def tick_of(decision: Decision, *, source: MetricsSource, problem: str | None) -> Tick:
    """Return a decision in the form in which users see it."""
    oldest = decision.oldest_sample
    return Tick(
        time=time_of(decision.time),
        from_replicas=decision.current,
        to_replicas=decision.desired,
        reason=decision.reason.value,
        message=decision.message,
        enforced=decision.enforced,
        inputs=dict(decision.inputs),
        terms=tuple(
            DemandTerm(reason=term.reason.value, need=round(term.need, 3), detail=term.detail)
            for term in sorted(decision.terms, key=lambda term: -term.need)
        ),
        metrics=MetricsState(
            source=source,
            problem=problem,
            oldest_seconds=None if oldest is None else round(max(0.0, decision.time - oldest), 3),
        ),
    )


def time_of(seconds: float) -> datetime:
    """Return Unix seconds as a time, to the millisecond."""
    return datetime.fromtimestamp(round(seconds, 3), UTC)


def noted(log: Log, tick: Tick, *, limit: int) -> Log:
    """Return the log with one more tick. Only the newest tick keeps its terms."""
    last = log[-1] if log else None
    if last is not None and _same(last.last, tick):
        return (*log[:-1], Stretch(since=last.since, ticks=last.ticks + 1, last=tick))
    before = tuple(map(_without_terms, log[-1:]))
    return (*log[:-1], *before, Stretch(since=tick.time, ticks=1, last=tick))[-limit:]


def _same(a: Tick, b: Tick) -> bool:
    return (a.from_replicas, a.to_replicas, a.reason) == (b.from_replicas, b.to_replicas, b.reason)


def _without_terms(stretch: Stretch) -> Stretch:
    last = msgspec.structs.replace(stretch.last, terms=())
    return Stretch(since=stretch.since, ticks=stretch.ticks, last=last)


def read_log(value: object) -> Log:
    """Return the log that was stored as JSON; empty if it cannot be read, such as one of another version."""
    try:
        return tuple(msgspec.convert(value, tuple[Stretch, ...]))
    except msgspec.ValidationError:
        return ()
