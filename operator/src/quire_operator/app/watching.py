"""The watches of the process: they run from its start to its end, and start again whenever they end."""

import asyncio
import logging
import time
from collections.abc import Callable

from quire_operator.adapters.kubernetes.cluster import KubeCluster
from quire_operator.app.telemetry import WatchHealth
from quire_operator.handlers.events import Inbox, Login, Webhook, watch
from quire_operator.ports import ClusterError

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0


class Watching:
    """The watches and their health. ``running`` is set while they deliver events."""

    def __init__(
        self, *, inbox: Inbox, cluster: KubeCluster, namespace: str, lease_name: str, started: Callable[[], None]
    ) -> None:
        """``namespace`` is the namespace of the Lease; ``started`` is called whenever the watches have started."""
        self._inbox, self._cluster, self._namespace, self._lease_name = inbox, cluster, namespace, lease_name
        self._started = started
        self.running = asyncio.Event()
        self.health = WatchHealth(started=time.monotonic())

    async def run(self, login: Login, webhook: Webhook | None) -> None:
        """Watch, and start again whenever the watches end, for example after the CRD was deleted and created again."""
        while True:
            await self._wait_for_crd()
            reason = await watch(
                self._inbox,
                login,
                namespace=self._namespace,
                lease_name=self._lease_name,
                started=self._note_start,
                webhook=webhook,
            )
            self.running.clear()
            logger.warning("watches ended, restarting: %r", reason)
            await asyncio.sleep(_RETRY_SECONDS)

    def problem(self) -> str | None:
        """Return why the watches count as broken, or None; without the CRD there is nothing to watch."""
        return self.health.problem() if self.running.is_set() else None

    def lag(self) -> float:
        """Return for how many seconds the watches have shown nothing of what our calls saw."""
        return self.health.lag() if self.running.is_set() else 0.0

    def _note_start(self) -> None:
        self._started()
        self.health = WatchHealth(started=time.monotonic())
        self.running.set()

    async def _wait_for_crd(self) -> None:
        reported = None
        while True:
            try:
                if await self._cluster.is_established():
                    return
                problem = "there is no LLMDeployment kind in this cluster yet: waiting for its CRD"
            except ClusterError as error:
                problem = f"waiting for the API server: {error}"
            if problem != reported:
                logger.warning("%s", problem)
                reported = problem
            await asyncio.sleep(_RETRY_SECONDS)
