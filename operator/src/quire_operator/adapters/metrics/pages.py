"""HTTP GET of many small pages at once: metrics of replicas and answers of gateways.

``scrape`` and ``gateways`` use it. aiohttp's client needs a fifth of the CPU time of httpx for thousands of addresses.
It uses neither proxies nor credentials of the environment, because it connects only to pods. No secret is sent, and a
gateway's certificate names the address for clients instead of the pod's, so it is not verified. Users choose the image
that answers, so the size of a page is bounded, and it is not decompressed.
"""

import asyncio

import aiohttp


class NoPage(Exception):
    """A page could not be read: a message, and a reason for the metric."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Pages:
    """A client that implements ``Read`` of ``scrape`` and ``gateways``. It opens its session on first use."""

    def __init__(self, *, timeout_seconds: float, max_bytes: int, at_once: int = 100) -> None:
        self._timeout, self._max_bytes, self._at_once = timeout_seconds, max_bytes, at_once
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def read(self, url: str) -> bytes:
        """Return the body. Raises ``NoPage``."""
        try:
            async with asyncio.timeout(self._timeout), self._opened().get(url, allow_redirects=False) as response:
                if response.status != 200:
                    raise NoPage(f"HTTP {response.status}", reason="http")
                return await self._capped(response.content)
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
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=timeout,
                cookie_jar=jar,
                trust_env=False,
                auto_decompress=False,
                headers={"Accept-Encoding": "identity"},
            )
        return self._session

    async def _capped(self, content: aiohttp.StreamReader) -> bytes:
        body = bytearray()
        async for chunk in content.iter_any():
            body += chunk
            if len(body) > self._max_bytes:
                raise NoPage(f"over {self._max_bytes} bytes", reason="bad_answer")
        return bytes(body)
