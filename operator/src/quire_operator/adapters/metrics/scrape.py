"""Metrics directly from the replicas: ``metricsSource: Pods``, and local mode.

It implements the replica half of ``ports.Metrics`` over HTTP. One deadline applies to a round of all replicas, and
those that answered in the last round come first. A replica that does not answer, or answers with something other than
metrics, is absent from the result; the autoscaler decides what that means.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from types import MappingProxyType

from quire_operator.adapters.metrics.pages import NoPage, Pages
from quire_operator.domain.autoscaling.engine_metrics import LABELLED, NAMES, Point, sample_of
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
        self._pages = Pages(timeout_seconds=_TIMEOUT_SECONDS, at_once=_AT_ONCE)
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


_NO_LABELS: Mapping[str, str] = MappingProxyType({})
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}
_ESCAPE = re.compile(r'\\[n"\\]')


def points(page: str, names: Iterable[str], labelled: Container[str] | None = None) -> list[Point]:
    """Return the series with these names in a page of Prometheus' text format, or [] if a value is not a number.

    Only the series in ``labelled`` get their labels; None means all. Most of a page is not needed, and the client
    library's parser would take several times as long. So this finds the first and the last line of each name and parses
    only the lines between them with a regular expression.
    """
    text = f"\n{page}"
    found: list[Point] = []
    try:
        for name in names:
            start = f"\n{name}"
            first = text.find(start)
            if first < 0:
                continue
            end = text.find("\n", text.rfind(start) + 1)
            needed = labelled is None or name in labelled
            for labels, value in _line(name).findall(text, first, end if end >= 0 else len(text)):
                found.append(Point(name, _labels(labels) if labels and needed else _NO_LABELS, float(value)))
    except ValueError:
        return []
    return found


@lru_cache(maxsize=64)
def _line(name: str) -> re.Pattern[str]:
    return re.compile(rf"\n{re.escape(name)}[ \t]*(?:{{(.*)}}[ \t]*|[ \t])(\S+)")


@lru_cache(maxsize=1024)
def _labels(text: str) -> Mapping[str, str]:
    found = dict(_LABEL.findall(text))
    if "\\" in text:
        return {name: _ESCAPE.sub(lambda match: _ESCAPES[match[0]], value) for name, value in found.items()}
    return found
