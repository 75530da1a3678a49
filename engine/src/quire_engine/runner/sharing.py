"""From how many tokens on a step is worth sharing among threads: timed on the model's own layer.

What follows from the times is a function of values, next to the rule of thumb for where nothing was timed.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from quire_engine.model.linear import LinearBackend
from quire_engine.model.linear.timing import SHARING_ROWS, LayerSizes, pack_layer, time_layers
from quire_engine.runner.threads import SharedFrom
from quire_engine.runner.waiting import seconds_in_run_queues

SharingTimes = dict[Literal["asleep", "spinning"], tuple[tuple[float, float], ...]]
"""By how threads wait: for each of ``SHARING_ROWS``, milliseconds on one thread and on all."""

_BUSY = 0.1
"""Of the time that was measured, what threads may have stood in a run queue."""
_WORTH_SHARING = 1.1
"""How many times faster all threads must be: they do not get their cores as readily in every step."""


@torch.inference_mode()
def time_sharing(backend: LinearBackend, sizes: LayerSizes, *, threads: int) -> SharingTimes:
    """Return what a layer takes on one thread and on all, while threads spin and while they sleep.

    Nothing is returned where the threads did not get their cores: beside a busy neighbour the times say nothing.
    """
    from quire_kernels.cpu_runtime.spin_switch import SpinSwitch  # needs numba, which a machine with a GPU may lack

    layer = pack_layer(backend, sizes)
    switch = SpinSwitch(threads)
    began, queued = time.perf_counter(), seconds_in_run_queues()
    found: SharingTimes = {"spinning": _time(layer, sizes, backend.dtype, threads)}
    switch.sleep()
    try:
        found["asleep"] = _time(layer, sizes, backend.dtype, threads)
    finally:
        switch.spin()
    after = seconds_in_run_queues()
    busy = queued is not None and after is not None and after - queued > _BUSY * (time.perf_counter() - began)
    return {} if busy else found


def _time(layer: list, sizes: LayerSizes, dtype: torch.dtype, threads: int) -> tuple[tuple[float, float], ...]:
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


def shared_from(times: Mapping[Literal["asleep", "spinning"], Sequence[tuple[float, float]]]) -> SharedFrom | None:
    """Return from how many tokens on steps are shared; None where that was not timed.

    It is the least number of rows from which on every larger one is faster when shared; where none is, sharing begins
    beyond the largest that was timed, in proportion to what is missing.
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
