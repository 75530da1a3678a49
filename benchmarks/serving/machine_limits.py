"""What this machine allows, measured here and now: bytes it reads a second, and products it makes.

Both are the best of several runs: other work on the machine only takes away. Reading is measured over as many bytes as
the work in question reads, since what fits into a cache is read faster than memory. torch is loaded when something is
measured, after the environment that its threads read is set.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_GEMM = 1536
_ROUNDS = 7
_MIN_ROUND_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of one step."""

    weight_bytes: int
    kv_bytes: int
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    threads: int
    dtype: "torch.dtype"
    flops: float
    """Of a large product in this dtype, its weights packed as the engine packs them."""

    def least_seconds(self, work: Work) -> float:
        """What the work takes where nothing is wasted: its bytes are read while its products are made."""
        total = work.weight_bytes + work.kv_bytes
        return max(total / read_bytes_per_second(total), work.flops / self.flops)


def measure_limits(dtype: "torch.dtype", threads: int) -> MachineLimits:
    import torch

    from quire_engine.model.linear import choose_linear_backend

    torch.set_num_threads(threads)
    linear = choose_linear_backend(dtype).pack(torch.randn(_GEMM, _GEMM).to(dtype), None)
    x = torch.randn(512, _GEMM).to(dtype)
    seconds = _best_seconds(lambda: linear(x))
    return MachineLimits(threads=threads, dtype=dtype, flops=2.0 * x.numel() * _GEMM / seconds)


def read_bytes_per_second(total: int) -> float:
    """Of reading ``total`` bytes again and again, by all of torch's threads."""
    import torch

    columns = 4096
    rows = max(torch.get_num_threads(), total // (4 * columns))
    matrix = torch.ones(rows, columns)
    vector = torch.ones(columns)
    result = torch.empty(rows)
    # Two ways to read; the machine can do what the better of them does.
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
