"""Compiles workers and runs them on the threads torch computes with.

Why not numba's ``parallel=True``: its thread pools (workqueue, or a second OpenMP runtime) stand beside torch's, and a
region costs up to 80 microseconds to enter. Here the body is compiled alone, and ``GOMP_parallel``, from the OpenMP
runtime that torch has loaded, runs it: one pool, about 10 microseconds. Work is taken off a shared counter, so a thread
that another process keeps from its core does not hold back the items of the others. Where no such runtime is loaded
(torch on macOS) a worker runs on the calling thread.
"""

import ctypes
import functools
import logging
import struct
import time
from array import array
from collections.abc import Callable
from typing import Any

import torch
from numba import cfunc, types

from quire_kernels.cpu_runtime.cache import use_cache_folder
from quire_kernels.cpu_runtime.scalars import FAST

_log = logging.getLogger(__name__)

_STORAGE = {
    torch.float32: types.float32,
    torch.bfloat16: types.uint16,
    torch.float16: types.int16,
}


class Worker:
    """One worker function, compiled when first needed for a storage type.

    The function takes one argument: a pointer whose type tells the storage, to a block of int64:
    [0] the counter of items taken, [1] how many there are, [2] a fault to report (0: none), [3] and on the arguments.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function
        self._compiled: dict[torch.dtype, Any] = {}

    def address(self, dtype: torch.dtype) -> int:
        compiled = self._compiled.get(dtype)
        if compiled is None:
            compiled = self._compiled[dtype] = self._compile(dtype)
        return compiled.address

    def _compile(self, dtype: torch.dtype) -> Any:
        """Loads what was compiled before, if anything was."""
        began = time.perf_counter()
        storage = str(dtype).removeprefix("torch.")
        signature = types.void(types.CPointer(_STORAGE[dtype]))
        compile_with = cfunc(signature, cache=use_cache_folder(storage), error_model="numpy", fastmath=FAST)
        compiled = compile_with(self._function)
        if not compiled.cache_hits:
            name = f"{self._function.__module__.removeprefix('quire_kernels.')}.{self._function.__name__}"
            _log.info("compiled %s for %s in %.1f s", name, storage, time.perf_counter() - began)
        return compiled


def launch(worker: Worker, dtype: torch.dtype, items: int, arguments: tuple[int, ...], *, parallel: bool) -> int:
    """Runs ``worker`` until all ``items`` are done; on one thread unless ``parallel``, which pays for larger work.

    Returns the fault that the worker reported: 0 is none.
    """
    block = array("q", (0, items, 0, *arguments))  # a third of the time of a ctypes array
    place, _ = block.buffer_info()
    address = worker.address(dtype)
    threads = min(torch.get_num_threads(), items) if parallel else 1
    enter = parallel_region()
    if threads > 1 and enter is not None:
        enter(address, place, threads, 0)
    else:
        _SIGNATURE(address)(place)
    return block[2]


def float_bits(value: float) -> int:
    """A float as an int64 of the argument block."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


_SIGNATURE = functools.cache(ctypes.CFUNCTYPE(None, ctypes.c_void_p))


@functools.cache
def parallel_region() -> Any | None:
    """``void GOMP_parallel(void (*fn)(void *), void *data, unsigned threads, unsigned flags)`` of torch's OpenMP."""
    try:
        enter = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    enter.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    enter.restype = None
    return enter
