"""all_reduce on a CPU: each rank copies chunks into its ring and adds those of the other ranks as they are published.

A rank has two counters in shared memory: the chunks that it published since the start, and those that it has read of
all ranks. Chunk c may replace chunk c - SLOTS when every rank has read that one.
"""

import platform
from collections.abc import Sequence
from typing import Any

import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from quire_kernels.all_reduce import CHUNK_BYTES, SLOTS
from quire_kernels.cpu_runtime import Worker, launch
from quire_kernels.cpu_runtime.scalars import (
    as_int64_pointer,
    copy_bytes,
    float32_pointer,
    int64_pointer,
    storage_pointer,
    to_float32,
    to_storage,
)

_LAG = SLOTS // 2
"""A rank publishes this many chunks before it reads the first one: the other ranks' are there by then."""
_SPINS = 2_000
_YIELDS = 2_000
_SLEEP_MICROSECONDS = 50


@intrinsic
def _load(typingctx: Any, pointer: Any, index: Any) -> Any:
    """Return ``pointer[index]`` with acquire order."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.gep(args[0], [args[1]]), "acquire", 8)

    return types.int64(types.CPointer(types.int64), types.int64), codegen


@intrinsic
def _store(typingctx: Any, pointer: Any, index: Any, value: Any) -> Any:
    """Set ``pointer[index]`` with release order: a rank that sees it also sees what was written before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], builder.gep(args[0], [args[1]]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.CPointer(types.int64), types.int64, types.int64), codegen


@intrinsic
def _pause(typingctx: Any) -> Any:
    """Spend some cycles of a spinning thread without taking them from the core's other thread."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _yield_core(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _sleep(typingctx: Any, microseconds: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32)])
        function = cgutils.get_or_insert_function(builder.module, kind, "usleep")
        builder.call(function, [builder.trunc(args[0], ir.IntType(32))])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@njit
def _await(counters: Any, index: Any, count: Any) -> None:
    """Wait until ``counters[index]`` reaches ``count``."""
    tries = 0
    while _load(counters, index) < count:
        if tries < _SPINS:
            _pause()
        elif tries < _SPINS + _YIELDS:
            _yield_core()
        else:
            _sleep(_SLEEP_MICROSECONDS)
        tries += 1


@njit
def _await_all(counters: Any, ranks: Any, which: Any, count: Any) -> None:
    for rank in range(ranks):
        _await(counters, rank * 16 + which, count)


def _all_reduce_worker(block: Any) -> None:
    a = carray(as_int64_pointer(block), 11)
    counters, rings, rank, ranks, first, total = int64_pointer(a[3]), a[4], a[5], a[6], a[7], a[9]
    data = carray(storage_pointer(block, a[8]), total)
    scratch = carray(float32_pointer(a[10]), CHUNK_BYTES)
    one = data[0]
    size = data.itemsize
    width = CHUNK_BYTES // size
    chunks = -(-total // width)
    for turn in range(chunks + _LAG):
        if turn < chunks:
            # Chunk `turn` replaces an old one, which all ranks must have read.
            _await_all(counters, ranks, 8, first + turn - SLOTS + 1)
            begin = turn * width
            count = min(width, total - begin)
            place = rings + (rank * SLOTS + (first + turn) % SLOTS) * CHUNK_BYTES
            copy_bytes(place, a[8] + begin * size, count * size)
            _store(counters, rank * 16, first + turn + 1)
        chunk = turn - _LAG
        if chunk < 0 or chunk >= chunks:
            continue
        _await_all(counters, ranks, 0, first + chunk + 1)
        begin = chunk * width
        count = min(width, total - begin)
        slot = rings + (first + chunk) % SLOTS * CHUNK_BYTES
        target = data[begin : begin + count]
        if ranks == 2:
            other = carray(storage_pointer(block, slot + (1 - rank) * SLOTS * CHUNK_BYTES), count)
            for i in range(count):
                target[i] = to_storage(to_float32(target[i]) + to_float32(other[i]), one)
        else:
            for source in range(ranks):
                part = carray(storage_pointer(block, slot + source * SLOTS * CHUNK_BYTES), count)
                if source == 0:
                    for i in range(count):
                        scratch[i] = to_float32(part[i])
                else:
                    for i in range(count):
                        scratch[i] += to_float32(part[i])
            for i in range(count):
                target[i] = to_storage(scratch[i], one)
        _store(counters, rank * 16 + 8, first + chunk + 1)


def _gather_worker(block: Any) -> None:
    a = carray(as_int64_pointer(block), 10)
    counters, rings, rank, ranks, first, longest = int64_pointer(a[3]), a[4], a[5], a[6], a[7], a[8]
    places = carray(int64_pointer(a[9]), 2 * ranks)
    chunks = -(-longest // CHUNK_BYTES)
    if rank != 0:
        # This rank reads nothing of the gather, so that no rank waits for it.
        _store(counters, rank * 16 + 8, first + chunks)
    for chunk in range(chunks):
        begin = chunk * CHUNK_BYTES
        slot = (first + chunk) % SLOTS * CHUNK_BYTES
        if rank == 0:
            _store(counters, 0, first + chunk + 1)
            for source in range(1, ranks):
                _await(counters, source * 16, first + chunk + 1)
                count = min(CHUNK_BYTES, places[ranks + source] - begin)
                if count > 0:
                    copy_bytes(places[source] + begin, rings + source * SLOTS * CHUNK_BYTES + slot, count)
            _store(counters, 8, first + chunk + 1)
            continue
        # Any rank may still read the old chunk, which may belong to a sum.
        _await_all(counters, ranks, 8, first + chunk - SLOTS + 1)
        count = min(CHUNK_BYTES, places[ranks + rank] - begin)
        if count > 0:
            copy_bytes(rings + rank * SLOTS * CHUNK_BYTES + slot, places[rank] + begin, count)
        _store(counters, rank * 16, first + chunk + 1)


_ALL_REDUCE = Worker(_all_reduce_worker)
_GATHER = Worker(_gather_worker)


def all_reduce(x: Tensor, scratch: Tensor, counters: int, rings: int, rank: int, ranks: int, first: int) -> int:
    """Return the number of chunks of ``x``, which is replaced by the sum; ``first`` is the number of its first."""
    arguments = (counters, rings, rank, ranks, first, x.data_ptr(), x.numel(), scratch.data_ptr())
    launch(_ALL_REDUCE, x.dtype, 1, arguments, parallel=False)
    return -(-x.numel() // (CHUNK_BYTES // x.element_size()))


def gather(parts: Sequence[Tensor], longest: int, counters: int, rings: int, rank: int, ranks: int, first: int) -> int:
    """Return the number of chunks; ``parts`` has a tensor per rank, all filled on rank 0 and only read on others."""
    places = torch.tensor([part.data_ptr() for part in parts] + [part.nbytes for part in parts])  # [2 N] int64
    arguments = (counters, rings, rank, ranks, first, longest, places.data_ptr())
    launch(_GATHER, parts[0].dtype, 1, arguments, parallel=False)
    return -(-longest // CHUNK_BYTES)
