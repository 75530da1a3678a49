"""The resolution of moving model sources by the hub; ``reconciler`` calls it once for each source, not at each pass.

``domain.status.model_status`` decides whether to resolve. A hub that does not answer delays one pass for a few seconds
and the next ones not at all.
"""

import asyncio
import logging
from collections.abc import Callable

from quire_operator.domain.cluster_state.observed import Resource
from quire_operator.domain.resource import HubSource, Spec
from quire_operator.domain.status.model_status import Resolution, needs_resolution, stored_resolution
from quire_operator.ports import ModelReader, ModelUnknown

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 4.0
_DOWN_SECONDS = 60.0


class ModelRevisions:
    """The resolutions of all LLMDeployments."""

    def __init__(self, models: ModelReader | None, *, now: Callable[[], float]) -> None:
        """``models`` is None if the hub may not be used. ``now`` is a monotonic clock."""
        self._models, self._now = models, now
        self._down_until = float("-inf")

    async def resolution(self, resource: Resource, spec: Spec) -> Resolution | None:
        """Return the resolution of the source of this LLMDeployment; None if pods get the source as it is."""
        if not needs_resolution(spec):
            return None
        if (stored := stored_resolution(resource, spec)) is not None:
            return stored
        if self._models is None:
            return None
        assert isinstance(spec.model.source, HubSource)
        revision = await self._ask(self._models, spec.model.source)
        return Resolution(source=str(spec.model.source), revision=revision, refresh=resource.refresh_model)

    async def _ask(self, models: ModelReader, source: HubSource) -> str | None:
        if self._now() < self._down_until:
            return None
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await models.commit(source)
        except TimeoutError:
            unknown = ModelUnknown(f"no answer about {source} within {_ANSWER_SECONDS:g} s", unreachable=True)
        except ModelUnknown as error:
            unknown = error
        logger.info("%s was not resolved, its pods resolve it themselves: %s", source, unknown)
        if unknown.unreachable:
            self._down_until = self._now() + _DOWN_SECONDS
        return None
