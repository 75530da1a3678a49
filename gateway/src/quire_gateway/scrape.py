"""Scrapes the load of every replica once a second: queue, running requests, KV cache usage, pending prompt tokens.

It feeds ``fleet``, whose figures the routing policy compares. A replica that does not answer is not dead: its load is
unknown, and only the gateway's own requests count. Users choose the image that answers, so an answer has a small bound
and is read at a cost that delays no request, and no replica is waited for longer than the period.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

import aiohttp
import msgspec

from quire_common.contract import engine
from quire_common.contract.adapters_file import ADAPTERS_PATH, AdapterState
from quire_common.contract.gateway import SCRAPE_SECONDS
from quire_common.metrics_page import MAX_PAGE_BYTES, points
from quire_common.routing import Load, PrefillRate, Rate
from quire_gateway.fleet import Backend, Fleet

NAMES = frozenset(
    {
        engine.RUNNING,
        engine.WAITING,
        engine.KV_USAGE,
        engine.FINISHED,
        engine.CACHE_CONFIG,
        engine.GENERATION_TOKENS,
        engine.MAX_RUNNING,
        engine.MAX_MODEL_LEN,
        engine.PENDING_TOKENS,
        engine.SCHEDULED_TOKENS,
        engine.STEP_SECONDS,
        engine.ARRIVED_REQUESTS,
        engine.ARRIVED_PROMPT_TOKENS,
    }
)
"""The engine's metrics that the gateway reads."""

_ADAPTERS_EVERY = 2
"""Reports of adapters are read at each second scrape, because they are long."""
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_MAX_REPORT_BYTES = 2**19
"""About 2,000 adapters."""

_log = logging.getLogger(__name__)


Page = Mapping[str, float]
"""The figures of one scrape, by the name of the metric; of ``CACHE_CONFIG``, the tokens of the KV cache."""


def parse_page(text: str) -> Page | None:
    """Return the figures, summed over labels; None if a gauge that every engine has is missing."""
    sums: dict[str, float] = {}
    try:
        for point in points(text, NAMES, (engine.CACHE_CONFIG,)):
            value = _kv_tokens(point.labels) if point.name == engine.CACHE_CONFIG else point.value
            sums[point.name] = sums.get(point.name, 0.0) + value
    except (ValueError, OverflowError):
        return None
    if not {engine.RUNNING, engine.WAITING, engine.KV_USAGE} <= sums.keys() or not all(
        0 <= value < math.inf for value in sums.values()
    ):
        return None
    return sums


def computed_tokens(page: Page) -> float:
    """Return the prompt tokens that were computed: scheduled tokens that generated none, but for the first of each."""
    return page.get(engine.SCHEDULED_TOKENS, 0.0) - page.get(engine.GENERATION_TOKENS, 0.0)


def _kv_tokens(labels: Mapping[str, str]) -> float:
    """Return the tokens of a KV cache; raise ValueError if a number is too long."""
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return float(int(blocks) * int(size)) if blocks.isdecimal() and size.isdecimal() else 0.0


async def read_capped(content: aiohttp.StreamReader, limit: int) -> bytes:
    """Return the whole content, or raise ValueError if it exceeds ``limit`` bytes."""
    body = bytearray()
    async for chunk in content.iter_any():
        body += chunk
        if len(body) > limit:
            raise ValueError(f"more than {limit} bytes")
    return bytes(body)


class _Adapter(msgspec.Struct):
    """The part of an adapter's report that the gateway reads."""

    name: str
    state: AdapterState


class _Report(msgspec.Struct):
    adapters: Sequence[_Adapter]


@dataclass(slots=True)
class _History:
    """The figures of one replica over its scrapes."""

    finishes: Rate = field(default_factory=Rate)
    prefills: PrefillRate = field(default_factory=PrefillRate)
    arrived: Sequence[float] | None = None
    """The prompt tokens and the requests that had arrived at the last one."""


