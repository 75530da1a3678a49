"""What requests the gateways have, asked of each of them directly: a first request can't wait for a scrape.

The half of ``ports.Metrics`` that looks at gateways. One small answer each (``gateway_contract``), within one short
deadline. Sends nothing that is secret, so a gateway's certificate, which names the address that clients use and not
the pod's, is not checked.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import httpx

from quire_operator.domain.gateway_contract import REQUESTS_PATH, GatewayRequests, read_requests, summed

_TIMEOUT_SECONDS = 2.0
_MAX_BYTES = 4 * 2**20

_log = logging.getLogger(__name__)


class Gateways:
    """``addresses`` gives the gateways' scheme, host and port anew each time."""

    def __init__(
        self, addresses: Callable[[], Awaitable[Sequence[str]]], *, client: httpx.AsyncClient | None = None
    ) -> None:
        self._addresses = addresses
        self._client = client or httpx.AsyncClient(timeout=_TIMEOUT_SECONDS, trust_env=False, verify=False)
        self._silent: frozenset[str] = frozenset()
        self.asked: int | None = None
        """Gateways that were asked the last time; None before the first time."""
        self.answered = 0

    async def aclose(self) -> None:
        await self._client.aclose()

    async def requests(self) -> GatewayRequests | None:
        """See ``ports.Metrics.gateway_requests``."""
        addresses = await self._addresses()
        answers = await asyncio.gather(*map(self._ask, addresses))
        self.asked, self.answered = len(addresses), sum(answer is not None for answer in answers)
        self._note({address for address, answer in zip(addresses, answers, strict=True) if answer is None})
        return summed(answers)

    async def _ask(self, address: str) -> GatewayRequests | None:
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                async with self._client.stream("GET", f"{address.rstrip('/')}{REQUESTS_PATH}") as response:
                    response.raise_for_status()
                    body = bytearray()
                    async for chunk in response.aiter_bytes():
                        body += chunk
                        if len(body) > _MAX_BYTES:
                            raise ValueError(f"over {_MAX_BYTES} bytes")
            return read_requests(bytes(body))
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError) as error:
            if address not in self._silent:
                _log.warning("the gateway at %s does not say what it holds: %s", address, error or type(error).__name__)
            return None

    def _note(self, silent: set[str]) -> None:
        for address in self._silent - silent:
            _log.info("the gateway at %s is asked no longer, or answers again", address)
        self._silent = frozenset(silent)
