"""When the autoscaler looks: every tick at everything, and twice a second at the models that have no replica.

Run by the operator's process and by ``quire up`` alike, each over its own ``Fleet``.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic
from typing import Protocol

from quire_operator.domain.autoscaling.autoscaler import Decision
from quire_operator.scaling.autoscale import TICK_SECONDS, Autoscaler, Subject

WAKE_SECONDS = 0.5
"""A first request is seen, and a first replica asked for, within a second."""

_log = logging.getLogger(__name__)


class Fleet(Protocol):
    """The LLMDeployments that autoscale, by key."""

    def subjects(self) -> Sequence[Subject]:
        """All of them."""
        ...

    def sleeping(self) -> Sequence[Subject]:
        """Those that have no replica and may be given one: nothing is asked while there are none."""
        ...

    def note(self, decisions: Mapping[str, Decision]) -> None:
        """A tick decided this for all of them, or a wake for some."""
        ...


async def keep_scaling(
    autoscaler: Autoscaler,
    fleet: Fleet,
    *,
    tick_seconds: float = TICK_SECONDS,
    wake_seconds: float = WAKE_SECONDS,
    decided: Callable[[Decision], None] = lambda decision: None,
    ticked: Callable[[float], None] = lambda seconds: None,
) -> None:
    """Until cancelled. ``decided`` is told of every decision, ``ticked`` how long each tick took."""

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
        group.create_task(_for_ever(wake, min(tick_seconds, wake_seconds)))


async def _for_ever(look: Callable[[], Awaitable[None]], period: float) -> None:
    while True:
        await asyncio.sleep(period)
        try:
            await look()
        except Exception:  # our bug; the next look is another try
            _log.exception("autoscaler tick failed")
