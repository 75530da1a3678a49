"""Times on a GPU by CUDA events, with the L2 cache flushed before each call, as medians; and the card's own rates.

A short spin before each call keeps the host ahead of the GPU, so that a launch's cost on the host is not counted unless
it exceeds the GPU's work.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_SPIN_CYCLES = 200_000  # about 0.1 ms
_BUDGET_SECONDS = 0.4  # of measuring one callable
_WARM_UP_CALLS = 3


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds per call."""

    median: float
    fastest: float
    calls: int


class Timer:
    """A timer that owns the memory for flushing the cache: twice the L2 cache, read before every call.

    Reading leaves clean lines. Lines that were written would go back to memory during the timed call, as if they were
    part of its work.
    """

    def __init__(self, device: torch.device) -> None:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.zeros(max(2 * l2_bytes, 64 << 20) // 4, dtype=torch.int32, device=device)

    def time(self, call: Callable[[], object], *, least: int = 10, most: int = 200) -> Timing:
        for _ in range(_WARM_UP_CALLS):
            call()
        once = self._run(call, 3)
        calls = max(least, min(most, int(_BUDGET_SECONDS / max(statistics.median(once), 1e-5))))
        seconds = self._run(call, calls)
        return Timing(median=statistics.median(seconds), fastest=min(seconds), calls=calls)

    def _run(self, call: Callable[[], object], calls: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for before, after in events:
            self._flush.sum()
            torch.cuda._sleep(_SPIN_CYCLES)
            before.record()
            call()
            after.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) * 1e-3 for before, after in events]


@dataclass(frozen=True, kw_only=True)
class Card:
    """The rates that the GPU reached in this run, with which all other figures are compared."""

    read_bytes_per_second: float
    copy_bytes_per_second: float
    gemm_flops: dict[str, float]
    """The FLOP/s of a square product of 8,192, by dtype."""


def measure_card(timer: Timer, device: torch.device) -> Card:
    read, copied = _memory_rates(timer, device)
    rates = {dtype: _gemm_rate(timer, device, dtype) for dtype in (torch.bfloat16, torch.float16)}
    torch.cuda.empty_cache()
    return Card(
        read_bytes_per_second=read,
        copy_bytes_per_second=copied,
        gemm_flops={str(dtype).removeprefix("torch."): rate for dtype, rate in rates.items()},
    )


def _memory_rates(timer: Timer, device: torch.device) -> tuple[float, float]:
    """Return the bytes per second of reading, and of reading and writing."""
    source = torch.empty(1 << 30, dtype=torch.float32, device=device).normal_()  # 4 GiB
    target = torch.empty_like(source)
    # The faster of two ways to read, which differs between cards.
    read = min(timer.time(call).median for call in (lambda: _read(source), lambda: source.sum()))
    return source.nbytes / read, 2 * source.nbytes / timer.time(lambda: target.copy_(source)).median


def _gemm_rate(timer: Timer, device: torch.device, dtype: torch.dtype) -> float:
    side = 8192
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / timer.time(lambda: a @ b).median


@triton.jit
def _read_kernel(source, out, elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for offset in range(start, elements, step):
        total += tl.load(source + offset + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(total, axis=0))


def _read(source: Tensor) -> Tensor:
    programs = torch.cuda.get_device_properties(source.device).multi_processor_count * 8
    out = torch.empty(programs, dtype=torch.float32, device=source.device)
    _read_kernel[(programs,)](source, out, source.numel(), BLOCK=8192, num_warps=8, num_stages=4)
    return out
