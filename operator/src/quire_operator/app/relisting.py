"""Listing the whole cluster again: when leading starts, after a watch restarted, and at intervals.

It also reports what the operator has no permission to list.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from quire_operator.domain.cluster_state.observed import Key
from quire_operator.handlers.events import CHILD_KINDS
from quire_operator.ports import Cluster, ClusterError, Forbidden
from quire_operator.reconcile.resync import Unlisted, resync
from quire_operator.reconcile.store import Store
from quire_operator.reconcile.workqueue import Workers

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
_SETTLE_SECONDS = 2.0
_JITTER_SECONDS = 30.0


class Relisting:
    """The lists of all objects that the operator watches."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        store: Store,
        workers: Workers[Key],
        adapters: Callable[[], Awaitable[None]],
        period_seconds: float,
        reported: Callable[[frozenset[str]], None],
    ) -> None:
        """``adapters`` lists the LLMAdapters; ``reported`` is given the kinds that may not be listed."""
        self._cluster, self._store, self._workers, self._adapters = cluster, store, workers, adapters
        self._period_seconds, self._reported = period_seconds, reported
        self._requested = asyncio.Event()
        self._unlisted = Unlisted()

    @property
    def unlisted_kinds(self) -> frozenset[str]:
        """The kinds that the last list had no permission for."""
        return self._unlisted.kinds

    def request(self) -> None:
        """Have everything listed soon, because a watch restarted."""
        self._requested.set()

    async def repeat(self) -> None:
        """List at intervals and on request, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._period_seconds * random.uniform(0.9, 1.1)):
                    await self._requested.wait()
            except TimeoutError:
                await self.once()
                for key in self._store.live_keys():
                    self._workers.add_after(key, random.uniform(0, min(_JITTER_SECONDS, self._period_seconds / 2)))
            else:
                await asyncio.sleep(_SETTLE_SECONDS)
                self._requested.clear()
                await self.once()

    async def once(self) -> None:
        """List everything, and try again until the API server answers."""
        while True:
            try:
                kinds = tuple(CHILD_KINDS)
                self._report(await resync(self._cluster, self._store, kinds=kinds, enqueue=self._workers.add))
                await self._list_adapters()
                return
            except ClusterError as error:
                logger.warning("listing failed: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _list_adapters(self) -> None:
        """List the LLMAdapters. Without the permission, only LLMDeployments with adapters wait."""
        try:
            await self._adapters()
        except Forbidden as error:
            logger.error("no permission to list LLMAdapters: check the operator's role: %s", error)

    def _report(self, unlisted: Unlisted) -> None:
        namespaces = unlisted.namespaces
        if unlisted.kinds and unlisted.kinds != self._unlisted.kinds:
            logger.error(
                "no permission to list %s; these objects are not repaired: check the operator's role",
                ", ".join(sorted(unlisted.kinds)),
            )
        if namespaces and namespaces != self._unlisted.namespaces:
            logger.warning(
                "no permission to list in %s, which is skipped: if the namespace is gone, remove it from "
                "--watch-namespace (the chart's watchNamespaces); otherwise check the operator's role there",
                ", ".join(sorted(namespaces)),
            )
        self._unlisted = unlisted
        self._reported(unlisted.kinds)
