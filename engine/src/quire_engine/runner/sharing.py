"""The number of tokens from which a step is worth sharing among threads, timed on the model's own layer.

The result is a function of the times; a rule of thumb replaces it if nothing was timed.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from quire_engine.model.linear import LinearBackend
from quire_engine.model.linear.backends import Linear
from quire_engine.model.linear.timing import SHARING_ROWS, LayerSizes, pack_layer, time_layers
from quire_engine.runner.threads import SharedFrom
from quire_engine.runner.waiting import seconds_in_run_queues

SharingTimes = dict[Literal["asleep", "spinning"], tuple[tuple[float, float], ...]]
"""Milliseconds on one thread and on all, for each of ``SHARING_ROWS``, by how threads wait."""

_BUSY = 0.1
"""The tolerated share of the measured time that threads spend in a run queue."""
_ROUNDS = 3
_LONG_MILLISECONDS, _CERTAIN_GAIN = 1.0, 1.25
"""A layer that takes one thread this long is faster by this factor on several, if they all have a core."""
_WORTH_SHARING = 1.1
"""The factor by which all threads must be faster: they do not always get their cores as easily."""


@torch.inference_mode()
def time_sharing(backend: LinearBackend, sizes: LayerSizes, *, threads: int) -> SharingTimes:
    """Return the time of a layer on one thread and on all, while threads spin and while they sleep.

    Return nothing if the threads did not get their cores: with a busy neighbor the times are meaningless, and storing
    them would keep later starts on one thread.
    """
    from quire_kernels.cpu_runtime.spin_switch import SpinSwitch  # needs numba, which a machine with a GPU may lack

    layer = pack_layer(backend, sizes)
    switch = SpinSwitch(threads)
    began, queued = time.perf_counter(), seconds_in_run_queues()
    spinning, asleep = [], []
    for _ in range(_ROUNDS):
        spinning.append(_time(layer, sizes, backend.dtype, threads))
        switch.sleep()
        try:
            asleep.append(_time(layer, sizes, backend.dtype, threads))
        finally:
            switch.spin()
    after = seconds_in_run_queues()
    busy = queued is not None and after is not None and after - queued > _BUSY * (time.perf_counter() - began)
    found: SharingTimes = {"spinning": _minima(spinning), "asleep": _minima(asleep)}
    return found if not busy and are_plausible(found) else {}


def are_plausible(times: SharingTimes) -> bool:
    """Return False if more threads did not accelerate a long layer, which shows that they had no core of their own.

    The kernel does not count the time that a hypervisor takes from a virtual CPU, so this is the only evidence of it.
    """
    longest = [pairs[-1] for pairs in times.values()]
    return all(alone < _LONG_MILLISECONDS or alone >= _CERTAIN_GAIN * shared for alone, shared in longest)


def _time(layer: list[Linear], sizes: LayerSizes, dtype: torch.dtype, threads: int) -> tuple[tuple[float, float], ...]:
    found = []
    try:
        for rows in SHARING_ROWS:
            torch.set_num_threads(1)
            alone = time_layers([layer], sizes, rows, dtype, time.perf_counter)
            torch.set_num_threads(threads)
            found.append((alone, time_layers([layer], sizes, rows, dtype, time.perf_counter)))
    finally:
        torch.set_num_threads(threads)
    return tuple(found)


def _minima(rounds: Sequence[Sequence[tuple[float, float]]]) -> tuple[tuple[float, float], ...]:
    """Return the shortest times of several rounds, for each number of rows."""
    return tuple(
        (min(alone for alone, _ in pairs), min(shared for _, shared in pairs)) for pairs in zip(*rounds, strict=True)
    )


def shared_from(times: Mapping[Literal["asleep", "spinning"], Sequence[tuple[float, float]]]) -> SharedFrom | None:
    """Return the number of tokens from which steps are shared; None if that was not timed.

    It is the smallest number of rows from which all larger ones are faster when shared. Otherwise, sharing
    starts beyond the largest timed number, in proportion to what is missing.
    """
    if set(times) != {"asleep", "spinning"}:
        return None
    return SharedFrom(asleep=_begins(times["asleep"]), spinning=_begins(times["spinning"]))


def _begins(pairs: Sequence[tuple[float, float]]) -> int:
    worth = [alone >= _WORTH_SHARING * shared for alone, shared in pairs]
    for place, rows in enumerate(SHARING_ROWS):
        if all(worth[place:]):
            return rows
    alone, shared = pairs[-1]
    return max(SHARING_ROWS[-1] + 1, round(SHARING_ROWS[-1] * _WORTH_SHARING * shared / alone * len(SHARING_ROWS)))
