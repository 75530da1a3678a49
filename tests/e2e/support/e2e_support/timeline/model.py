"""A scenario's timeline: plain data on one clock, seconds since its traffic began. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from e2e_support.traffic.records import Mark, Record
from e2e_support.traffic.result import TrafficResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A number that holds until its next point, such as replicas."""

    name: str
    points: tuple[tuple[float, float], ...]
    """Seconds and value, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the cluster said: a condition that changed, an event."""

    seconds: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Blind:
    """A time within which the cluster could not be looked at."""

    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    title: str
    seconds: float
    marks: tuple[Mark, ...]
    records: tuple[Record, ...]
    replicas: tuple[Steps, ...] = ()
    """Desired and ready, for each LLMDeployment."""
    told: tuple[Told, ...] = ()
    blind: tuple[Blind, ...] = ()

    def as_json(self) -> str:
        """All of it; times to the millisecond."""
        return json.dumps(_rounded(asdict(self)), ensure_ascii=False)


def timeline(
    title: str,
    *results: TrafficResult | None,
    replicas: Sequence[Steps] = (),
    told: Sequence[Told] = (),
    blind: Sequence[Blind] = (),
) -> Timeline:
    """Of traffic that was begun at the same time; None is what a scenario that failed did not come to."""
    seen = [result for result in results if result is not None]
    records = [record for result in seen for record in result.records]
    marks = {mark for result in seen for mark in result.marks}
    return Timeline(
        title=title,
        seconds=max((result.seconds for result in seen), default=0.0),
        marks=tuple(sorted(marks, key=lambda mark: mark.seconds)),
        records=tuple(sorted(records, key=lambda record: record.started)),
        replicas=tuple(replicas),
        told=tuple(told),
        blind=tuple(blind),
    )


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return round(value, 3)
        case Mapping():
            return {name: _rounded(one) for name, one in value.items()}
        case list() | tuple():
            return [_rounded(one) for one in value]
        case _:
            return value
