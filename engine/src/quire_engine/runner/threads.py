"""The number of threads for a step: all of them, unless its layers are too small to be worth sharing.

A parallel region costs about 25 microseconds if waiting threads sleep, and with a busy neighbour it waits for a thread
that was displaced from its core. A step of a small model is a hundred such regions of a few tens of microseconds each:
on one thread it is faster, and a neighbour hardly affects it. While threads spin (``waiting``), a region costs a few
microseconds, and smaller layers are worth sharing.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quire_engine.runner.waiting import Waits

_log = logging.getLogger(__name__)

# The approximate rate of one thread of a current CPU; the rule below only needs the order of magnitude.
_BYTES_PER_SECOND = 20e9
_PRODUCTS_PER_SECOND = 80e9
_WORTH_SHARING_SECONDS = {"asleep": 100e-6, "spinning": 10e-6}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFrom:
    """The number of tokens from which a step is shared among threads, by how they wait."""

    asleep: int
    spinning: int

    @property
    def words(self) -> str:
        """The numbers, for the start report."""
        return f"steps are shared from {self.spinning:,} tokens on while threads spin, {self.asleep:,} while they sleep"


ALWAYS_SHARED = SharedFrom(asleep=1, spinning=1)


class ThreadChooser:
    """The setter of torch's threads, which the kernels follow, before a step whose size requires another number."""

    def __init__(self, threads: int, *, shared_from: SharedFrom, waits: Waits | None = None) -> None:
        self._threads = threads
        self._shared_from = shared_from
        self._waits = waits
        self._current = 0

    def prepare(self, num_tokens: int) -> None:
        if self._waits is not None:
            self._waits.poll()
        spinning = self._waits is not None and self._waits.spinning
        shared_from = self._shared_from.spinning if spinning else self._shared_from.asleep
        wanted = self._threads if num_tokens >= shared_from else 1
        if wanted != self._current:
            torch.set_num_threads(wanted)
            self._current = wanted

    def possible(self, num_tokens: int) -> Iterator[int]:
        """Yield each number of threads that a step of this size may have, and let torch use it meanwhile."""
        shared_from = {self._shared_from.asleep}
        if self._waits is not None:
            shared_from.add(self._shared_from.spinning)
        for threads in sorted({self._threads if num_tokens >= begin else 1 for begin in shared_from}):
            torch.set_num_threads(threads)
            self._current = threads
            yield threads

    def close(self) -> None:
        if self._waits is not None:
            self._waits.close()


def sharing_begins(*, mean_linear_bytes: float, mean_linear_weights: float) -> SharedFrom:
    """Return the number of tokens from which a linear layer of that size is worth sharing."""

    def begins(worth: float) -> int:
        if mean_linear_bytes / _BYTES_PER_SECOND >= worth:
            return 1
        return max(1, round(worth * _PRODUCTS_PER_SECOND / mean_linear_weights))

    return SharedFrom(**{wait: begins(worth) for wait, worth in _WORTH_SHARING_SECONDS.items()})


def use_threads(threads: int) -> int:
    """Let torch use ``threads`` threads, but at most the CPUs that this process may run on; return the number."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads > allowed:
        _log.warning("using %d threads instead of %d: this process may run on %d CPUs", allowed, threads, allowed)
    torch.set_num_threads(min(threads, allowed))
    return min(threads, allowed)
