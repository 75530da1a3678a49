"""How a checkpoint's tensor gets onto the device: as it lies in the mapped file, through pinned host memory.

A mapped file's pages cannot be pinned, and copying from them by the driver waits for each. So a tensor goes in chunks
through two pinned buffers: while the device takes one, the CPU reads the file's next pages into the other.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

_CHUNK_BYTES = 32 << 20

Upload = Callable[[Tensor], Tensor]
"""A contiguous tensor in host memory to the same on the device."""


class Event(Protocol):
    """``torch.cuda.Event``, as far as it is used here."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class StagedUpload:
    """``buffers`` are of bytes, in host memory, of one length; ``events`` one for each."""

    def __init__(self, device: torch.device, buffers: tuple[Tensor, ...], events: tuple[Event, ...]) -> None:
        self._device = device
        self._buffers = buffers
        self._events = events
        self._turn = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        uploaded = torch.empty_like(tensor, device=self._device)
        source, target = _as_bytes(tensor), _as_bytes(uploaded)
        for begin in range(0, len(source), len(self._buffers[0])):
            part = source[begin : begin + len(self._buffers[0])]
            buffer, event = self._buffers[self._turn][: len(part)], self._events[self._turn]
            event.synchronize()  # what it was last filled with has been taken
            buffer.copy_(part)
            target[begin : begin + len(part)].copy_(buffer, non_blocking=True)
            event.record()
            self._turn = (self._turn + 1) % len(self._buffers)
        return uploaded


def make_upload(device: torch.device) -> Upload:
    """On a CPU a tensor stays where it is: in the file's pages, until something is made of it."""
    if device.type == "cpu":
        return lambda tensor: tensor
    buffers = tuple(torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    events: tuple[Event, ...] = tuple(torch.cuda.Event() for _ in buffers)
    return StagedUpload(device, buffers, events)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
