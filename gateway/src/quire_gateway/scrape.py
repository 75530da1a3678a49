"""Asks every replica for its queue, its running requests and its KV use, about once a second.

Feeds ``fleet``, by which ``balance`` picks. A replica that does not answer is not dead: it is only unknown, and counts
by our own requests alone.
"""

import asyncio
import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from quire_gateway.balance import Load
from quire_gateway.fleet import Backend, Fleet

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
FINISHED = "vllm:request_success_total"
NAMES = frozenset({RUNNING, WAITING, KV_USAGE, FINISHED})

PERIOD_SECONDS = 1.0
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_RATE_SECONDS = 10.0
_MAX_BYTES = 2**20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What the balancer wants of one scrape."""

    running: float
    waiting: float
    kv_usage: float
    finished: float


def parse_page(text: str) -> Page | None:
    """The four figures, summed over engines and reasons; None if one of the gauges is missing."""
    lines = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] in NAMES]
    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + float(sample.value)
    except (ValueError, IndexError, KeyError):
        return None
    if not {RUNNING, WAITING, KV_USAGE} <= sums.keys() or not all(value >= 0 for value in sums.values()):
        return None
    return Page(running=sums[RUNNING], waiting=sums[WAITING], kv_usage=sums[KV_USAGE], finished=sums.get(FINISHED, 0.0))


async def read_capped(content: aiohttp.StreamReader, limit: int) -> bytes:
    """All of it, or ValueError where that is more than ``limit`` bytes."""
    body = bytearray()
    async for chunk in content.iter_any():
        body += chunk
        if len(body) > limit:
            raise ValueError(f"over {limit} bytes")
    return bytes(body)


class Rate:
    """Growth per second of a counter, over the last ``_RATE_SECONDS``."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque()

    def add(self, value: float, now: float) -> float | None:
        """With one more reading; None before a second one, or when nothing grew. A counter that fell starts anew."""
        if self._points and value < self._points[-1][1]:
            self._points.clear()
        self._points.append((now, value))
        while len(self._points) > 2 and self._points[0][0] < now - _RATE_SECONDS:
            self._points.popleft()
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start and last > first else None


class Scraper:
    """Runs beside the proxy, on its session."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self._fleet = fleet
        self._session = session
        self._rates: dict[str, Rate] = {}
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            started = monotonic()
            await self.scrape_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, PERIOD_SECONDS - (monotonic() - started))):
                    await self._hurry.wait()
            self._hurry.clear()

    def hurry(self) -> None:
        """There are replicas that were never asked: don't wait for the next turn."""
        self._hurry.set()

    async def scrape_all(self) -> None:
        """Every replica once, all at the same time."""
        backends = self._fleet.backends()
        self._rates = {b.endpoint.url: self._rates.get(b.endpoint.url) or Rate() for b in backends}
        await asyncio.gather(*(self._scrape(backend) for backend in backends))

    async def _scrape(self, backend: Backend) -> None:
        url = f"{backend.endpoint.url}/metrics"
        in_flight = backend.in_flight
        try:
            async with self._session.get(url, timeout=_TIMEOUT) as response:
                if response.status != 200:
                    return
                text = (await read_capped(response.content, _MAX_BYTES)).decode()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            _log.debug("no metrics from %s: %s", url, error)
            return
        page = parse_page(text)
        if page is None:
            return
        now = monotonic()
        self._fleet.answers(backend)
        rate = self._rates[backend.endpoint.url].add(page.finished, now)
        backend.load_time = now
        backend.load = Load(
            running=page.running,
            waiting=page.waiting,
            kv_usage=page.kv_usage,
            finished_per_second=rate,
            in_flight=in_flight,
        )
