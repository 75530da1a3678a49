"""What the autoscaler said, tick by tick: the newest tick whole, and a log in which ticks that said the same are one.

Between ``autoscaler.decide`` and people: ``quire up`` keeps the log in its state file, the operator serves it at
/decisions, ``explanation`` reads it from either. Pure. Holding still has reasons as well as moving, so both are told.
"""

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from quire_operator.domain.autoscaling.autoscaler import Decision
from quire_operator.domain.resource import MetricsSource


class DemandTerm(msgspec.Struct, frozen=True, kw_only=True):
    """One reason to have replicas."""

    reason: str
    need: float
    """Replicas, not rounded."""
    detail: str


class MetricsState(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Where a tick's figures came from."""

    source: MetricsSource
    problem: str | None = None
    """Why the source gave nothing."""
    oldest_seconds: float | None = None
    """Of the ready replicas' newest samples the oldest one's age; None where none ever gave one."""


class Tick(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One decision, for another number or for the same."""

    time: datetime
    from_replicas: int = msgspec.field(name="from")
    to_replicas: int = msgspec.field(name="to")
    reason: str
    message: str
    """One sentence with its numbers."""
    enforced: bool
    inputs: Mapping[str, float]
    terms: tuple[DemandTerm, ...] = ()
    metrics: MetricsState | None = None
    """None where that was not kept."""

    @property
    def is_change(self) -> bool:
        return self.from_replicas != self.to_replicas


class Stretch(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Ticks on end that said the same."""

    since: datetime
    ticks: int
    last: Tick


Log = tuple[Stretch, ...]
"""Oldest first."""


def tick_of(decision: Decision, *, source: MetricsSource, problem: str | None) -> Tick:
    """A decision as people are told of it."""
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
    """Unix seconds, to the millisecond."""
    return datetime.fromtimestamp(round(seconds, 3), UTC)


def noted(log: Log, tick: Tick, *, limit: int) -> Log:
    """With one tick more; only the newest keeps its terms."""
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


def log_json(log: Log) -> list[object]:
    """For the state file."""
    written: list[object] = msgspec.to_builtins(log)
    return written


def read_log(value: object) -> Log:
    """What ``log_json`` wrote; empty where it can't be read, as of another version."""
    try:
        return tuple(msgspec.convert(value, tuple[Stretch, ...]))
    except msgspec.ValidationError:
        return ()
