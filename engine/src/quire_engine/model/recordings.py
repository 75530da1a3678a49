"""Recorded steps of a model's layers on a CPU: what CUDA graphs are for a GPU.

With few tokens, Python takes a quarter of a step's time to prepare the launches of small layers (ADR 0138). So they are
prepared once for each number of tokens. A step copies its inputs to where the recorded launches read them.

Legend: T tokens, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import is_
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from quire_kernels.kv_cache import KVCache

if TYPE_CHECKING:
    from quire_engine.model.layers import ModelInputs
    from quire_kernels.cpu_runtime import LayerMemory, Recording
    from quire_kernels.paged_attention.cpu_plan import CpuPlan, PartialResults


class Body(Protocol):
    """The layers: they change ``residual``, and return what remains to be added to it."""

    def __call__(
        self,
        residual: Tensor,
        inputs: "ModelInputs",
        caches: tuple[KVCache, ...],
        begin_layer: Callable[[], None],
    ) -> Tensor | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """The recording of one number of tokens, with the places of its inputs and of its result."""

    recording: "Recording"
    residual: Tensor  # [T, H]
    inputs: "ModelInputs"
    addend: Tensor | None

    def run(self, residual: Tensor, inputs: "ModelInputs") -> None:
        self.residual.copy_(residual)
        self.inputs.positions.copy_(inputs.positions)
        for own, group in zip(self.inputs.groups, inputs.groups, strict=True):
            own.slots.copy_(group.slots)
            cast("CpuPlan", own.plan).become(cast("CpuPlan", group.plan))
        self.recording.run()


class Recordings:
    """The recordings of some layers by the numbers of tokens and of threads, for one KV cache."""

    def __init__(self) -> None:
        self._memory: LayerMemory | None = None
        self._partials: list[PartialResults] = []
        self._caches: tuple[KVCache, ...] = ()
        self._recorded: dict[tuple[int, int], _Recorded] = {}

    def run(
        self, body: Body, residual: Tensor, inputs: "ModelInputs", caches: tuple[KVCache, ...]
    ) -> tuple[Tensor | None, Tensor]:
        """Run the recording of ``body``; return its result and the new ``residual`` [T, H].

        The next call overwrites both.
        """
        if len(caches) != len(self._caches) or not all(map(is_, caches, self._caches)):
            self._recorded, self._caches = {}, caches
        key = (residual.shape[0], torch.get_num_threads())
        found = self._recorded.get(key)
        if found is None:
            found = self._recorded[key] = self._record(body, residual, inputs)
        found.run(residual, inputs)
        return found.addend, found.residual

    def _record(self, body: Body, residual: Tensor, inputs: "ModelInputs") -> _Recorded:
        # These need numba, which a machine with a GPU may lack.
        from quire_kernels.cpu_runtime import LayerMemory, new_tensor, recorded
        from quire_kernels.paged_attention.cpu_plan import PartialResults

        def place_for(tensor: Tensor) -> Tensor:
            return new_tensor(tuple(tensor.shape), tensor.dtype)

        if self._memory is None:
            self._memory = LayerMemory()
            self._partials = [PartialResults() for _ in inputs.groups]
        own = place_for(residual)
        groups = tuple(
            replace(group, slots=place_for(group.slots), plan=cast("CpuPlan", group.plan).for_recording(partials))
            for group, partials in zip(inputs.groups, self._partials, strict=True)
        )
        placed = replace(inputs, positions=place_for(inputs.positions), groups=groups)
        with recorded(self._memory) as recording:
            addend = body(own, placed, self._caches, self._memory.next_layer)
        return _Recorded(recording=recording, residual=own, inputs=placed, addend=addend)
