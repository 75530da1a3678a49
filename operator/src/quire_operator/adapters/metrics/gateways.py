"""The requests that gateways hold and run, polled from each gateway, because a first request cannot wait for a scrape.

It implements the gateway half of ``ports.Metrics``, and ``ports.TracksReader``. Each gateway gives one small answer
(``gateway_contract``); one short deadline applies to all.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from quire_common.contract.gateway import REQUESTS_PATH, TRACKS_PATH
from quire_operator.adapters.metrics.pages import NoPage, Pages
from quire_operator.domain.autoscaling.gateway_contract import GatewayRequests, read_requests, summed
from quire_operator.domain.canary import figures

Read = Callable[[str], Awaitable[bytes]]

_TIMEOUT_SECONDS = 2.0
_MAX_BYTES = 4 * 2**20

_log = logging.getLogger(__name__)


class Gateways:
    """A poller of gateways. ``addresses`` returns their scheme, host and port at each poll."""

    def __init__(self, addresses: Callable[[], Awaitable[Sequence[str]]], *, read: Read | None = None) -> None:
        """Read over HTTP if ``read`` is None."""
        self._addresses = addresses
        self._pages = Pages(timeout_seconds=_TIMEOUT_SECONDS, max_bytes=_MAX_BYTES)
        self._read = read or self._pages.read
        self._silent: frozenset[str] = frozenset()
        self.asked: int | None = None
        """The number of gateways in the last poll; None before the first."""
        self.answered = 0

    async def aclose(self) -> None:
        await self._pages.aclose()

    async def requests(self) -> GatewayRequests | None:
        """See ``ports.Metrics.gateway_requests``."""
        addresses = await self._addresses()
        answers = await asyncio.gather(*map(self._ask, addresses))
        self.asked, self.answered = len(addresses), sum(answer is not None for answer in answers)
        silent = {address for address, answer in zip(addresses, answers, strict=True) if answer is None}
        for address in self._silent - silent:
            _log.info("gateway answers again: %s" if address in addresses else "gateway removed: %s", address)
        self._silent = frozenset(silent)
        return summed(answers)

    async def tracks(self) -> figures.TracksPage:
        """See ``ports.TracksReader``."""
        pages = await asyncio.gather(*map(self._ask_tracks, await self._addresses()))
        return figures.summed(page for page in pages if page is not None)

    async def _ask_tracks(self, address: str) -> figures.TracksPage | None:
        try:
            return figures.read_tracks(await self._read(f"{address.rstrip('/')}{TRACKS_PATH}"))
        except (NoPage, ValueError) as error:
            # A gateway of an older release does not have this page: it sends all requests to the stable revision.
            _log.warning("reading the figures of canaries failed: %s: %s", address, error)
            return None

    async def _ask(self, address: str) -> GatewayRequests | None:
        try:
            return read_requests(await self._read(f"{address.rstrip('/')}{REQUESTS_PATH}"))
        except (NoPage, ValueError) as error:
            if address not in self._silent:
                _log.warning("gateway poll failed: %s: %s", address, error)
            return None
