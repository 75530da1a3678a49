"""What requests the gateways have, asked of each of them directly: a first request can't wait for a scrape.

The half of ``ports.Metrics`` that looks at gateways. One small answer each (``gateway_contract``), within one short
deadline.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from quire_common.contract.gateway import REQUESTS_PATH
from quire_operator.adapters.metrics.pages import NoPage, Pages
from quire_operator.domain.autoscaling.gateway_contract import GatewayRequests, read_requests, summed

Read = Callable[[str], Awaitable[bytes]]

_TIMEOUT_SECONDS = 2.0

_log = logging.getLogger(__name__)


class Gateways:
    """``addresses`` gives the gateways' scheme, host and port anew each time."""

    def __init__(self, addresses: Callable[[], Awaitable[Sequence[str]]], *, read: Read | None = None) -> None:
        """``read`` None: over HTTP."""
        self._addresses = addresses
        self._pages = Pages(timeout_seconds=_TIMEOUT_SECONDS)
        self._read = read or self._pages.read
        self._silent: frozenset[str] = frozenset()
        self.asked: int | None = None
        """Gateways that were asked the last time; None before the first time."""
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

    async def _ask(self, address: str) -> GatewayRequests | None:
        try:
            return read_requests(await self._read(f"{address.rstrip('/')}{REQUESTS_PATH}"))
        except (NoPage, ValueError) as error:
            if address not in self._silent:
                _log.warning("gateway poll failed: %s: %s", address, error)
            return None
