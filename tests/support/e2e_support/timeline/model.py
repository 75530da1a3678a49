"""A scenario's timeline: plain data on one clock, in seconds since the start of its traffic. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from e2e_support.traffic.result import Mark, Record, TrafficResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A number that is constant until its next point, such as replicas."""

    name: str
    points: tuple[tuple[float, float], ...]
    """Pairs of seconds and value, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMessage:
    """A message of the cluster: a changed condition or an event."""

    seconds: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Blind:
    """A period in which the cluster could not be observed."""

    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    title: str
    seconds: float
    marks: tuple[Mark, ...]
    records: tuple[Record, ...]
    replicas: tuple[Steps, ...] = ()
    """Desired and ready replicas of each LLMDeployment."""
    messages: tuple[ClusterMessage, ...] = ()
    blind: tuple[Blind, ...] = ()

    def as_json(self) -> str:
        """Return the timeline as JSON, with times in milliseconds."""
        return json.dumps(_rounded(asdict(self)), ensure_ascii=False)


def timeline(
    title: str,
    *results: TrafficResult | None,
    replicas: Sequence[Steps] = (),
    messages: Sequence[ClusterMessage] = (),
    blind: Sequence[Blind] = (),
) -> Timeline:
    """Return the timeline of simultaneous traffic; None marks parts that a failed scenario did not reach."""
    seen = [result for result in results if result is not None]
    records = [record for result in seen for record in result.records]
    marks = {mark for result in seen for mark in result.marks}
    return Timeline(
        title=title,
        seconds=max((result.seconds for result in seen), default=0.0),
        marks=tuple(sorted(marks, key=lambda mark: mark.seconds)),
        records=tuple(sorted(records, key=lambda record: record.started)),
        replicas=tuple(replicas),
        messages=tuple(messages),
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
