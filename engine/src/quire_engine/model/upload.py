"""The upload of a checkpoint's tensor from the mapped file to the device, through pinned host memory.

A mapped file's pages cannot be pinned, and the driver's copies from them would each block. A tensor is therefore copied
in chunks through two pinned buffers: while the device reads one, the CPU copies the file's next pages into the other.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

_CHUNK_BYTES = 32 << 20

Upload = Callable[[Tensor], Tensor]
"""A function from a contiguous tensor in host memory to the same tensor on the device."""


class Event(Protocol):
    """The part of ``torch.cuda.Event`` that is used here."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class StagedUpload:
    """An upload through ``buffers`` of bytes in host memory, all of one length, with one event per buffer."""

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
            event.synchronize()  # the device has read its last content
            buffer.copy_(part)
            target[begin : begin + len(part)].copy_(buffer, non_blocking=True)
            event.record()
            self._turn = (self._turn + 1) % len(self._buffers)
        return uploaded


def make_upload(device: torch.device) -> Upload:
    """Return the upload for a device. On a CPU a tensor stays in the file's pages until it is converted."""
    if device.type == "cpu":
        return lambda tensor: tensor
    buffers = tuple(torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    events: tuple[Event, ...] = tuple(torch.cuda.Event() for _ in buffers)
    return StagedUpload(device, buffers, events)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
