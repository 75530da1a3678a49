"""Metrics straight from the replicas: ``metricsSource: Pods``, and local mode.

The half of ``ports.Metrics`` that reads replicas, over HTTP. Every replica is asked at once, within one deadline; one
that does not answer, or answers with something else than metrics, is simply absent: what that means is the autoscaler's
to say.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import httpx
from prometheus_client.parser import text_string_to_metric_families

from quire_operator.domain.engine_metrics import NAMES, Point, sample_of
from quire_operator.domain.observation import ReplicaPhase, ReplicaSample
from quire_operator.ports import Clock, ReplicaAddress

_TIMEOUT_SECONDS = 3.0
_AT_ONCE = 100
_MAX_BYTES = 4 * 2**20

_log = logging.getLogger(__name__)


class Scraper:
    """``failed`` is told why each replica that was asked gave none."""

    def __init__(
        self,
        *,
        clock: Clock,
        client: httpx.AsyncClient | None = None,
        failed: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._clock, self._failed = clock, failed
        # Neither proxies nor credentials of the environment: replicas are neighbours.
        self._client = client or httpx.AsyncClient(
            timeout=_TIMEOUT_SECONDS,
            trust_env=False,
            limits=httpx.Limits(max_connections=_AT_ONCE, max_keepalive_connections=_AT_ONCE),
        )
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._silent: set[str] = set()

    async def aclose(self) -> None:
        await self._client.aclose()

    async def samples(self, replicas: Sequence[ReplicaAddress]) -> Mapping[str, ReplicaSample]:
        """See ``ports.Metrics``. Draining replicas are asked too: their work teaches the rates."""
        asked = [r for r in replicas if r.metrics_url and r.phase in (ReplicaPhase.READY, ReplicaPhase.DRAINING)]
        self._silent &= {str(replica.metrics_url) for replica in asked}
        samples = await asyncio.gather(*(self._sample(replica) for replica in asked))
        return {replica.name: sample for replica, sample in zip(asked, samples, strict=True) if sample is not None}

    async def _sample(self, replica: ReplicaAddress) -> ReplicaSample | None:
        if replica.metrics_url is None:
            return None
        page = await self._page(replica.metrics_url)
        if page is None:
            return None
        sample = sample_of(points(page, NAMES), time=self._clock.now())
        if sample is None:
            self._failed("bad_answer")
        return sample

    async def _page(self, url: str) -> str | None:
        """What stands at ``url``, or None; whether it answers is logged when that changes."""
        try:
            async with self._gate, asyncio.timeout(_TIMEOUT_SECONDS):
                text = await self._read(url)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, UnicodeDecodeError) as error:
            self._failed(_reason(error))
            if url not in self._silent:
                self._silent.add(url)
                _log.warning("no metrics from %s: %s", url, error or type(error).__name__)
            return None
        if url in self._silent:
            self._silent.discard(url)
            _log.info("metrics from %s again", url)
        return text

    async def _read(self, url: str) -> str:
        async with self._client.stream("GET", url) as response:
            response.raise_for_status()
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > _MAX_BYTES:
                    raise httpx.DecodingError(f"over {_MAX_BYTES} bytes of metrics")
            return body.decode()


def _reason(error: Exception) -> str:
    """In a word, for a metric."""
    match error:
        case TimeoutError() | httpx.TimeoutException():
            return "timeout"
        case httpx.HTTPStatusError():
            return "http"
        case httpx.TransportError() | httpx.InvalidURL():
            return "unreachable"
        case _:
            return "bad_answer"


def points(page: str, names: Iterable[str]) -> list[Point]:
    """The series called ``names`` in a page of metrics. The parser sees only their lines: it is slow and pages long."""
    wanted = frozenset(names)
    lines = [line for line in page.splitlines() if line.partition("{")[0].partition(" ")[0] in wanted]
    if not lines:
        return []
    try:
        return [
            Point(name=sample.name, labels=sample.labels, value=float(sample.value))
            for family in text_string_to_metric_families("\n".join(lines) + "\n")
            for sample in family.samples
        ]
    except (ValueError, IndexError, KeyError):
        return []
