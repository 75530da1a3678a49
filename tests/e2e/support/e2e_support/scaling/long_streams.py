"""Streams that last long enough to be under way when their replica is told to end: so many at a time.

A thread for each; ``long_answer`` judges what comes. Beside ``traffic``, whose answers are known to the last token and
are therefore short.
"""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, Self

import httpx

from e2e_support.scaling.long_answer import Cut, LongAnswer
from e2e_support.timeline.model import Steps
from e2e_support.traffic.client import REPLICA
from e2e_support.traffic.prompts import Kind, of_kind
from e2e_support.traffic.sse import EventReader

SILENCE_SECONDS: Final = 60.0
_JOIN_SECONDS: Final = 240.0
_APART_SECONDS: Final = 1.0
_PROBE_TOKENS: Final = 150
_MOST_TOKENS: Final = 3500
"""Fewer than the demo model can, with a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongStream:
    """One that is over. Times are seconds of the clock that was given."""

    replica: str | None
    """``namespace/pod``; None where no answer began."""
    started: float
    ended: float
    tokens: int
    problem: str | None
    """None: whole and right."""


def under_way(streams: Sequence[LongStream]) -> Steps:
    """How many there were at each time, for a timeline."""
    changes = sorted([(one.started, 1) for one in streams] + [(one.ended, -1) for one in streams])
    counts = itertools.accumulate(change for _, change in changes)
    points = tuple((time, float(count)) for (time, _), count in zip(changes, counts, strict=True))
    return Steps(name="long streams under way", points=((0.0, 0.0), *points))


class LongStreams:
    """A context manager: from its beginning until ``finish`` so many are under way: one that ends is followed."""

    def __init__(self, url: str, model: str, *, at_once: int, tokens: int, clock: Callable[[], float]) -> None:
        self._url, self._model, self._tokens, self._clock = url, model, tokens, clock
        self._done: list[LongStream] = []
        self._under_way: dict[int, str] = {}
        """Replicas that answer now, by the number of the stream."""
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self._threads = [
            threading.Thread(target=self._run, name=f"long stream {i}", daemon=True) for i in range(at_once)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
            # One after another, so that gateways see each before they place the next: begun at once, all may meet.
            self._stop.wait(_APART_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    @property
    def replicas(self) -> frozenset[str]:
        """Those that one is under way on."""
        return frozenset(self._under_way.copy().values())

    @property
    def ended(self) -> int:
        """How many are over."""
        return len(self._done)

    def finish(self) -> list[LongStream]:
        """No further ones; all that were begun, read to their ends."""
        self._stop.set()
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        still = sum(thread.is_alive() for thread in self._threads)
        assert not still, f"{still} streams did not end within {_JOIN_SECONDS:g} s"
        return sorted(self._done, key=lambda stream: stream.started)

    def _run(self) -> None:
        prompts = of_kind(Kind.LONG)
        with httpx.Client(timeout=SILENCE_SECONDS, trust_env=False) as client:
            while not self._stop.is_set():
                number = next(self._numbers)
                answer = LongAnswer(prompts[number % len(prompts)], self._tokens)
                begun = partial(self._under_way.__setitem__, number)
                stream = _stream(client, self._url, self._model, answer, clock=self._clock, begun=begun)
                self._under_way.pop(number, None)
                self._done.append(stream)
                if stream.problem is not None:
                    self._stop.wait(1.0)  # a server that refuses is not to be flooded


def tokens_lasting(seconds: float, url: str, model: str) -> int:
    """How many tokens one stream is given in that time, as things are: machines differ much in speed."""
    began = time.monotonic()
    with httpx.Client(timeout=SILENCE_SECONDS, trust_env=False) as client:
        answer = LongAnswer(of_kind(Kind.LONG)[0], _PROBE_TOKENS)
        probe = _stream(client, url, model, answer, clock=time.monotonic, begun=lambda replica: None)
    assert probe.problem is None, probe.problem
    return max(_PROBE_TOKENS, min(_MOST_TOKENS, round(_PROBE_TOKENS * seconds / (time.monotonic() - began))))


def _stream(
    client: httpx.Client,
    url: str,
    model: str,
    answer: LongAnswer,
    *,
    clock: Callable[[], float],
    begun: Callable[[str], None],
) -> LongStream:
    """One, from its first byte to its last."""
    started, replica, problem = clock(), None, None
    try:
        with client.stream("POST", f"{url}/v1/completions", json=answer.body(model)) as response:
            replica = response.headers.get(REPLICA)
            if response.status_code != 200:
                raise Cut(f"HTTP {response.status_code}: {response.read()[:300].decode(errors='replace')}")
            begun(replica or "")
            for data in _events(response):
                answer.take(json.loads(data))
        answer.end()
    except Cut as error:
        problem = str(error)
    except (httpx.HTTPError, OSError, ValueError) as error:
        problem = f"after {answer.tokens} tokens: {type(error).__name__}: {error}"
    return LongStream(replica=replica, started=started, ended=clock(), tokens=answer.tokens, problem=problem)


def _events(response: httpx.Response) -> Iterator[bytes]:
    """Until [DONE]. Raises ``Cut`` where the body ends before that."""
    reader = EventReader()
    for chunk in response.iter_raw():
        for data in reader.feed(chunk):
            if data == b"[DONE]":
                return
            yield data
    raise Cut("the body ended without [DONE]")
