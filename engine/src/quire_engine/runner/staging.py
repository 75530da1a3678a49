"""The transfer of a step's inputs to the device: packed into pinned host memory, in one asynchronous copy.

``StepStaging`` is for the inputs that every step has: its memory is allocated once, so a captured graph finds them at
the same addresses every time. ``HostToDeviceBatch`` is for data of any size that only some steps have.

Legend: T tokens, B sequences, R rows of logits, K sampled tokens, G KV cache groups, C blocks of tokens with an
adapter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire_engine.runner.accelerator import Accelerator, Mark
from quire_kernels.lora import most_blocks

ALIGNMENT = 128
"""The alignment in bytes. Triton compiles a kernel again for a pointer with a smaller alignment than before."""

Array = TypeVar("Array", np.ndarray, Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSizes:
    tokens: int
    sequences: int
    logits: int
    draws: int
    adapter_slots: int = 0
    """The slots for adapters; 0 if no token of the step has an adapter."""

    @property
    def adapter_blocks(self) -> int:
        return most_blocks(self.tokens, self.adapter_slots) if self.adapter_slots else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs(Generic[Array]):
    """The inputs of a step, adjacent in memory, on the host or on the device."""

    token_ids: Array  # [T] int64
    positions: Array  # [T] int64
    token_rows: Array  # [T] int64, the row of each token
    is_feedback: Array  # [T] bool, whether the token is the last one sampled for its row
    slots: tuple[Array, ...]  # G times [T] int64
    rows: Array  # [B] int64
    contexts: Array  # [B] int32
    query_starts: Array  # [B + 1] int32
    logits_rows: Array  # [R] int64
    drawn_lines: Array  # [K] int64, the lines of logits that are sampled from
    drawn_rows: Array  # [K] int64
    drawn_positions: Array  # [K] int64
    adapter_order: Array  # [T] int32, the tokens that have an adapter, by slot; empty if no token has one
    adapter_blocks: Array  # [3 C] int32, slot, first and last + 1 place in the order; a slot of -1 is an empty block


def _carve(
    sizes: InputSizes, groups: int, take: Callable[[int, int, np.dtype], Array]
) -> tuple[StepInputs[Array], int]:
    """Return the inputs at their places, created by ``take(first byte, length, type)``, and their total bytes."""
    end = 0

    def next_input(length: int, kind: type = np.int64) -> Array:
        nonlocal end
        begin, dtype = end, np.dtype(kind)
        end = begin + _aligned(length * dtype.itemsize)
        return take(begin, length, dtype)

    tokens, sequences = sizes.tokens, sizes.sequences
    inputs: StepInputs[Array] = StepInputs(
        token_ids=next_input(tokens),
        positions=next_input(tokens),
        token_rows=next_input(tokens),
        is_feedback=next_input(tokens, np.bool_),
        slots=tuple(next_input(tokens) for _ in range(groups)),
        rows=next_input(sequences),
        contexts=next_input(sequences, np.int32),
        query_starts=next_input(sequences + 1, np.int32),
        logits_rows=next_input(sizes.logits),
        drawn_lines=next_input(sizes.draws),
        drawn_rows=next_input(sizes.draws),
        drawn_positions=next_input(sizes.draws),
        adapter_order=next_input(tokens if sizes.adapter_slots else 0, np.int32),
        adapter_blocks=next_input(3 * sizes.adapter_blocks, np.int32),
    )
    return inputs, end


class StepStaging:
    """Pinned buffers used in turn, because steps overlap, and one buffer on the device, where they do not."""

    def __init__(self, accelerator: Accelerator, *, groups: int, largest: InputSizes, buffers: int = 2) -> None:
        self._accelerator = accelerator
        self._groups = groups
        _, num_bytes = _carve(largest, groups, lambda begin, length, dtype: np.empty(0))
        self._hosts = [accelerator.pinned(num_bytes) for _ in range(buffers)]
        self._copied: list[Mark | None] = [None] * buffers
        self._turn = 0
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=accelerator.device)

    def begin(self, sizes: InputSizes) -> StepInputs[np.ndarray]:
        """Return the arrays for the next step's inputs."""
        self._turn = (self._turn + 1) % len(self._hosts)
        copied = self._copied[self._turn]
        if copied is not None:
            copied.wait()  # This is long done if each step is waited for before its buffer is used again.
        memory = self._hosts[self._turn].numpy()
        inputs, num_bytes = _carve(
            sizes,
            self._groups,
            lambda begin, length, dtype: memory[begin : begin + length * dtype.itemsize].view(dtype),
        )
        assert num_bytes <= len(memory), f"{sizes} are more than a step may have"
        return inputs

    def upload(self, sizes: InputSizes) -> None:
        """Upload the inputs written since ``begin``, for the same sizes."""
        _, num_bytes = _carve(sizes, self._groups, lambda begin, length, dtype: np.empty(0))
        self._accelerator.upload(self._hosts[self._turn][:num_bytes], self._device[:num_bytes])
        self._copied[self._turn] = self._accelerator.mark()

    def on_device(self, sizes: InputSizes) -> StepInputs[Tensor]:
        """Return the inputs of these sizes on the device, at the same addresses in every step."""
        inputs, _ = _carve(sizes, self._groups, lambda begin, length, dtype: _typed(self._device, begin, length, dtype))
        return inputs


class Item:
    """An array in a host-to-device batch; ``on_device`` is valid after the transfer."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.ascontiguousarray(array)
        self._tensor: Tensor | None = None

    @property
    def on_device(self) -> Tensor:
        assert self._tensor is not None, "the transfer was not sent"
        return self._tensor

    def arrive(self, tensor: Tensor) -> None:
        self._tensor = tensor


class HostToDeviceBatch:
    """A host-to-device batch: the data that a step uploads in addition to its inputs. An empty one costs nothing."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.items: list[Item] = []

    def add(self, array: np.ndarray) -> Item:
        item = Item(array)
        self.items.append(item)
        return item

    def send(self) -> None:
        if not self.items:
            return
        begins, end = [], 0
        for item in self.items:
            begins.append(end)
            end += _aligned(item.array.nbytes)
        # torch reuses this memory, but not before it was copied.
        host = self._accelerator.pinned(end)
        memory = host.numpy()
        for item, begin in zip(self.items, begins, strict=True):
            flat = item.array.reshape(-1)
            memory[begin : begin + flat.nbytes] = flat.view(np.uint8)
        device = self._accelerator.upload(host)
        for item, begin in zip(self.items, begins, strict=True):
            array = item.array
            item.arrive(_typed(device, begin, array.size, array.dtype).view(array.shape))


_TORCH_TYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


def _typed(memory: Tensor, begin: int, length: int, dtype: np.dtype) -> Tensor:
    return memory[begin : begin + length * dtype.itemsize].view(_TORCH_TYPES[dtype])


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
