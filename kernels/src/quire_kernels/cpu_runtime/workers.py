"""The compilation of workers, and their execution on the threads with which torch computes.

numba's ``parallel=True`` is not used: its thread pools (workqueue, or a second OpenMP runtime) would exist in addition
to torch's, and entering a region costs up to 80 microseconds. Here the body is compiled alone, and ``GOMP_parallel`` of
the OpenMP runtime that torch has loaded runs it: one pool, about 10 microseconds. Threads take work from a shared
counter, so a thread that another process displaces from its core does not delay the other items. If no such runtime is
loaded (torch on macOS), a worker runs on the calling thread.
"""

import ctypes
import functools
import logging
import struct
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any, Protocol

import torch
from numba import cfunc, types
from torch import Tensor

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
    threads_at: int | None = None,
) -> int:
    """Run ``worker`` until all ``items`` are done, and return its error code (0: no error).

    It runs on one thread unless ``parallel``, which pays off for larger work. ``refuse`` is called with an error code.

    A launch that names in ``keeps`` all objects whose memory it uses may be recorded (see ``recording``); it then
    returns 0. ``threads_at`` is the address from which a recorded one reads the number of its threads in each run.
    """
    block = array("q", (0, items, 0, *arguments))  # An array takes a third of the time of a ctypes array.
    address = worker.address(dtype)
    threads = min(torch.get_num_threads(), items) if parallel else 1
    enter = parallel_region()
    if enter is None:
        threads = 1
    recorder = SCOPE.recorder
    if recorder is not None:
        assert keeps is not None, "a launch whose result is read at once cannot be recorded"
        recorder.add(address, block, threads, threads_at, keeps, refuse)
        return 0
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


class Recorder(Protocol):
    """A receiver of a thread's launches, which do not run then."""

    def add(
        self,
        worker: int,
        block: "array[int]",
        threads: int,
        threads_at: int | None,
        keeps: tuple[object, ...],
        refuse: Refuse | None,
    ) -> None:
        """Take a launch of the worker at an address; the rest is as in ``launch``."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory for the result of a launch, or for what only its threads use."""
        ...


class _Scope(threading.local):
    recorder: Recorder | None = None


SCOPE = _Scope()
"""The recorder of each thread."""


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor for a launch. While launches are recorded, it is part of their memory."""
    recorder = SCOPE.recorder
    return torch.empty(shape, dtype=dtype) if recorder is None else recorder.empty(shape, dtype)


CHAIN = Worker(chain_worker)


def run_chain(place: int) -> None:
    """Run the launches of a chain's block at an address; it has the address of ``GOMP_parallel`` in it."""
    _SIGNATURE(CHAIN.address(torch.float32))(place)


_SIGNATURE = functools.cache(ctypes.CFUNCTYPE(None, ctypes.c_void_p))


@functools.cache
def region_address() -> int:
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
