"""Scrapes the load of every replica once a second: queue, running requests, KV cache usage, pending prompt tokens.

It feeds ``fleet``, whose figures the routing policy compares. A replica that does not answer is not dead: its load is
unknown, and only the gateway's own requests count.
"""

import asyncio
import json
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from quire_common.contract import engine
from quire_common.contract.adapters_file import ADAPTERS_PATH, parse_report
from quire_common.contract.gateway import SCRAPE_SECONDS
from quire_common.routing.balance import Load
from quire_common.routing.speed import PrefillRate, Rate
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
_MAX_BYTES = 2**20

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
    pending_tokens: float | None
    computed_tokens: float
    """Prompt tokens that were computed."""
    step_seconds: float
    arrived_requests: float
    arrived_tokens: float


def parse_page(text: str) -> Page | None:
    """Return the figures, summed over labels; None if a gauge that every engine has is missing."""
    lines = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] in NAMES]
    sums: dict[str, float] = {}
    kv_tokens = 0.0
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + float(sample.value)
                if sample.name == engine.CACHE_CONFIG:
                    kv_tokens += _kv_tokens(sample.labels)
    except (ValueError, IndexError, KeyError, OverflowError):
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
        self._due = asyncio.Event()
        self._turn = 0

    async def run(self) -> None:
        """Scrape once a second until cancelled."""
        while True:
            started = monotonic()
            await self.scrape_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, SCRAPE_SECONDS - (monotonic() - started))):
                    await self._due.wait()
            self._due.clear()

    def scrape_now(self) -> None:
        """Scrape without waiting for the next turn, because there are new replicas."""
        self._due.set()

    async def scrape_all(self) -> None:
        """Scrape every replica once, all at the same time."""
        backends = self._fleet.backends()
        self._histories = {b.endpoint.url: self._histories.get(b.endpoint.url) or _History() for b in backends}
        reports = [b for b in backends if self._fleet.serves_adapters(b)] if self._turn % _ADAPTERS_EVERY == 0 else []
        self._turn += 1
        await asyncio.gather(*map(self._scrape, backends), *map(self._scrape_adapters, reports))

    async def _scrape_adapters(self, backend: Backend) -> None:
        """Read which adapters a replica has; without an answer, what is known of it stays."""
        url = f"{backend.endpoint.url}{ADAPTERS_PATH}"
        try:
            async with self._session.get(url, timeout=_TIMEOUT) as response:
                body = await read_capped(response.content, _MAX_BYTES) if response.status == 200 else b"{}"
            report = parse_report(json.loads(body))
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
            _log.debug("reading the adapters failed: %s: %s", url, error)
            return
        if report is not None:
            backend.adapters = {adapter.name: adapter.state for adapter in report.adapters}

    async def _scrape(self, backend: Backend) -> None:
        url = f"{backend.endpoint.url}{engine.METRICS_PATH}"
        in_flight, sent_tokens = backend.in_flight, backend.sent_tokens
        try:
            async with self._session.get(url, timeout=_TIMEOUT) as response:
                if response.status != 200:
                    return
                text = (await read_capped(response.content, _MAX_BYTES)).decode()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            _log.debug("scrape failed: %s: %s", url, error)
            return
        page = parse_page(text)
        if page is None:
            return
        now, history = monotonic(), self._histories[backend.endpoint.url]
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
        self._fleet.record_reachable(backend)
        if history.page is not None:
            self._fleet.record_arrivals(
                backend,
                tokens=page.arrived_tokens - history.page.arrived_tokens,
                requests=page.arrived_requests - history.page.arrived_requests,
            )
        history.page = page
