"""Replicas' metrics for ``quire top``: from themselves, through the API server, or from Prometheus.

Whatever goes wrong with one replica is told of that one, in words; the others' figures come all the same.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import httpx

from quire_operator.adapters.scrape import points
from quire_operator.domain import engine_contract
from quire_operator.domain.load import NAMES, Reading, reading_of
from quire_operator.domain.observed import Key
from quire_operator.domain.rights import in_words
from quire_operator.ports import ClusterError

if TYPE_CHECKING:  # slow to import
    from quire_operator.adapters.kube_reading import KubeReader

_SECONDS = 4.0
_AT_ONCE = 64
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

    async def close(self) -> None:
        """The reader is not ours."""

    async def _read(self, replica: Asked) -> Reading | str:
        assert replica.pod is not None, "a cluster's replicas are pods"
        try:
            async with self._gate:
                page = await self._reader.page(replica.pod, engine_contract.HTTP_PORT, engine_contract.METRICS_PATH)
        except ClusterError as error:
            return in_words(str(error))
        return _reading(page.decode(errors="replace"))


def _reading(page: str) -> Reading | str:
    return reading_of(points(page, NAMES), time=time.time()) or _NO_ENGINE
