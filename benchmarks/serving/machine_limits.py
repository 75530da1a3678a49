"""Measure what this machine allows: the bytes that it reads per second, and the arithmetic of a matrix product.

Both are the best of several rounds, because other work on the machine only slows them down. Reading is measured over as
many bytes as the workload reads, because a cache is faster than memory. torch is imported when something is measured,
after the environment that its threads read is set.
"""

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_GEMM = 1536
_ROUNDS = 7
_MIN_ROUND_SECONDS = 0.01


def gemm_flops(dtype: "torch.dtype", threads: int) -> float:
    """Return the FLOP/s of a large product in this dtype, with weights packed as the engine packs them."""
    import torch

    from quire_engine.model.linear import choose_linear_backend

    torch.set_num_threads(threads)
    linear = choose_linear_backend(dtype).pack(torch.randn(_GEMM, _GEMM).to(dtype), None)
    x = torch.randn(512, _GEMM).to(dtype)
    seconds = _best_seconds(lambda: linear(x))
    return 2.0 * x.numel() * _GEMM / seconds


def read_bytes_per_second(total: int) -> float:
    """Return the rate of reading ``total`` bytes repeatedly with all of torch's threads."""
    import torch

    columns = 4096
    rows = max(torch.get_num_threads(), total // (4 * columns))
    matrix = torch.ones(rows, columns)
    vector = torch.ones(columns)
    result = torch.empty(rows)
    # There are two ways to read; the faster one is what the machine allows.
    seconds = min(_best_seconds(lambda: torch.mv(matrix, vector, out=result)), _best_seconds(matrix.sum))
    return matrix.numel() * 4 / seconds


def _best_seconds(work: Callable[[], Any]) -> float:
    best = float("inf")
    times = 1
    work()
    for _ in range(_ROUNDS):
        began = perf_counter()
        for _ in range(times):
            work()
        seconds = perf_counter() - began
        best = min(best, seconds / times)
        times = max(times, int(_MIN_ROUND_SECONDS / max(best, 1e-7)))
    return best
