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


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The figures of one scrape that the routing policy needs."""

    running: float
    waiting: float
    kv_usage: float
    finished: float
    kv_tokens: float
    """Infinite where it is not reported."""
    max_running: float | None
    max_model_len: int | None
    pending_tokens: float | None
    computed_tokens: float
    """Prompt tokens that were computed."""
    step_seconds: float
    arrived_requests: float
    arrived_tokens: float


def parse_page(text: str) -> Page | None:
    """Return the figures, summed over labels; None if a gauge that every engine has is missing."""
    sums: dict[str, float] = {}
    kv_tokens = 0.0
    try:
        for point in points(text, NAMES, (engine.CACHE_CONFIG,)):
            sums[point.name] = sums.get(point.name, 0.0) + point.value
            if point.name == engine.CACHE_CONFIG:
                kv_tokens += _kv_tokens(point.labels)
    except (ValueError, OverflowError):
        return None
    if not {engine.RUNNING, engine.WAITING, engine.KV_USAGE} <= sums.keys() or not all(
        0 <= value < math.inf for value in sums.values()
    ):
        return None
    return Page(
        running=sums[engine.RUNNING],
        waiting=sums[engine.WAITING],
        kv_usage=sums[engine.KV_USAGE],
        finished=sums.get(engine.FINISHED, 0.0),
        kv_tokens=kv_tokens or math.inf,
        max_running=sums.get(engine.MAX_RUNNING),
        max_model_len=int(sums[engine.MAX_MODEL_LEN]) if engine.MAX_MODEL_LEN in sums else None,
        pending_tokens=sums.get(engine.PENDING_TOKENS),
        # Scheduled tokens that generated nothing belong to prompts, except for the first token of each.
        computed_tokens=sums.get(engine.SCHEDULED_TOKENS, 0.0) - sums.get(engine.GENERATION_TOKENS, 0.0),
        step_seconds=sums.get(engine.STEP_SECONDS, 0.0),
        arrived_requests=sums.get(engine.ARRIVED_REQUESTS, 0.0),
        arrived_tokens=sums.get(engine.ARRIVED_PROMPT_TOKENS, 0.0),
    )


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
    page: Page | None = None


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
        """Scrape once a second until cancelled."""
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
        backend.note_asked(monotonic())
        try:
            async with self._session.get(url, timeout=_TIMEOUT) as response:
                backend.note_answered()
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
        load = Load(
            running=page.running,
            waiting=page.waiting,
            kv_usage=page.kv_usage,
            finished_per_second=history.finishes.update(page.finished, now),
            in_flight=in_flight,
            max_running=page.max_running,
            pending_tokens=page.pending_tokens,
            prefill_tokens_per_second=history.prefills.update(page.computed_tokens, page.step_seconds),
        )
        backend.record_scrape(load, now, sent_tokens=sent_tokens, kv_tokens=page.kv_tokens)
        backend.max_model_len = page.max_model_len
        self._fleet.record_reachable(backend)
        if history.page is not None:
            self._fleet.record_arrivals(
                backend,
                tokens=page.arrived_tokens - history.page.arrived_tokens,
                requests=page.arrived_requests - history.page.arrived_requests,
            )
        history.page = page
