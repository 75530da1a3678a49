"""Greedy requests that are repeated on both tracks of a canary, so that the operator can judge it by its answers.

Under ``proxy``, which offers each request with a canary. After the client has its answer, a sampled request is sent to
one stable and one canary replica in the background, and ``answers`` compares the two. Nothing is stored: the bodies of
a few requests per model are in memory until both answers are there, and only counts remain. A model without a gate
that compares answers has none of this.
"""

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from time import monotonic

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from quire_common.contract.gateway import CANARY, STABLE
from quire_common.routing import Hold
from quire_gateway import headers
from quire_gateway.canary import Result, compare, greedy_body, read_answer
from quire_gateway.fleet import Backend, Pool
from quire_gateway.metrics import Metrics
from quire_gateway.scrape import read_capped

_MAX_BODY_BYTES = 256 * 1024
"""Longer requests are not repeated: their prompts would cost the replicas too much."""
_MAX_ANSWER_BYTES = 2**20
_MOST_KEPT = 4
"""The most requests of a model that are kept until their clients have the answers."""
_TIMEOUT = aiohttp.ClientTimeout(total=120.0)
_OK, _CLIENT_ERROR, _SERVER_ERROR = 200, 400, 500
_BUSY = 429

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A request that is repeated once its client has the answer."""

    pool: Pool
    body: bytes
    url: str
    headers: CIMultiDict[str]
    prompt_tokens: float
    results: Counter[Result]


class Comparisons:
    """The comparisons of all models: at most one at a time for each."""

    def __init__(self, session: aiohttp.ClientSession, metrics: Metrics) -> None:
        self._session, self._metrics = session, metrics
        self._running: dict[str, asyncio.Task[None]] = {}
        self._kept: Counter[str] = Counter()

    def sample(
        self, pool: Pool, request: web.Request, body: bytes | bytearray, *, prompt_tokens: float, request_id: str
    ) -> Sample | None:
        """Return the request to repeat if it is part of the sample; None for most. ``release`` must follow."""
        tracks = pool.tracks
        if tracks is None or not tracks.route.compared_percent or len(body) > _MAX_BODY_BYTES:
            return None
        # The body is decoded only if a comparison could start now.
        is_full = pool.model in self._running or self._kept[pool.model] >= _MOST_KEPT
        if is_full or not tracks.route.weight_percent:
            return None
        repeated = greedy_body(body, path=request.path)
        if repeated is None or not tracks.is_compared():
            return None
        self._kept[pool.model] += 1
        return Sample(
            pool=pool,
            body=repeated,
            url=request.path,
            headers=headers.to_replica(request, audience=pool.audience, request_id=f"{request_id}-compared"[-128:]),
            prompt_tokens=prompt_tokens,
            results=tracks.answers,
        )

    def release(self, sample: Sample | None) -> None:
        """End the wait of a sampled request for the answer of its client."""
        if sample is not None:
            self._kept[sample.pool.model] -= 1

    def start(self, sample: Sample) -> None:
        """Compare the answers of both tracks in the background, if both have room."""
        model = sample.pool.model
        if model in self._running:
            return
        task = self._running[model] = asyncio.create_task(self._compare(sample), name=f"compare answers of {model}")
        task.add_done_callback(lambda _: self._running.pop(model, None))

    async def aclose(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _compare(self, sample: Sample) -> None:
        backends = self._replica(sample, STABLE), self._replica(sample, CANARY)
        if backends[0] is None or backends[1] is None:
            return
        stable, canary = await asyncio.gather(self._answer(sample, backends[0]), self._answer(sample, backends[1]))
        result = _result(stable, canary)
        if result is None:
            return
        sample.results[result] += 1
        self._metrics.compared_answers.labels(sample.pool.model, result.value).inc()
        if result is Result.DIFFERENT:
            # The texts are the client's: the log names only the replicas.
            names = [each.endpoint.id for each in backends if each is not None]
            _log.info(
                "answers differ: request %s: replicas %s", sample.headers[headers.REQUEST_ID], " and ".join(names)
            )

    def _replica(self, sample: Sample, track: str) -> Backend | None:
        """Return a replica of a track that has room; None without one: clients come first."""
        choice = sample.pool.pick(prompt_tokens=sample.prompt_tokens, track=track)
        if isinstance(choice, Hold) or choice.endpoint.track != track or not choice.room(monotonic()):
            return None
        return choice

    async def _answer(self, sample: Sample, backend: Backend) -> tuple[int, bytes] | None:
        """Return the status and the body of an answer; None if the replica did not give one."""
        with backend.request(sample.prompt_tokens):
            try:
                async with self._session.post(
                    URL(f"{backend.endpoint.url}{sample.url}", encoded=True),
                    data=sample.body,
                    headers=sample.headers,
                    allow_redirects=False,
                    timeout=_TIMEOUT,
                ) as response:
                    return response.status, await read_capped(response.content, _MAX_ANSWER_BYTES)
            except (aiohttp.ClientError, TimeoutError, ValueError):
                return None


def _result(stable: tuple[int, bytes] | None, canary: tuple[int, bytes] | None) -> Result | None:
    """Return the result; None for a request that the stable revision refuses, which says nothing about the canary."""
    if stable is None or canary is None:
        return Result.FAILED
    if stable[0] != _OK:
        return Result.FAILED if stable[0] >= _SERVER_ERROR else None
    if canary[0] != _OK:
        # A request that only the canary refuses as invalid is a different answer.
        refused = _CLIENT_ERROR <= canary[0] < _SERVER_ERROR and canary[0] != _BUSY
        return Result.DIFFERENT if refused else Result.FAILED
    one, other = read_answer(stable[1]), read_answer(canary[1])
    return Result.FAILED if one is None or other is None else compare(one, other)
