"""The loop of the autoscaler: a tick for all LLMDeployments, and twice a second a check of models without replicas.

The operator's process and ``quire up`` both run it, each with its own ``Fleet``.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic
from typing import Protocol

from quire_operator.domain.autoscaling.autoscaler import Decision
from quire_operator.scaling.autoscale import TICK_SECONDS, Autoscaler, Subject

WAKE_SECONDS = 0.5
"""A first request is noticed, and a first replica requested, within a second."""

_log = logging.getLogger(__name__)


class Fleet(Protocol):
    """The LLMDeployments that autoscale, by key."""

    def subjects(self) -> Sequence[Subject]:
        """Return all of them."""
        ...

    def sleeping(self) -> Sequence[Subject]:
        """Return those without replicas that may get one. If this is empty, no gateway is polled."""
        ...

    def note(self, decisions: Mapping[str, Decision]) -> None:
        """Store the decisions of a tick for all of them, or of a wake for some."""
        ...


async def keep_scaling(
    autoscaler: Autoscaler,
    fleet: Fleet,
    *,
    tick_seconds: float = TICK_SECONDS,
    decided: Callable[[Decision], None] = lambda decision: None,
    ticked: Callable[[float], None] = lambda seconds: None,
) -> None:
    """Run until cancelled. ``decided`` is called with every decision, ``ticked`` with the duration of each tick."""

    async def tick() -> None:
        started = monotonic()
        tell(await autoscaler.tick(fleet.subjects()))
        ticked(monotonic() - started)

    async def wake() -> None:
        if sleeping := fleet.sleeping():
            tell(await autoscaler.wake(sleeping))

    def tell(decisions: Mapping[str, Decision]) -> None:
        fleet.note(decisions)
        for decision in decisions.values():
            decided(decision)

    async with asyncio.TaskGroup() as group:
        group.create_task(_for_ever(tick, tick_seconds))
        group.create_task(_for_ever(wake, min(tick_seconds, WAKE_SECONDS)))


async def _for_ever(look: Callable[[], Awaitable[None]], period: float) -> None:
    while True:
        await asyncio.sleep(period)
        try:
            await look()
        except Exception:  # a bug of ours; the next tick tries again
            _log.exception("autoscaler tick failed")
