"""The hub of models, read with one time limit for each question and one pause for all while it does not answer.

``model_revisions`` and ``capacity_check`` share it, so that neither waits for a hub that the other has just found
silent. What is unknown is a result and no error: pods ask the hub themselves.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from quire_common.model_memory import ModelFacts
from quire_operator.domain.resource import HubSource
from quire_operator.ports import ModelReader, ModelUnknown

logger = logging.getLogger(__name__)

T = TypeVar("T")

_COMMIT_SECONDS = 4.0
"""A pass waits for the commit."""
_FACTS_SECONDS = 20.0
"""For all files of a model; each of them has five seconds."""
_PAUSE_SECONDS = 60.0


class HubReader:
    """The hub, for all passes and reviews of a process; close it."""

    def __init__(self, models: ModelReader, *, now: Callable[[], float]) -> None:
        """``now`` is a monotonic clock."""
        self._models, self._now = models, now
        self._paused_until = float("-inf")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._models.aclose()

    @property
    def is_paused(self) -> bool:
        """True while the hub is not asked, because it did not answer."""
        return self._now() < self._paused_until

    async def commit(self, source: HubSource) -> str | None:
        """Return the commit that the source means now; None if that is unknown."""
        return await self._answer(self._models.commit, source, within_seconds=_COMMIT_SECONDS)

    async def facts(self, source: HubSource) -> ModelFacts | None:
        """Return the facts about a model; None if they are unknown."""
        return await self._answer(self._models.facts, source, within_seconds=_FACTS_SECONDS)

    async def _answer(
        self, question: Callable[[HubSource], Awaitable[T]], source: HubSource, *, within_seconds: float
    ) -> T | None:
        if self.is_paused:
            return None
        try:
            async with asyncio.timeout(within_seconds):
                return await question(source)
        except TimeoutError:
            unknown = ModelUnknown(f"no answer about {source} within {within_seconds:g} s", unreachable=True)
        except ModelUnknown as error:
            unknown = error
        logger.info(
            "the operator cannot read %s, so no size or revision is checked before its pods download it: %s",
            source,
            unknown,
        )
        if unknown.unreachable:
            self._paused_until = self._now() + _PAUSE_SECONDS
        return None
