"""Replicas' metrics for ``quire top``: from the replicas, through the API server, or from Prometheus.

A problem with one replica is reported for that replica, and does not affect the others.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import httpx

from quire_cli.inspection.load import NAMES, Reading, reading_of
from quire_cli.inspection.rights import readable
from quire_common.contract import engine
from quire_common.metrics_page import MAX_PAGE_BYTES, points
from quire_common.quantities import format_duration
from quire_operator.adapters.metrics.prometheus import Prometheus
from quire_operator.adapters.wall_clock import WallClock
from quire_operator.domain.autoscaling.prometheus_series import PrometheusOptions, Told
from quire_operator.domain.autoscaling.supply import SAMPLE_SECONDS
from quire_operator.domain.cluster_state.observed import Key
from quire_operator.ports import ClusterError

if TYPE_CHECKING:  # slow to import
    from quire_cli.inspection.cluster_reading import KubeReader

_SECONDS = 4.0
_AT_ONCE = 64
_KEPT_OUT = "; if a NetworkPolicy blocks the API server, use --prometheus-url"
_NO_ENGINE = "its answer is not the metrics page of an engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsTarget:
    """A replica and the address of its metrics."""

    id: str
    url: str | None
    pod: Key | None = None


class Pages(Protocol):
    """A way to read replicas' metrics."""

    how: str
    """The way of reading, as text."""

    async def read(self, replicas: Sequence[MetricsTarget]) -> Mapping[str, Reading | str]:
        """Return for each id the reading, or the reason why it is missing."""
        ...

    async def earlier(self) -> Mapping[str, Reading]:
        """Return earlier readings to compare a first poll with."""
        ...

    async def close(self) -> None: ...


class _SinglePages(ABC):
    """A way to read the page of each replica by itself; it knows no earlier readings."""

    async def read(self, replicas: Sequence[MetricsTarget]) -> Mapping[str, Reading | str]:
        answers = await asyncio.gather(*map(self._read, replicas))
        return {replica.id: answer for replica, answer in zip(replicas, answers, strict=True)}

    async def earlier(self) -> Mapping[str, Reading]:
        return {}

    @abstractmethod
    async def _read(self, replica: MetricsTarget) -> Reading | str:
        """Return the reading of a replica, or the reason why it is missing."""


class DirectPages(_SinglePages):
    """The pages of replicas, each read at its own address."""

    how = "scraped directly"

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=_AT_ONCE, max_keepalive_connections=_AT_ONCE)
        self._client = httpx.AsyncClient(timeout=_SECONDS, trust_env=False, limits=limits)

    async def close(self) -> None:
        await self._client.aclose()

    async def _read(self, replica: MetricsTarget) -> Reading | str:
        if replica.url is None:
            return "it has no address yet"
        try:
            async with asyncio.timeout(_SECONDS):
                response = await self._client.get(replica.url)
        except TimeoutError:
            return f"no answer within {_SECONDS:g} s"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"no answer: {error or type(error).__name__}"
        if response.status_code != 200:
            return f"it answered {response.status_code}"
        return _reading(response.text)


class ProxiedPages(_SinglePages):
    """The pages of pods, read through the API server, which needs permission to get pods/proxy."""

    how = "scraped through the API server (pods/proxy)"

    def __init__(self, reader: "KubeReader") -> None:
        self._reader, self._gate = reader, asyncio.Semaphore(_AT_ONCE)

    async def close(self) -> None:
        """Leave the reader open: its owner closes it."""

    async def _read(self, replica: MetricsTarget) -> Reading | str:
        assert replica.pod is not None, "a cluster's replicas are pods"
        try:
            async with self._gate:
                page = await self._reader.page(replica.pod, engine.HTTP_PORT, engine.METRICS_PATH)
        except ClusterError as error:
            timed_out = "did not answer" in str(error) or "timeout" in str(error)
            return readable(str(error)) + (_KEPT_OUT if timed_out else "")
        return _reading(page.decode(errors="replace"))


class PrometheusPages:
    """The pages of all replicas as Prometheus last scraped them."""

    def __init__(self, url: str) -> None:
        self._prometheus = Prometheus(PrometheusOptions(url=url), clock=WallClock())
        self.how = f"by Prometheus at {url}"

    async def read(self, replicas: Sequence[MetricsTarget]) -> Mapping[str, Reading | str]:
        told = await self._prometheus.told(NAMES)
        if told is None:
            silence = f"no answer from Prometheus: {self._prometheus.problem}"
            return {replica.id: silence for replica in replicas}
        now = time.time()
        return {replica.id: _told(_of(replica, told), now) for replica in replicas}

    async def earlier(self) -> Mapping[str, Reading]:
        """Return the readings of a minute ago, by ``namespace/pod`` or ``host:port``: one scrape has no rate."""
        told = await self._prometheus.told(NAMES, offset="1m") or {}
        now = time.time()
        read = {replica: reading_of(each.points, time=now - each.age) for replica, each in told.items()}
        return {replica: reading for replica, reading in read.items() if reading is not None}

    async def close(self) -> None:
        await self._prometheus.aclose()


def target_of(url: str | None) -> str:
    """Return the host and port, by which Prometheus names a target."""
    return "" if url is None else url.partition("://")[2].partition("/")[0]


def _of(replica: MetricsTarget, told: Mapping[str, Told]) -> Told | None:
    return told.get(replica.id) or told.get(target_of(replica.url))


def _told(told: Told | None, now: float) -> Reading | str:
    if told is None:
        return "Prometheus has no figures for it"
    if told.age > SAMPLE_SECONDS:
        return f"Prometheus last scraped it {format_duration(float(round(told.age)))} ago"
    return reading_of(told.points, time=now - told.age) or "Prometheus has no figures for it"


def _reading(page: str) -> Reading | str:
    found = points(page, NAMES) if len(page) <= MAX_PAGE_BYTES else []
    return reading_of(found, time=time.time()) or _NO_ENGINE
