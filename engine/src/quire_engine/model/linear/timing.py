"""The start-up micro-benchmark of linear backends: one layer, a few rows and many, taking turns.

Turns, and the least of each, because another process may be busy at any moment. Kept on disk under what the times
depend on, so that only the first start on a machine takes them.
"""

import logging
import time

import torch

from quire_engine.model.linear import timing_cache
from quire_engine.model.linear.backends import Linear, LinearBackend
from quire_engine.model.linear.selection import Times

_log = logging.getLogger(__name__)

ROWS = (16, 256)
"""A step that decodes, and one with a prompt in it."""
_TURNS = 7
_LEAST_WIDTH, _MOST_WIDTH = 256, 1024


def layer_width(hidden_size: int) -> int:
    """Inputs of the layer that stands for those of a model: a power of two, so that a few stand for all models."""
    return min(max(1 << (hidden_size - 1).bit_length(), _LEAST_WIDTH), _MOST_WIDTH)


def take_times(backends: tuple[LinearBackend, ...], *, dtype: torch.dtype, width: int, threads: int) -> Times:
    """From the cache where they are there for exactly these backends, else measured: some 100 ms."""
    key = timing_cache.key(dtype=str(dtype), width=width, threads=threads)
    names = tuple(backend.name for backend in backends)
    kept = timing_cache.read(key, names, len(ROWS))
    if kept is not None:
        return kept
    began = time.perf_counter()
    times = measure(backends, dtype=dtype, width=width)
    _log.info("timed linear layers in %.2f s, this once", time.perf_counter() - began)
    timing_cache.write(key, times)
    return times


@torch.inference_mode()
def measure(backends: tuple[LinearBackend, ...], *, dtype: torch.dtype, width: int) -> Times:
    generator = torch.Generator().manual_seed(0)
    weight = torch.empty((2 * width, width)).normal_(std=0.02, generator=generator).to(dtype)
    batches = [torch.empty((rows, width)).normal_(generator=generator).to(dtype) for rows in ROWS]
    layers = {backend.name: backend.pack(weight, None) for backend in backends}
    for layer in layers.values():
        for x in batches:
            layer(x)
    taken: dict[str, list[list[float]]] = {name: [[] for _ in ROWS] for name in layers}
    for _ in range(_TURNS):
        for name, layer in layers.items():
            for place, x in enumerate(batches):
                taken[name][place].append(_milliseconds(layer, x))
    return {name: tuple(map(min, by_rows)) for name, by_rows in taken.items()}


def _milliseconds(layer: Linear, x: torch.Tensor) -> float:
    began = time.perf_counter()
    layer(x)
    return (time.perf_counter() - began) * 1e3
