"""Sums of the GPUs of a tensor group over torch's symmetric memory: a buffer on each GPU that all of them can read.

Each sum is one kernel of torch (``torch.ops.symm_mem``). It begins and ends with a barrier of the GPUs, after which the
buffer is free for the next sum. The host waits for none of it.

Legend: T tokens, H hidden size.
"""

import faulthandler
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quire_engine.runner.parallel.all_reduce_choice import ALIGNMENT, WAYS, Way

_MEET_SECONDS = 120.0
_FOLDER_VARIABLES = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
"""The variables that torch reads, in this order, for the folder of the sockets by which processes share memory."""


class PeerMemory(Protocol):
    """Memory on each GPU of a tensor group that all of them can read, and the sums over it."""

    def allocate(self, gpus: Sequence[int]) -> None:
        """Allocate this rank's buffer. ``gpus`` are the indices of the group's GPUs. Raise an exception if it fails."""
        ...

    def meet(self) -> tuple[Way, ...]:
        """Let all ranks map each other's buffers, and return the ways to add. All ranks call it at the same time.

        Raise an exception if it fails.
        """
        ...

    def sum(self, x: Tensor, way: Way) -> Tensor:
        """Return the sum of ``x`` over the ranks, with the same bits on all of them; ``x`` may be changed.

        All ranks pass the same shape and way. ``x`` [T, H] is contiguous, has the type of the buffer and fits into it,
        and its bytes are a multiple of ``ALIGNMENT``.
        """
        ...

    def release(self) -> None:
        """Free the buffer, if there is one."""
        ...


def has_symmetric_memory() -> bool:
    """Return whether this torch has symmetric memory whose ranks meet by NCCL.

    Otherwise they would use the store, and keep Python's lock while they wait for each other's open files. Rank 0
    answers the store's requests in Python, so the ranks would wait for each other for ever.
    """
    distributed = torch.distributed
    if not distributed.is_available():
        return False
    return hasattr(distributed.ProcessGroup, "use_pg_for_symm_mem_rendezvous")


def _symmetric_memory() -> Any:
    from torch.distributed import _symmetric_memory as memory  # not in every build of torch

    return memory


class SymmetricMemory:
    """A ``PeerMemory`` by torch, whose modules tests replace."""

    def __init__(
        self,
        group: Any,
        *,
        elements: int,
        dtype: torch.dtype,
        device: torch.device,
        load_memory: Callable[[], Any] = _symmetric_memory,
        operations: Any = torch.ops.symm_mem,
        cuda: Any = torch.cuda,
    ) -> None:
        """Create it for the process group of a tensor group, without a buffer. ``elements`` is the buffer's size."""
        self._group, self._elements, self._dtype, self._device = group, elements, dtype, device
        self._load_memory, self._operations, self._cuda = load_memory, operations, cuda
        self._name = ""
        self._buffer: Tensor | None = None

    def allocate(self, gpus: Sequence[int]) -> None:
        own = self._device.index
        for other in gpus:
            if other != own and not self._cuda.can_device_access_peer(own, other):
                raise RuntimeError(f"GPU {own} cannot read the memory of GPU {other}")
        if (problem := folder_problem(os.environ)) is not None:
            raise RuntimeError(problem)
        self._buffer = self._load_memory().empty(self._elements, dtype=self._dtype, device=self._device)

    def meet(self) -> tuple[Way, ...]:
        self._group.use_pg_for_symm_mem_rendezvous = True
        self._name = self._group.group_name
        with _ended_if_stuck(_MEET_SECONDS):
            met = self._load_memory().rendezvous(self._buffer, self._name)
        return WAYS if met.multicast_ptr else tuple(way for way in WAYS if way != "multicast")

    def sum(self, x: Tensor, way: Way) -> Tensor:
        assert self._buffer is not None, "a sum before the buffer"
        if x.storage_offset() * x.element_size() % ALIGNMENT:
            x = x.clone()
        buffer = self._buffer[: x.numel()].view(x.shape)
        operations = self._operations
        if way == "one-shot":  # its kernel copies x itself
            found: Tensor = operations.one_shot_all_reduce_copy(buffer, x, "sum", self._name)
            return found
        buffer.copy_(x)
        if way == "two-shot":
            operations.two_shot_all_reduce_out(buffer, "sum", self._name, x)
            return x
        operations.multimem_all_reduce_(buffer, "sum", self._name)
        # The next sum overwrites the buffer.
        return x.copy_(buffer)

    def release(self) -> None:
        self._buffer = None


def folder_problem(variables: Mapping[str, str]) -> str | None:
    """Return why torch cannot create its sockets, or None. Found later, it would leave the other ranks waiting."""
    folder = Path(next((variables[name] for name in _FOLDER_VARIABLES if name in variables), "/tmp"))
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"cannot create sockets in {folder}"
    return None


@contextmanager
def _ended_if_stuck(seconds: float) -> Iterator[None]:
    """End the process if this takes longer, with its traceback in the log.

    torch waits for the open files of other ranks without a limit and keeps Python's lock, so that no thread could.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
