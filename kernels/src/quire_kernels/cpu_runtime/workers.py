"""The compilation of workers, and their execution on the threads with which torch computes.

numba's ``parallel=True`` is not used: its thread pools (workqueue, or a second OpenMP runtime) would exist in addition
to torch's, and entering a region costs up to 80 microseconds. Here the body is compiled alone, and ``GOMP_parallel`` of
the OpenMP runtime that torch has loaded runs it: one pool, about 10 microseconds. Threads take work from a shared
counter, so a thread that another process displaces from its core does not delay the other items. If no such runtime is
loaded (torch on macOS), a worker runs on the calling thread.
"""

import contextlib
import ctypes
import functools
import logging
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import torch
from numba import cfunc, types

from quire_kernels.cpu_runtime.cache import cache_folder
from quire_kernels.cpu_runtime.chain import chain_worker
from quire_kernels.cpu_runtime.scalars import FAST

_log = logging.getLogger(__name__)

_STORAGE = {
    torch.float32: types.float32,
    torch.bfloat16: types.uint16,
    torch.float16: types.int16,
}


class Worker:
    """A worker function, compiled when it is first needed for a storage type.

    The function has one argument, a pointer to a block of int64; the pointer's type gives the storage type. The block
    contains [0] the counter of taken items, [1] the number of items, [2] an error code (0: no error), [3:] the
    arguments.
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
        """Return the worker compiled for ``dtype``, from the disk cache if possible."""
        began = time.perf_counter()
        storage = str(dtype).removeprefix("torch.")
        signature = types.void(types.CPointer(_STORAGE[dtype]))
        name = f"{self._function.__module__.removeprefix('quire_kernels.')}.{self._function.__name__}"
        with cache_folder(storage, name) as is_kept:
            compiled = cfunc(signature, cache=is_kept, error_model="numpy", fastmath=FAST)(self._function)
        if not compiled.cache_hits:
            _log.info("compiled %s for %s in %.1f s", name, storage, time.perf_counter() - began)
        return compiled


Refuse = Callable[[int], object]
"""A function that raises the error for a worker's code."""


def launch(
    worker: Worker,
    dtype: torch.dtype,
    items: int,
    arguments: tuple[int, ...],
    *,
    parallel: bool,
    keeps: tuple[object, ...] | None = None,
    refuse: Refuse | None = None,
) -> int:
    """Run ``worker`` until all ``items`` are done, and return its error code (0: no error).

    It runs on one thread unless ``parallel``, which pays off for larger work. ``refuse`` is called with an error code.

    A launch that names in ``keeps`` all objects whose memory it uses may be deferred (see ``deferred``); it then
    returns 0.
    """
    block = array("q", (0, items, 0, *arguments))  # An array takes a third of the time of a ctypes array.
    address = worker.address(dtype)
    threads = min(torch.get_num_threads(), items) if parallel else 1
    enter = parallel_region()
    if enter is None:
        threads = 1
    queue = _SCOPE.queue
    if queue is not None:
        if keeps is not None:
            queue.add(address, block, threads, keeps, refuse)
            return 0
        queue.run()
    place, _ = block.buffer_info()
    if threads > 1 and enter is not None:
        enter(address, place, threads, 0)
    else:
        _SIGNATURE(address)(place)
    if block[2] and refuse is not None:
        refuse(block[2])
    return block[2]


def float_bits(value: float) -> int:
    """Return the bits of a float as an int64 for the argument block."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


class LaunchQueue:
    """Launches that were deferred, in their order, with everything that must exist until they have run."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._kept: list[tuple[array[int], object, Refuse | None]] = []

    def add(self, worker: int, block: "array[int]", threads: int, keeps: object, refuse: Refuse | None) -> None:
        self._numbers += (worker, block.buffer_info()[0], threads)
        self._kept.append((block, keeps, refuse))

    def run(self) -> None:
        """Run all launches, and raise the error of the first that failed."""
        numbers, kept = self._numbers, self._kept
        if not kept:
            return
        self._numbers, self._kept = [], []
        chain = array("q", (0, len(kept), 0, _region_address(), *numbers))
        _SIGNATURE(CHAIN.address(torch.float32))(chain.buffer_info()[0])
        for block, _, refuse in kept:
            if block[2] and refuse is not None:
                refuse(block[2])


class _Scope(threading.local):
    queue: LaunchQueue | None = None


_SCOPE = _Scope()


@contextlib.contextmanager
def deferred() -> Iterator[LaunchQueue]:
    """Collect this thread's launches until the scope ends or ``LaunchQueue.run`` is called; one native call runs them.

    Between two launches, the interpreter and torch read memory that the weights of the launch before have displaced
    from the caches. With few rows, that takes a third of the time of a linear layer. In the scope, Python runs without
    interruption instead, and then the launches do.

    Only ops whose ``launch`` names what it keeps are deferred; any other launch first runs those before it. No other
    code in the scope may read or write the contents of a tensor that a deferred op uses. An error of the body discards
    the launches that have not run.
    """
    queue = _SCOPE.queue = LaunchQueue()
    try:
        yield queue
        queue.run()
    finally:
        _SCOPE.queue = None


CHAIN = Worker(chain_worker)
_SIGNATURE = functools.cache(ctypes.CFUNCTYPE(None, ctypes.c_void_p))


@functools.cache
def _region_address() -> int:
    """Return the address of GOMP_parallel; 0 if no launch can need it."""
    enter = parallel_region()
    return 0 if enter is None else ctypes.cast(enter, ctypes.c_void_p).value or 0


@functools.cache
def parallel_region() -> Any | None:
    """Return GOMP_parallel of torch's OpenMP runtime, or None if no such runtime is loaded.

    Its signature is ``void GOMP_parallel(void (*fn)(void *), void *data, unsigned threads, unsigned flags)``.
    """
    try:
        enter = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    enter.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    enter.restype = None
    return enter
