"""Measure what the hardware allows at a level of CPU: the bytes read and the arithmetic done per second.

Neither uses the engine's kernels. Reading is a sum over a buffer, by one thread per CPU. Arithmetic is a loop of the
level's widest multiply-add on registers alone, so that neither memory nor caches limit it. Both are the best of several
rounds, because other work on the machine only slows them down. Reading is measured over as many bytes as the workload
reads, because a cache is faster than memory.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba.extending import intrinsic

from quire_engine.cpu.limits import CpuLevel

_ROUNDS = 60
_ROUND_SECONDS = 0.01
"""Short rounds, so that other work leaves all CPUs to some of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    """A loop body of independent multiply-adds. ``flops`` counts one body; both numbers of a product-sum count."""

    body: tuple[str, ...]
    flops: int
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


# Twelve sums hide a latency of four cycles in two units. Operands are zero, which is as fast as any other number.
_SUMS = range(12)


def _vector_loop(instruction: str, register: str, flops: int) -> _Loop:
    zeroed = tuple(f"vpxor %xmm{number}, %xmm{number}, %xmm{number}" for number in range(14))
    body = tuple(f"{instruction} %{register}12, %{register}13, %{register}{number}" for number in _SUMS)
    return _Loop(before=zeroed, body=body, flops=flops * len(_SUMS))


_LOOPS: dict[CpuLevel, _Loop] = {
    "avx2": _vector_loop("vfmadd231ps", "ymm", 2 * 8),
    "avx512": _vector_loop("vfmadd231ps", "zmm", 2 * 16),
    "avx512-bf16": _vector_loop("vdpbf16ps", "zmm", 2 * 32),
    "amx": _Loop(
        before=("ldtilecfg ($2)", *(f"tilezero %tmm{number}" for number in range(6))),
        body=tuple(f"tdpbf16ps %tmm4, %tmm5, %tmm{number}" for number in range(4)),
        after=("tilerelease",),
        flops=4 * 2 * 16 * 16 * 32,
    ),
}
_CLOBBERED = {
    "amx": [f"~{{tmm{number}}}" for number in range(6)],
    **dict.fromkeys(("avx2", "avx512", "avx512-bf16"), [f"~{{xmm{number}}}" for number in range(14)]),
}


def assembly(level: CpuLevel) -> str:
    """Return the loop of a level: operand 0 counts down the rounds, operand 2 is the address of the tiles' shapes."""
    loop = _LOOPS[level]
    return "\n".join((*loop.before, "1:", *loop.body, "dec $0", "jnz 1b", *loop.after))


def arithmetic_flops(level: CpuLevel, threads: int) -> float:
    """Return the most FLOP/s of all threads: float32 at avx2 and avx512, bfloat16 into float32 above."""
    if level == "amx":
        from quire_kernels.cpu_runtime.amx import request_permission

        if not request_permission():
            raise OSError("Linux does not permit the use of AMX tiles")
    loop = _compiled_loop(level)
    shapes = _tile_shapes()
    address = shapes.ctypes.data

    def work(count: int) -> Callable[[int], object]:
        return lambda thread: loop(count, address)

    seconds, count = _best_seconds_each(work, threads)
    del shapes
    return _LOOPS[level].flops * count * threads / seconds


def read_bytes_per_second(total: int, threads: int) -> float:
    """Return the rate at which all threads together read ``total`` bytes repeatedly."""
    parts = np.array_split(np.ones(max(threads, total // 4), dtype=np.float32), threads)

    def work(count: int) -> Callable[[int], object]:
        return lambda thread: _sum_again(parts[thread], count)

    seconds, count = _best_seconds_each(work, threads)
    return sum(part.nbytes for part in parts) * count / seconds


@numba.njit(nogil=True, fastmath=True)
def _sum(values: Any) -> Any:
    total = np.float32(0.0)
    for place in range(values.size):
        total += values[place]
    return total


@numba.njit(nogil=True)
def _sum_again(values: Any, count: int) -> float:
    total = 0.0
    for _ in range(count):
        total += _sum(values)
        values[0] = total  # the next pass depends on this one, so that none is optimized away
    return total


def _best_seconds_each(work: Callable[[int], Callable[[int], object]], threads: int) -> tuple[float, int]:
    """Return the seconds of the best round and how often its work was repeated in it."""
    best, count = float("inf"), 1
    with ThreadPoolExecutor(threads) as pool:

        def seconds() -> float:
            began = perf_counter()
            for _ in pool.map(work(count), range(threads)):
                pass
            return perf_counter() - began

        seconds()  # compiles, starts the threads, touches the pages
        while (taken := seconds()) < _ROUND_SECONDS / 2:
            count = max(2 * count, int(count * _ROUND_SECONDS / max(taken, 1e-6)))
        for _ in range(_ROUNDS):
            best = min(best, seconds())
    return best, count


def _tile_shapes() -> "np.ndarray[Any, Any]":
    """Return palette 1 with eight tiles of 16 rows of 64 bytes, as LDTILECFG reads it."""
    shapes = np.zeros(64, dtype=np.uint8)
    shapes[0] = 1
    shapes[16:32].view(np.uint16)[:] = 64
    shapes[48:56] = 16
    return shapes


@functools.cache
def _compiled_loop(level: CpuLevel) -> Callable[[int, int], int]:
    binding.initialize_native_asmparser()
    text, clobbered = assembly(level), ",".join(["=r", "0", "r", *_CLOBBERED[level], "~{memory}", "~{flags}"])

    @intrinsic
    def run(typing: Any, count: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word = ir.IntType(64)
            code = ir.InlineAsm(ir.FunctionType(word, [word, word]), text, clobbered, side_effect=True)
            return builder.call(code, arguments)

        return numba.int64(numba.int64, numba.int64), generate

    @numba.njit(numba.int64(numba.int64, numba.int64), nogil=True)
    def loop(count: int, address: int) -> Any:
        return run(count, address)

    return loop
