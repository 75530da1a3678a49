"""Metrics over HTTP from replicas and gateways, and the choice between them and Prometheus.

Users choose the image that answers, so the size of a page is bounded, and it is not decompressed. aiohttp's client
needs a fifth of the CPU time of httpx for thousands of addresses. It connects only to pods, and uses neither proxies
nor credentials of the environment. No secret is sent, and a gateway's certificate names the address for clients instead
of the pod's, so it is not verified. A replica that does not answer is absent; the autoscaler decides what that means.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import aiohttp

from quire_common.contract.gateway import REQUESTS_PATH, TRACKS_PATH
from quire_common.metrics_page import MAX_PAGE_BYTES, points
from quire_operator.autoscaling.engine_metrics import LABELLED, NAMES, sample_of
from quire_operator.autoscaling.observation import (
    Clock,
    GatewayRequests,
    ReplicaAddress,
    ReplicaPhase,
    ReplicaSample,
    read_requests,
    summed,
)
from quire_operator.canary import analysis

if TYPE_CHECKING:  # its httpx is slow to import, and few runs of quire up need it
    from quire_operator.autoscaling.prometheus import Prometheus


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

    async def answer(self, url: str) -> bytes | None:
        """Return the body, or None without one, for example because the pod waits for the download of another."""
        try:
            return await self.read(url)
        except NoPage:
            return None

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


Read = Callable[[str], Awaitable[bytes]]

_TIMEOUT_SECONDS = 3.0
_ROUND_SECONDS = 8.0
"""The time limit of one round, whatever the number of replicas that do not answer."""
_AT_ONCE = 100

_log = logging.getLogger(__name__)


class Scraper:
    """A scraper. ``failed`` is called with the reason for each replica without a sample."""

    def __init__(
        self, *, clock: Clock, read: Read | None = None, failed: Callable[[str], None] = lambda reason: None
    ) -> None:
        """Read over HTTP if ``read`` is None."""
        self._clock, self._failed = clock, failed
        self._pages = Pages(timeout_seconds=_TIMEOUT_SECONDS, max_bytes=MAX_PAGE_BYTES, at_once=_AT_ONCE)
        self._read = read or self._pages.read
        self._silent: set[str] = set()

    async def aclose(self) -> None:
        await self._pages.aclose()

    async def samples(self, replicas: Sequence[ReplicaAddress]) -> Mapping[str, ReplicaSample]:
        """Return the newest sample of each replica by name. Draining ones are scraped too: they inform the rates."""
        urls = {
            replica.name: replica.metrics_url
            for replica in replicas
            if replica.metrics_url and replica.phase in (ReplicaPhase.READY, ReplicaPhase.DRAINING)
        }
        self._silent &= set(urls.values())
        deadline = asyncio.get_running_loop().time() + _ROUND_SECONDS
        asked = iter(sorted(urls.items(), key=lambda item: item[1] in self._silent))
        answers: dict[str, ReplicaSample | None] = {}

        async def ask() -> None:
            # A few workers share the replicas: a task for each of thousands would take longer than the reading.
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    for name, url in asked:
                        answers[name] = await self._sample(url)

        await asyncio.gather(*(ask() for _ in range(min(_AT_ONCE, len(urls)))))
        for name in urls.keys() - answers.keys():
            self._note_silence(urls[name], f"no turn within {_ROUND_SECONDS:g} s: too many are silent", "timeout")
        return {name: sample for name, sample in answers.items() if sample is not None}

    async def _sample(self, url: str) -> ReplicaSample | None:
        """Return a sample, or count the failure and return None. Changes of availability are logged."""
        try:
            page = await self._read(url)
            sample = sample_of(points(page.decode(), NAMES, LABELLED), time=self._clock())
            if sample is None:
                raise NoPage("its answer lacks the metrics of an engine", reason="bad_answer")
        except UnicodeDecodeError as error:
            self._note_silence(url, str(error), "bad_answer")
            return None
        except NoPage as error:
            self._note_silence(url, str(error), error.reason)
            return None
        if url in self._silent:
            self._silent.discard(url)
            _log.info("metrics available again: %s", url)
        return sample

    def _note_silence(self, url: str, why: str, reason: str) -> None:
        self._failed(reason)
        if url not in self._silent:
            self._silent.add(url)
            _log.warning("scrape failed: %s: %s", url, why)


_GATEWAY_SECONDS = 2.0
_MAX_BYTES = 4 * 2**20


class Gateways:
    """A poller of gateways. ``addresses`` returns their scheme, host and port at each poll."""

    def __init__(self, addresses: Callable[[], Awaitable[Sequence[str]]], *, read: Read | None = None) -> None:
        """Read over HTTP if ``read`` is None."""
        self._addresses = addresses
        self._pages = Pages(timeout_seconds=_GATEWAY_SECONDS, max_bytes=_MAX_BYTES)
        self._read = read or self._pages.read
        self._silent: frozenset[str] = frozenset()
        self.asked: int | None = None
        """The number of gateways in the last poll; None before the first."""
        self.answered = 0

    async def aclose(self) -> None:
        await self._pages.aclose()

    async def requests(self) -> GatewayRequests | None:
        """Return the requests that the gateways hold and run, or None if no gateway is known or none answered."""
        addresses = await self._addresses()
        answers = await asyncio.gather(*map(self._ask, addresses))
        self.asked, self.answered = len(addresses), sum(answer is not None for answer in answers)
        silent = {address for address, answer in zip(addresses, answers, strict=True) if answer is None}
        for address in self._silent - silent:
            _log.info("gateway answers again: %s" if address in addresses else "gateway removed: %s", address)
        self._silent = frozenset(silent)
        return summed(answers)

    async def tracks(self) -> analysis.TracksPage:
        """Return the sum of what the gateways that answer report about canaries."""
        pages = await asyncio.gather(*map(self._ask_tracks, await self._addresses()))
        return analysis.summed(page for page in pages if page is not None)

    async def _ask_tracks(self, address: str) -> analysis.TracksPage | None:
        try:
            return analysis.read_tracks(await self._read(f"{address.rstrip('/')}{TRACKS_PATH}"))
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


class MetricsSources:
    """The sources of metrics. They never raise for network errors: missing values are absent."""

    def __init__(self, *, pods: Scraper, prometheus: "Prometheus | None", gateways: Gateways | None = None) -> None:
        self._pods, self._prometheus, self._gateways = pods, prometheus, gateways

    @property
    def has_prometheus(self) -> bool:
        return self._prometheus is not None

    @property
    def prometheus_problem(self) -> str | None:
        """The reason why Prometheus did not answer the last query; None if it did."""
        return None if self._prometheus is None else self._prometheus.problem

    async def aclose(self) -> None:
        await self._pods.aclose()
        if self._gateways is not None:
            await self._gateways.aclose()
        if self._prometheus is not None:
            await self._prometheus.aclose()

    async def samples(self, replicas: Sequence[ReplicaAddress]) -> Mapping[str, ReplicaSample]:
        """Return the newest sample of each replica by name, for all LLMDeployments in one call."""
        by_prometheus = [replica for replica in replicas if replica.by_prometheus]
        scraped, queried = await asyncio.gather(
            self._pods.samples([replica for replica in replicas if not replica.by_prometheus]),
            self._query(by_prometheus),
        )
        return {**scraped, **queried}

    async def _query(self, replicas: Sequence[ReplicaAddress]) -> Mapping[str, ReplicaSample]:
        return {} if self._prometheus is None else await self._prometheus.samples(replicas)

    async def gateway_requests(self) -> GatewayRequests | None:
        """Return the requests that the gateways hold and run, or None if no gateway is known or none answered."""
        return None if self._gateways is None else await self._gateways.requests()
