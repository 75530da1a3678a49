"""Replicas' metrics for ``quire top``: from themselves, through the API server, or from Prometheus.

Whatever goes wrong with one replica is told of that one, in words; the others' figures come all the same.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import httpx

from quire_cli.inspection.load import NAMES, Reading, reading_of
from quire_cli.inspection.rights import in_words
from quire_common.contract import engine
from quire_common.quantities import format_duration
from quire_operator.adapters.metrics.prometheus import Prometheus
from quire_operator.adapters.metrics.scrape import points
from quire_operator.adapters.wall_clock import WallClock
from quire_operator.domain.autoscaling.prometheus_series import PrometheusOptions, Told
from quire_operator.domain.autoscaling.supply import SAMPLE_SECONDS
from quire_operator.domain.cluster_state.observed import Key
from quire_operator.ports import ClusterError

if TYPE_CHECKING:  # slow to import
    from quire_cli.inspection.cluster_reading import KubeReader

_SECONDS = 4.0
_AT_ONCE = 64
_KEPT_OUT = "; if a NetworkPolicy keeps the API server out, --prometheus-url is another way"
_NO_ENGINE = "it answers with something else than an engine's metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A replica, and where its metrics are."""

    id: str
    url: str | None
    pod: Key | None = None


class Pages(Protocol):
    how: str
    """The way, in words."""

    async def read(self, replicas: Sequence[Asked]) -> Mapping[str, Reading | str]:
        """By id: what each said, or why it said nothing."""
        ...

    async def earlier(self) -> Mapping[str, Reading]:
        """What there is to compare a first look with."""
        ...

    async def close(self) -> None: ...


class DirectPages:
    """Each replica at its own address."""

    how = "asked directly"

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=_AT_ONCE, max_keepalive_connections=_AT_ONCE)
        self._client = httpx.AsyncClient(timeout=_SECONDS, trust_env=False, limits=limits)

    async def read(self, replicas: Sequence[Asked]) -> Mapping[str, Reading | str]:
        answers = await asyncio.gather(*map(self._read, replicas))
        return {replica.id: answer for replica, answer in zip(replicas, answers, strict=True)}

    async def earlier(self) -> Mapping[str, Reading]:
        return {}

    async def close(self) -> None:
        await self._client.aclose()

    async def _read(self, replica: Asked) -> Reading | str:
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
            return f"it answers {response.status_code}"
        return _reading(response.text)


class ProxiedPages:
    """Each pod through the API server: needs the right to get pods/proxy, and no way to the pods."""

    how = "asked through the API server (pods/proxy)"

    def __init__(self, reader: "KubeReader") -> None:
        self._reader, self._gate = reader, asyncio.Semaphore(_AT_ONCE)

    async def read(self, replicas: Sequence[Asked]) -> Mapping[str, Reading | str]:
        answers = await asyncio.gather(*map(self._read, replicas))
        return {replica.id: answer for replica, answer in zip(replicas, answers, strict=True)}

    async def earlier(self) -> Mapping[str, Reading]:
        return {}

    async def close(self) -> None:
        """The reader is not ours."""

    async def _read(self, replica: Asked) -> Reading | str:
        assert replica.pod is not None, "a cluster's replicas are pods"
        try:
            async with self._gate:
                page = await self._reader.page(replica.pod, engine.HTTP_PORT, engine.METRICS_PATH)
        except ClusterError as error:
            timed_out = "did not answer" in str(error) or "timeout" in str(error)
            return in_words(str(error)) + (_KEPT_OUT if timed_out else "")
        return _reading(page.decode(errors="replace"))


class PrometheusPages:
    """All replicas from Prometheus, as it scraped them last."""

    def __init__(self, url: str) -> None:
        self._prometheus = Prometheus(PrometheusOptions(url=url), clock=WallClock())
        self.how = f"by Prometheus at {url}"

    async def read(self, replicas: Sequence[Asked]) -> Mapping[str, Reading | str]:
        told = await self._prometheus.told(NAMES)
        if told is None:
            silence = f"no answer from Prometheus: {self._prometheus.problem}"
            return {replica.id: silence for replica in replicas}
        now = time.time()
        return {replica.id: _told(_of(replica, told), now) for replica in replicas}

    async def earlier(self) -> Mapping[str, Reading]:
        """By ``namespace/pod`` or ``host:port``, of a minute ago: one scrape seen twice shows no rate."""
        told = await self._prometheus.told(NAMES, offset="1m") or {}
        now = time.time()
        read = {replica: reading_of(each.points, time=now - each.age) for replica, each in told.items()}
        return {replica: reading for replica, reading in read.items() if reading is not None}

    async def close(self) -> None:
        await self._prometheus.aclose()


def target_of(url: str | None) -> str:
    """As Prometheus names it: host and port."""
    return "" if url is None else url.partition("://")[2].partition("/")[0]


def _of(replica: Asked, told: Mapping[str, Told]) -> Told | None:
    return told.get(replica.id) or told.get(target_of(replica.url))


def _told(told: Told | None, now: float) -> Reading | str:
    if told is None:
        return "Prometheus has no figures of it"
    if told.age > SAMPLE_SECONDS:
        return f"Prometheus last scraped it {format_duration(float(round(told.age)))} ago"
    return reading_of(told.points, time=now - told.age) or "Prometheus has no figures of it"


def _reading(page: str) -> Reading | str:
    return reading_of(points(page, NAMES), time=time.time()) or _NO_ENGINE
