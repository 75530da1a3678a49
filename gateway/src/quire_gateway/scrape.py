"""Asks every replica for its queue, its running requests, its KV use and the prompt tokens it has to compute, about
once a second.

Feeds ``fleet``, by which ``balance`` picks. A replica that does not answer is not dead: it is only unknown, and counts
by our own requests alone.
"""

import asyncio
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from quire_gateway.balance import Load
from quire_gateway.fleet import Backend, Fleet
from quire_gateway.learning import PrefillRate, Rate

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
FINISHED = "vllm:request_success_total"
CACHE_CONFIG = "vllm:cache_config_info"
GENERATION_TOKENS = "vllm:generation_tokens_total"
MAX_RUNNING = "quire_max_running_requests"
PENDING_TOKENS = "quire_pending_prefill_tokens"
SCHEDULED_TOKENS = "quire_scheduled_tokens_total"
STEP_SECONDS = "quire_step_seconds_total"
ARRIVED_REQUESTS = "quire_arrived_requests_total"
ARRIVED_TOKENS = "quire_arrived_prompt_tokens_total"
NAMES = frozenset(
    {
        RUNNING,
        WAITING,
        KV_USAGE,
        FINISHED,
        CACHE_CONFIG,
        GENERATION_TOKENS,
        MAX_RUNNING,
        PENDING_TOKENS,
        SCHEDULED_TOKENS,
        STEP_SECONDS,
        ARRIVED_REQUESTS,
        ARRIVED_TOKENS,
    }
)

PERIOD_SECONDS = 1.0
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_MAX_BYTES = 2**20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What the balancer wants of one scrape."""

    running: float
    waiting: float
    kv_usage: float
    finished: float
    kv_tokens: float
    """Infinite where it is not told."""
    max_running: float | None
    pending_tokens: float | None
    computed_tokens: float
    """Of prompts."""
    step_seconds: float
    arrived_requests: float
    arrived_tokens: float


def parse_page(text: str) -> Page | None:
    """The figures, summed over engines, reasons and parts; None if one of the gauges that every engine has is
    missing."""
    lines = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] in NAMES]
    sums: dict[str, float] = {}
    kv_tokens = 0.0
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + float(sample.value)
                if sample.name == CACHE_CONFIG:
                    kv_tokens += _kv_tokens(sample.labels)
    except (ValueError, IndexError, KeyError, OverflowError):
        return None
    if not {RUNNING, WAITING, KV_USAGE} <= sums.keys() or not all(0 <= value < math.inf for value in sums.values()):
        return None
    return Page(
        running=sums[RUNNING],
        waiting=sums[WAITING],
        kv_usage=sums[KV_USAGE],
        finished=sums.get(FINISHED, 0.0),
        kv_tokens=kv_tokens or math.inf,
        max_running=sums.get(MAX_RUNNING),
        pending_tokens=sums.get(PENDING_TOKENS),
        # What was scheduled and drew nothing was a prompt's, but for the first token of each.
        computed_tokens=sums.get(SCHEDULED_TOKENS, 0.0) - sums.get(GENERATION_TOKENS, 0.0),
        step_seconds=sums.get(STEP_SECONDS, 0.0),
        arrived_requests=sums.get(ARRIVED_REQUESTS, 0.0),
        arrived_tokens=sums.get(ARRIVED_TOKENS, 0.0),
    )


def _kv_tokens(labels: Mapping[str, str]) -> float:
    """Raises ValueError."""
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return float(int(blocks) * int(size)) if blocks.isdecimal() and size.isdecimal() else 0.0


async def read_capped(content: aiohttp.StreamReader, limit: int) -> bytes:
    """All of it, or ValueError where that is more than ``limit`` bytes."""
    body = bytearray()
    async for chunk in content.iter_any():
        body += chunk
        if len(body) > limit:
            raise ValueError(f"over {limit} bytes")
    return bytes(body)


@dataclass(slots=True)
class _Learnt:
    """Of one replica, over its scrapes."""

    finishes: Rate = field(default_factory=Rate)
    prefills: PrefillRate = field(default_factory=PrefillRate)
    page: Page | None = None


class Scraper:
    """Runs beside the proxy, on its session."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self._fleet = fleet
        self._session = session
        self._learnt: dict[str, _Learnt] = {}
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
        self._learnt = {b.endpoint.url: self._learnt.get(b.endpoint.url) or _Learnt() for b in backends}
        await asyncio.gather(*(self._scrape(backend) for backend in backends))

    async def _scrape(self, backend: Backend) -> None:
        url = f"{backend.endpoint.url}/metrics"
        in_flight, sent_tokens = backend.in_flight, backend.sent_tokens
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
        self._fleet.answers(backend)
        now, learnt = monotonic(), self._learnt[backend.endpoint.url]
        load = Load(
            running=page.running,
            waiting=page.waiting,
            kv_usage=page.kv_usage,
            finished_per_second=learnt.finishes.add(page.finished, now),
            in_flight=in_flight,
            max_running=page.max_running,
            pending_tokens=page.pending_tokens,
            prefill_tokens_per_second=learnt.prefills.add(page.computed_tokens, page.step_seconds),
        )
        backend.scraped(load, now, sent_tokens=sent_tokens, kv_tokens=page.kv_tokens)
        if learnt.page is not None:
            self._fleet.learn(
                backend,
                tokens=page.arrived_tokens - learnt.page.arrived_tokens,
                requests=page.arrived_requests - learnt.page.arrived_requests,
            )
        learnt.page = page