class Scraper:
    """A loop that scrapes all replicas, on the session of the proxy."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self._fleet = fleet
        self._session = session
        self._histories: dict[str, _History] = {}
        self._asked: dict[str, asyncio.Task[None]] = {}
        """The scrapes that are not answered yet, by the replica's address."""
        self._due = asyncio.Event()
        self._turn = 0

    async def run(self) -> None:
        try:
            while True:
                started = monotonic()
                await self.scrape_all()
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, SCRAPE_SECONDS - (monotonic() - started))):
                        await self._due.wait()
                self._due.clear()
        finally:
            for task in self._asked.values():
                task.cancel()

    def scrape_now(self) -> None:
        """Scrape without waiting for the next turn, because there are new replicas."""
        self._due.set()

    async def scrape_all(self) -> None:
        """Scrape every replica that owes no answer, all at the same time.

        Wait for their answers, but not longer than the period: one that hangs must not let the others' figures age.
        """
        backends = self._fleet.backends()
        self._histories = {b.endpoint.url: self._histories.get(b.endpoint.url) or _History() for b in backends}
        for backend in backends:
            if (url := backend.endpoint.url) not in self._asked:
                has_report = self._turn % _ADAPTERS_EVERY == 0 and self._fleet.serves_adapters(backend)
                self._asked[url] = asyncio.create_task(self._scrape_one(backend, has_report=has_report))
        self._turn += 1
        if self._asked:
            await asyncio.wait(self._asked.values(), timeout=SCRAPE_SECONDS)
        for url, task in list(self._asked.items()):
            if task.done():
                del self._asked[url]
                task.result()

    async def _scrape_one(self, backend: Backend, *, has_report: bool) -> None:
        await self._scrape(backend)
        if has_report:
            await self._scrape_adapters(backend)

    async def _scrape_adapters(self, backend: Backend) -> None:
        """Read which adapters a replica has; without an answer, what is known of it stays."""
        url = f"{backend.endpoint.url}{ADAPTERS_PATH}"
        try:
            async with self._session.get(url, timeout=_TIMEOUT) as response:
                body = await read_capped(response.content, _MAX_REPORT_BYTES) if response.status == 200 else b"{}"
            report = msgspec.json.decode(body, type=_Report)
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
            _log.debug("reading the adapters failed: %s: %s", url, error)
            return
        backend.adapters = {adapter.name: adapter.state for adapter in report.adapters}

    async def _scrape(self, backend: Backend) -> None:
        url = f"{backend.endpoint.url}{engine.METRICS_PATH}"
        in_flight, sent_tokens = backend.in_flight, backend.sent_tokens
        if backend.asked_since is None:
            backend.asked_since = monotonic()
        try:
            async with self._session.get(url, timeout=_TIMEOUT) as response:
                backend.asked_since = None
                if response.status != 200:
                    return
                text = (await read_capped(response.content, MAX_PAGE_BYTES)).decode()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            _log.debug("scrape failed: %s: %s", url, error)
            return
        page = parse_page(text)
        if page is None:
            return
        now, history = monotonic(), self._histories.get(backend.endpoint.url)
        if history is None:
            return  # the replica has gone since it was asked
        prefill_rate = history.prefills.update(computed_tokens(page), page.get(engine.STEP_SECONDS, 0.0))
        backend.load = Load(
            running=page[engine.RUNNING],
            waiting=page[engine.WAITING],
            kv_usage=page[engine.KV_USAGE],
            finished_per_second=history.finishes.update(page.get(engine.FINISHED, 0.0), now),
            in_flight=in_flight,
            max_running=page.get(engine.MAX_RUNNING),
            pending_tokens=page.get(engine.PENDING_TOKENS),
            prefill_tokens_per_second=prefill_rate,
        )
        backend.load_time, backend.load_sent_tokens = now, sent_tokens
        backend.kv_tokens = page.get(engine.CACHE_CONFIG) or math.inf
        backend.max_model_len = int(page[engine.MAX_MODEL_LEN]) if engine.MAX_MODEL_LEN in page else None
        self._fleet.record_reachable(backend)
        arrived = [page.get(name, 0.0) for name in (engine.ARRIVED_PROMPT_TOKENS, engine.ARRIVED_REQUESTS)]
        if history.arrived is not None:
            tokens, requests = (after - before for before, after in zip(history.arrived, arrived, strict=True))
            self._fleet.record_arrivals(backend, tokens=tokens, requests=requests)
        history.arrived = arrived
