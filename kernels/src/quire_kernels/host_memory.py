"""Host memory in large pages, for the blocks of a cache and for weights that are only read.

A cache's memory has exactly the requested size. Its pages are either allocated on the first write, or pinned.

torch rounds its own pinned memory up to a power of two per tensor, which may be twice the size of a swap space.
Therefore pages are mapped here and then registered with CUDA: the GPU reads and writes them directly, at their
addresses in the process.
"""

import contextlib
import mmap
import threading
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

_CACHE_LINE = 64
_LARGE_PAGE = 2 << 20
_STRETCH = 32 << 20


class Cudart(Protocol):
    """The part of ``torch.cuda.cudart()`` that is used here."""

    def cudaHostRegister(self, address: int, size: int, flags: int, /) -> Any: ...

    def cudaHostUnregister(self, address: int, /) -> Any: ...

    def cudaGetErrorString(self, error: Any, /) -> str: ...


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros whose pages are allocated on the first write; torch.zeros would write every page."""
    size = prod(shape) * dtype.itemsize
    if not size or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(_Pages(size), dtype=dtype).view(shape)


def in_large_pages(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of ``tensor`` that shares large pages with the copies made before and after it.

    A CPU reads such memory about twice as fast in a virtual machine, where a step from one small page to the next costs
    two walks through page tables. Many weights are smaller than a large page, so each cannot have its own.
    """
    size = tensor.numel() * tensor.itemsize
    if not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return tensor.contiguous()
    copy = _POOL.take(size).view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype, cudart: Cudart | None = None) -> Tensor:
    """Return a tensor of zeros in pinned memory, which lasts as long as the tensor or a view of it.

    Raise RuntimeError if CUDA cannot pin the memory.
    """
    size = prod(shape) * dtype.itemsize
    if not size or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, pin_memory=True)
    pages = _Pages(size)
    zeros = torch.frombuffer(pages, dtype=dtype).view(shape)
    pages.register(zeros.data_ptr(), torch.cuda.cudart() if cudart is None else cudart)
    return zeros


class _Pool:
    """A pool of large pages, from which tensors get their memory. Each stretch is unmapped with its last tensor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Return ``size`` bytes that start at a cache line."""
        if size >= _STRETCH:
            return _large_pages(size)[:size]
        filled = -(-size // _CACHE_LINE) * _CACHE_LINE
        with self._lock:
            if len(self._left) < filled:
                self._left = _large_pages(_STRETCH)
            taken, self._left = self._left[:size], self._left[filled:]
        return taken


def _large_pages(size: int) -> Tensor:
    """Return at least ``size`` bytes that start at a large page."""
    pages = torch.frombuffer(_Pages(size + _LARGE_PAGE), dtype=torch.uint8)
    return pages[-pages.data_ptr() % _LARGE_PAGE :]


_POOL = _Pool()


class _Pages(mmap.mmap):
    """An anonymous memory mapping; if it is registered with CUDA, it is unregistered before it is unmapped."""

    _cudart: Cudart | None = None
    _address = 0

    def __new__(cls, size: int) -> "_Pages":
        pages = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Blocks are scattered, and with small pages each access would need a walk through the page tables.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def register(self, address: int, cudart: Cudart) -> None:
        error = cudart.cudaHostRegister(address, len(self), 0)
        if int(error):
            reason = cudart.cudaGetErrorString(error)
            raise RuntimeError(f"CUDA error: {len(self):,} bytes of host memory cannot be pinned: {reason}")
        self._cudart, self._address = cudart, address

    def __del__(self) -> None:
        if self._cudart is not None:
            self._cudart.cudaHostUnregister(self._address)
