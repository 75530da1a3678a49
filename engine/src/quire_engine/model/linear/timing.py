"""The start-up benchmark of linear backends, on the sizes of the model's own linear layers.

With few rows, reading the weights dominates; with many rows, computing does. Backends are therefore timed at one row,
at some and at many. The time is that of one thread instead of the wall clock, because the machine may be busy and the
results are stored for later starts.

Legend: T rows, K inputs, N outputs.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from quire_engine.model.linear.backends import Linear, LinearBackend
from quire_engine.model.linear.selection import ROWS, Times
from quire_engine.model.shape import ModelShape

SHARING_ROWS = (1, 4, 16, 64)
_TURNS = 3
_MOST_WEIGHTS = 24 << 20
"""The maximum number of weights in all copies of a layer. Several copies keep the weights out of a cache."""
_LARGEST_LAYER = 6 << 20
_HOPELESS = 20.0
"""The factor by which a backend must be slower at few rows so that more rows are not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """The weights of one decoder layer, each [N, K], and the number of layers of the model."""

    weights: tuple[tuple[int, int], ...]
    layers: int

    @property
    def count(self) -> int:
        """The number of weights in a layer."""
        return sum(outputs * inputs for outputs, inputs in self.weights)


def layer_sizes(shape: ModelShape) -> LayerSizes:
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    weights = (
        ((heads + 2 * kv_heads) * dim, hidden),
        (hidden, heads * dim),
        (2 * intermediate, hidden),
        (hidden, intermediate),
    )
    return LayerSizes(weights=weights, layers=shape.num_layers)


def timed_sizes(sizes: LayerSizes) -> LayerSizes:
    """Return the sizes to time: a layer of many weights is scaled down in proportion."""
    if sizes.count <= _LARGEST_LAYER:
        return sizes
    scale = math.sqrt(_LARGEST_LAYER / sizes.count)
    smaller = tuple((_multiple(outputs * scale), _multiple(inputs * scale)) for outputs, inputs in sizes.weights)
    return LayerSizes(weights=smaller, layers=sizes.layers)


def _multiple(size: float) -> int:
    return max(64, round(size / 64) * 64)


@torch.inference_mode()
def time_ways(backends: Sequence[LinearBackend], sizes: LayerSizes) -> Times:
    """Return the milliseconds that one layer takes on one thread, by backend, for each of ``ROWS``."""
    found: dict[str, tuple[float, ...]] = {}
    with one_thread():
        for backend in backends:
            best = [min(taken[place] for taken in found.values()) if found else math.inf for place in range(len(ROWS))]
            found[backend.name] = _time_way(backend, sizes, best)
    return found


def _time_way(backend: LinearBackend, sizes: LayerSizes, best: Sequence[float]) -> tuple[float, ...]:
    copies = max(1, min(sizes.layers, _MOST_WEIGHTS // sizes.count))
    layers = [pack_layer(backend, sizes) for _ in range(copies)]
    taken: list[float] = []
    for place, rows in enumerate(ROWS):
        if taken and taken[-1] > _HOPELESS * best[place - 1]:
            taken.append(taken[-1] * rows / ROWS[place - 1])
            continue
        # With many rows computing dominates: one copy is enough.
        used = layers[:1] if rows == ROWS[-1] else layers
        taken.append(time_layers(used, sizes, rows, backend.dtype, time.thread_time) / len(used))
    return tuple(taken)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on the calling thread only, whose CPU time is meaningful on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def pack_layer(backend: LinearBackend, sizes: LayerSizes) -> list[Linear]:
    generator = torch.Generator().manual_seed(0)
    packed = []
    for outputs, inputs in sizes.weights:
        weight = torch.empty((outputs, inputs), dtype=torch.float32).uniform_(-0.05, 0.05, generator=generator)
        packed.append(backend.pack(weight.to(backend.dtype), None))
    return packed


def time_layers(
    layers: Sequence[list[Linear]], sizes: LayerSizes, rows: int, dtype: torch.dtype, clock: Callable[[], float]
) -> float:
    """Return the minimum milliseconds of a few runs over all the layers."""
    inputs = [torch.full((rows, inputs), 0.01, dtype=dtype) for _, inputs in sizes.weights]

    def run() -> None:
        for layer in layers:
            for linear, x in zip(layer, inputs, strict=True):
                linear(x)

    return least_milliseconds(run, clock)


def least_milliseconds(run: Callable[[], None], clock: Callable[[], float]) -> float:
    """Return the minimum of a few runs after a warm-up."""
    run()
    taken = []
    for _ in range(_TURNS):
        began = clock()
        run()
        taken.append(clock() - began)
    return max(min(taken) * 1e3, 1e-6)
