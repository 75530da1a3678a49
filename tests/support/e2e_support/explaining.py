"""Diagnosis of an expected event that did not occur: pure text from collected facts.

The most important facts come last, because a terminal shows the end.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from e2e_support.objects import Condition, Event, Pod

_EVENTS, _LOG_LINES = 15, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    conditions: tuple[Condition, ...]
    pods: tuple[Pod, ...]
    events: tuple[Event, ...]
    operator_log: tuple[str, ...]


def explained(facts: Facts) -> str:
    return "\n".join(_lines(facts))


def _lines(facts: Facts) -> Iterator[str]:
    yield from _section("the operator's last words", facts.operator_log[-_LOG_LINES:])
    yield from _section("events", map(_event, facts.events[-_EVENTS:]))
    yield from _section("pods", (line for pod in facts.pods for line in _pod(pod)))
    conditions = (f"{c.type}={c.status} {c.reason}: {c.message}" for c in facts.conditions)
    yield from _section("conditions", conditions, none="none: no operator has written a status")


def _section(title: str, lines: Iterable[str], *, none: str = "none") -> Iterator[str]:
    yield f"{title}:"
    yield from (f"  {line}" for line in list(lines) or [none])


def _event(event: Event) -> str:
    times = f" ({event.count} times)" if event.count > 1 else ""
    return f"{event.time} {event.type} {event.reason} {event.kind}/{event.name}{times}: {event.message.strip()}"


def _pod(pod: Pod) -> Iterator[str]:
    words = [pod.phase, "ready" if pod.is_ready else "not ready"]
    if pod.is_ending:
        words.append("ending")
    if pod.restarts:
        words.append(f"{pod.restarts} restarts")
    yield f"{pod.name} on {pod.node or 'no node'}: {', '.join(words)}"
    yield from (f"  {state}" for state in pod.states)
