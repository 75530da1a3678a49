"""Metrics directly from the replicas: ``metricsSource: Pods``, and local mode.

It implements the replica half of ``ports.Metrics`` over HTTP. One deadline applies to a round of all replicas, and
those that answered in the last round come first. A replica that does not answer, or answers with something other than
metrics, is absent from the result; the autoscaler decides what that means.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from quire_common.metrics_page import MAX_PAGE_BYTES, points
from quire_operator.adapters.metrics.pages import NoPage, Pages
from quire_operator.domain.autoscaling.engine_metrics import LABELLED, NAMES, sample_of
from quire_operator.domain.autoscaling.observation import ReplicaPhase, ReplicaSample
from quire_operator.ports import Clock, ReplicaAddress

Read = Callable[[str], Awaitable[bytes]]

_TIMEOUT_SECONDS = 3.0
_ROUND_SECONDS = 8.0
"""The time limit of one round, whatever the number of replicas that do not answer."""
_AT_ONCE = 100

_log = logging.getLogger(__name__)


class Scraper:
    """A scraper. ``failed`` is called with the reason for each replica without a sample."""

    def __init__(
        self,
        *,
        clock: Clock,
        read: Read | None = None,
        failed: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Read over HTTP if ``read`` is None."""
        self._clock, self._failed = clock, failed
        self._pages = Pages(timeout_seconds=_TIMEOUT_SECONDS, max_bytes=MAX_PAGE_BYTES, at_once=_AT_ONCE)
        self._read = read or self._pages.read
        self._silent: set[str] = set()

    async def aclose(self) -> None:
        await self._pages.aclose()

    async def samples(self, replicas: Sequence[ReplicaAddress]) -> Mapping[str, ReplicaSample]:
        """See ``ports.Metrics``. Draining replicas are scraped too, because their work informs the rate estimates."""
        urls = {
            replica.name: replica.metrics_url
            for replica in replicas
            if replica.metrics_url and replica.phase in (ReplicaPhase.READY, ReplicaPhase.DRAINING)
        }
        self._silent &= set(urls.values())
        deadline = asyncio.get_running_loop().time() + _ROUND_SECONDS
        asked = iter(sorted(urls.items(), key=lambda item: item[1] in self._silent))
        answers: dict[str, ReplicaSample | None] = {}

        async def ask() -> None:
            # A few workers share the replicas: a task for each of thousands would take longer than the reading.
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    for name, url in asked:
                        answers[name] = await self._sample(url)

        await asyncio.gather(*(ask() for _ in range(min(_AT_ONCE, len(urls)))))
        for name in urls.keys() - answers.keys():
            self._note_silence(urls[name], f"no turn within {_ROUND_SECONDS:g} s: too many are silent", "timeout")
        return {name: sample for name, sample in answers.items() if sample is not None}

    async def _sample(self, url: str) -> ReplicaSample | None:
        """Return a sample, or count the failure and return None. Changes of availability are logged."""
        try:
            page = await self._read(url)
            sample = sample_of(points(page.decode(), NAMES, LABELLED), time=self._clock.now())
            if sample is None:
                raise NoPage("its answer lacks the metrics of an engine", reason="bad_answer")
        except UnicodeDecodeError as error:
            self._note_silence(url, str(error), "bad_answer")
            return None
        except NoPage as error:
            self._note_silence(url, str(error), error.reason)
            return None
        if url in self._silent:
            self._silent.discard(url)
            _log.info("metrics available again: %s", url)
        return sample

    def _note_silence(self, url: str, why: str, reason: str) -> None:
        self._failed(reason)
        if url not in self._silent:
            self._silent.add(url)
            _log.warning("scrape failed: %s: %s", url, why)
