"""GET, many at once: pages of metrics of replicas, small answers of gateways.

Under ``scrape`` and ``gateways``. The client is aiohttp's, which asks thousands of addresses at a fifth of what httpx
takes. Neither proxies nor credentials of the environment are used: those who are asked are neighbours. Nothing secret
is sent, and a gateway's certificate names the address that clients use, not the pod's: it is not checked.
"""

import asyncio

import aiohttp

_MAX_BYTES = 4 * 2**20


class NoPage(Exception):
    """Why there is none: in a sentence, and in a word for a metric."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Pages:
    """Implements ``Read`` of ``scrape`` and ``gateways``; made where an event loop runs."""

    def __init__(self, *, timeout_seconds: float, at_once: int = 100) -> None:
        self._timeout, self._at_once = timeout_seconds, at_once
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def read(self, url: str) -> bytes:
        """The answer. Raises ``NoPage``."""
        try:
            async with asyncio.timeout(self._timeout), self._opened().get(url, allow_redirects=False) as response:
                if response.status != 200:
                    raise NoPage(f"HTTP {response.status}", reason="http")
                return await _capped(response.content)
        except TimeoutError:
            raise NoPage(f"no answer within {self._timeout:g} s", reason="timeout") from None
        except (aiohttp.ClientPayloadError, aiohttp.ClientResponseError) as error:
            raise NoPage(str(error), reason="bad_answer") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NoPage(str(error) or type(error).__name__, reason="unreachable") from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._at_once, ssl=False)
            timeout = aiohttp.ClientTimeout(total=None)
            jar = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=jar, trust_env=False)
        return self._session


async def _capped(content: aiohttp.StreamReader) -> bytes:
    body = bytearray()
    async for chunk in content.iter_any():
        body += chunk
        if len(body) > _MAX_BYTES:
            raise NoPage(f"over {_MAX_BYTES} bytes", reason="bad_answer")
    return bytes(body)
