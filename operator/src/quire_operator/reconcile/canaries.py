"""The figures of canaries, polled from the gateways while this process leads.

``app`` runs ``follow``. Each gateway keeps what the tracks have served since the revision of the canary began, so that
an operator that starts again knows all of it, and a gateway that starts again only makes the verdict later.
"""

import asyncio

from quire_operator.domain.canary.figures import Tracks, TracksPage
from quire_operator.domain.canary.progress import HAS_CANARY
from quire_operator.domain.canary.record import read
from quire_operator.domain.cluster_state.observed import Key
from quire_operator.ports import Enqueue, TracksReader
from quire_operator.reconcile.store import Store

PERIOD_SECONDS = 15.0


class Canaries:
    """The figures of the canaries of all LLMDeployments."""

    def __init__(self, *, store: Store, enqueue: Enqueue, period_seconds: float = PERIOD_SECONDS) -> None:
        self._store, self._enqueue, self._period = store, enqueue, period_seconds
        self._page: TracksPage = {}

    def figures(self, model: str | None, revision: str) -> Tracks | None:
        """Return what the gateways report about a revision of a model's canary; None if none of them knows it."""
        return None if model is None else self._page.get((model, revision))

    async def follow(self, reader: TracksReader) -> None:
        """Poll until cancelled."""
        try:
            while True:
                await self.poll(reader)
                await asyncio.sleep(self._period)
        finally:
            self._page = {}

    async def poll(self, reader: TracksReader) -> None:
        """Read the figures once if there is a canary, and enqueue the LLMDeployments that have one."""
        keys = [key for key in self._store.live_keys() if self._has_canary(key)]
        self._page = await reader.tracks() if keys else {}
        for key in keys:
            self._enqueue(key)

    def _has_canary(self, key: Key) -> bool:
        resource = self._store.resource(key)
        record = None if resource is None else read(resource.status)
        return record is not None and record.phase in HAS_CANARY
