"""The progress of model downloads, read from the pods that run them while this process leads.

A pod whose init container downloads serves its progress where the engine will serve metrics later, so that it needs no
permission of its own. Progress that can no longer be read disappears.
"""

import asyncio
import json
from collections.abc import Mapping

from quire_common.contract import engine
from quire_common.names import url_host
from quire_operator.autoscaling.scrape import Pages
from quire_operator.deployment.download import RENEWED_SECONDS, Arrived, Download, appended, is_news, slowest
from quire_operator.deployment.pod_template import FETCH, FETCH_DRAFT
from quire_operator.deployment.store import Cluster
from quire_operator.kube.objects import Key, Pod

_PERIOD_SECONDS = 15.0
_SECONDS_PER_DOWNLOAD = 0.25
"""With many downloads at once the period grows, so that their statuses stay below four writes a second."""
_STALE_SECONDS = 2 * RENEWED_SECONDS
_MAX_ANSWER_BYTES = 1024
_MOST_BYTES = 2**53


class Downloads:
    def __init__(self, cluster: Cluster, reader: Pages) -> None:
        self._store, self._clock, self._enqueue, self._reader = cluster.store, cluster.clock, cluster.enqueue, reader
        self._readings: dict[str, tuple[Arrived, ...]] = {}
        """The readings by the uid of the pod."""
        self._reported: dict[Key, Download] = {}

    def progress(self, key: Key) -> Download | None:
        """Return what the status reports; None if no pod downloads."""
        return self._reported.get(key)

    async def follow(self) -> None:
        try:
            while True:
                await self.poll()
                await asyncio.sleep(max(_PERIOD_SECONDS, _SECONDS_PER_DOWNLOAD * len(self._reported)))
        finally:
            self._readings, self._reported = {}, {}

    async def poll(self) -> None:
        """Read all downloads once, and enqueue the LLMDeployments whose report changes."""
        pods = {
            key: found
            for key in self._store.live_keys()
            if (found := _downloading((*self._store.pods(key), *self._store.workers(key))))
        }
        asked = [pod for found in pods.values() for pod in found]
        answers = await asyncio.gather(*(self._reader.answer(_url(pod)) for pod in asked))
        now = self._clock()
        self._readings = {
            pod.uid: readings
            for pod, answer in zip(asked, answers, strict=True)
            if (readings := self._updated(pod, answer, now))
        }
        for key in pods.keys() | self._reported.keys():
            self._report(key, [r for pod in pods.get(key, ()) if (r := self._readings.get(pod.uid))])

    def _updated(self, pod: Pod, answer: bytes | None, now: float) -> tuple[Arrived, ...]:
        before, arrived = self._readings.get(pod.uid, ()), None if answer is None else _arrived(answer, now)
        if arrived is not None:
            return appended(before, arrived)
        return before if before and now - before[-1].time < _STALE_SECONDS else ()

    def _report(self, key: Key, readings: list[tuple[Arrived, ...]]) -> None:
        new = slowest(readings)
        if not is_news(new, self._reported.get(key)):
            return
        if new is None:
            del self._reported[key]
        else:
            self._reported[key] = new
        self._enqueue(key)


def _downloading(pods: tuple[Pod, ...]) -> list[Pod]:
    return [
        pod
        for pod in pods
        if pod.ip
        and not pod.deleting
        and any(c.init and c.name in (FETCH, FETCH_DRAFT) and c.running for c in pod.containers)
    ]


def _url(pod: Pod) -> str:
    return f"http://{url_host(pod.ip)}:{engine.HTTP_PORT}{engine.PROGRESS_PATH}"


def _arrived(answer: bytes, now: float) -> Arrived | None:
    """Return the reading of a pod; None if the answer is invalid, since users choose the image that gives it."""
    if len(answer) > _MAX_ANSWER_BYTES:
        return None
    try:
        body = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    done, total = (body.get("done"), body.get("total")) if isinstance(body, Mapping) else (None, None)
    if type(done) is not int or type(total) is not int or not 0 <= done <= total <= _MOST_BYTES or not total:
        return None
    return Arrived(now, done, total)
