"""Metrics straight from the replicas: ``metricsSource: Pods``, and local mode.

The half of ``ports.Metrics`` that reads replicas, over HTTP. All replicas are asked within one deadline, those that
answered before ahead of those that did not; one that does not answer, or answers with something else than metrics, is
simply absent: what that means is the autoscaler's to say.
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
"""For all replicas together, however many are silent."""
_AT_ONCE = 100

_log = logging.getLogger(__name__)


class Scraper:
    """``failed`` is told why each replica that was asked gave none."""

    def __init__(
        self,
        *,
        clock: Clock,
        read: Read | None = None,
        failed: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """``read`` None: over HTTP."""
        self._clock, self._failed = clock, failed
        self._pages = Pages(timeout_seconds=_TIMEOUT_SECONDS, at_once=_AT_ONCE)
        self._read = read or self._pages.read
        self._silent: set[str] = set()

    async def aclose(self) -> None:
        await self._pages.aclose()

    async def samples(self, replicas: Sequence[ReplicaAddress]) -> Mapping[str, ReplicaSample]:
        """See ``ports.Metrics``. Draining replicas are asked too: their work teaches the rates."""
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
            # A task for each at a time, not for each of thousands, which would take longer than what they read.
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    for name, url in asked:
                        answers[name] = await self._sample(url)

        await asyncio.gather(*(ask() for _ in range(min(_AT_ONCE, len(urls)))))
        for name in urls.keys() - answers.keys():
            self._note_silence(urls[name], f"no turn within {_ROUND_SECONDS:g} s: too many are silent", "timeout")
        return {name: sample for name, sample in answers.items() if sample is not None}

    async def _sample(self, url: str) -> ReplicaSample | None:
        """None, and why is counted, where there is none; whether it answers is logged when that changes."""
        try:
            page = await self._read(url)
            sample = sample_of(points(page.decode(), NAMES, LABELLED), time=self._clock.now())
            if sample is None:
                raise NoPage("its answer tells too little of an engine", reason="bad_answer")
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
    """The series called ``names`` in a page of metrics, in Prometheus's text format; none where one has no number.

    Of those not in ``labelled`` (None: all are) labels are not read. Nor are the lines between: where the first and the
    last line of a name are is found by the name, and an expression of our own reads what is there. Of a page most is
    not wanted, and with the parser of the client library a tick takes several times as long.
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
