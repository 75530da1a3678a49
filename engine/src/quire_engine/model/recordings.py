"""Recorded steps of a model on a CPU: what CUDA graphs are for a GPU.

With few tokens, Python takes a quarter of a step's time to prepare the launches of small layers (ADR 0138). So they are
prepared once for each number of tokens. A step copies its inputs to where the recorded launches read them.

A draft model goes further (ADR 0138): one call runs several passes, each with the most probable tokens of the one
before.

Legend: T tokens, R sequences with one token each, P passes, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import is_
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from quire_kernels.feed_back import Passes, PassInputs, feed_back
from quire_kernels.kv_cache import KVCache
from quire_kernels.sampling import greedy

if TYPE_CHECKING:
    from quire_engine.model.layers import ModelInputs
    from quire_kernels.cpu_runtime import LayerMemory, Recording
    from quire_kernels.paged_attention.cpu_plan import CpuPlan, PartialResults

_MOST_PASSES = 32
"""The most passes of one call; more drafts than that are seldom accepted."""
_Result = TypeVar("_Result", covariant=True)


class Body(Protocol[_Result]):
    """Code whose launches are recorded. It reads nothing that varies but its first two arguments."""

    def __call__(
        self, source: Tensor, inputs: "ModelInputs", caches: tuple[KVCache, ...], begin_layer: Callable[[], None]
    ) -> _Result: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded(Generic[_Result]):
    """The recording of a body for one number of tokens, with the places of its inputs and its result."""

    recording: "Recording"
    source: Tensor
    inputs: "ModelInputs"
    result: _Result

    def run(self, source: Tensor, inputs: "ModelInputs", passes: int = 1) -> None:
        self.source.copy_(source)
        self.inputs.positions.copy_(inputs.positions)
        for own, group in zip(self.inputs.groups, inputs.groups, strict=True):
            own.slots.copy_(group.slots)
            cast("CpuPlan", own.plan).become(cast("CpuPlan", group.plan))
        self.recording.run(passes)


class Recordings:
    """The recordings of a model by their kind and by the numbers of tokens and of threads, for one KV cache."""

    def __init__(self) -> None:
        self._memory: LayerMemory | None = None
        self._partials: list[PartialResults] = []
        self._caches: tuple[KVCache, ...] = ()
        self._recorded: dict[tuple[str, int, int], _Recorded[object]] = {}
        self.made = 0
        """The recordings that were made so far."""

    def run(
        self,
        kind: str,
        body: Body[_Result],
        source: Tensor,
        inputs: "ModelInputs",
        caches: tuple[KVCache, ...],
    ) -> _Result:
        """Run the recording of ``body``, and return its result, which the next call overwrites.

        kind    the name of the body: a later one of the same name does the same
        source  [T, ...], the tokens or the residual stream; the body may change it
        """
        found = self.prepare(kind, body, source, inputs, caches)
        found.run(source, inputs)
        return found.result

    def prepare(
        self, kind: str, body: Body[_Result], source: Tensor, inputs: "ModelInputs", caches: tuple[KVCache, ...]
    ) -> _Recorded[_Result]:
        """Record ``body`` for the number of tokens of these inputs, unless it is recorded; see ``run``."""
        if len(caches) != len(self._caches) or not all(map(is_, caches, self._caches)):
            self._recorded, self._caches = {}, caches
        key = (kind, source.shape[0], torch.get_num_threads())
        found = self._recorded.get(key)
        if found is None:
            found = self._recorded[key] = self._record(body, source, inputs)
        return cast("_Recorded[_Result]", found)

    def guess(
        self, body: Body[Tensor], inputs: "ModelInputs", slots: np.ndarray, caches: tuple[KVCache, ...]
    ) -> np.ndarray:
        """Return the tokens [P, R] that some passes sample greedily, each after those of the one before.

        body   returns the logits [R, V]
        slots  [P, R] int64, those of each pass; P is at most what ``passes_at_once`` returns
        """
        count = len(slots)
        found = self.prepare_guesses(body, inputs, caches)
        passes = found.result
        passes.done.zero_()
        passes.slots[:count] = torch.from_numpy(slots)
        found.run(inputs.token_ids, inputs, count)
        sampled: np.ndarray = passes.sampled[:count].numpy().copy()
        return sampled

    def prepare_guesses(
        self, body: Body[Tensor], inputs: "ModelInputs", caches: tuple[KVCache, ...]
    ) -> _Recorded[Passes]:
        """Record a pass of ``guess`` for the number of sequences of these inputs, unless it is recorded."""

        def guessing(
            source: Tensor, inputs: "ModelInputs", caches: tuple[KVCache, ...], begin_layer: Callable[[], None]
        ) -> Passes:
            sampled = greedy(body(source, inputs, caches, begin_layer))
            (group,) = inputs.groups
            changed = PassInputs(
                token_ids=source,
                positions=inputs.positions,
                slots=group.slots,
                plan=cast("CpuPlan", group.plan),
            )
            passes = _new_passes(source.shape[0])
            feed_back(sampled, changed, passes)
            return passes

        return self.prepare("guesses", guessing, inputs.token_ids, inputs, caches)

    def _record(self, body: Body[_Result], source: Tensor, inputs: "ModelInputs") -> _Recorded[_Result]:
        # These need numba, which a machine with a GPU may lack.
        from quire_kernels.cpu_runtime import LayerMemory, new_tensor, recorded
        from quire_kernels.paged_attention.cpu_plan import PartialResults

        def place_for(tensor: Tensor) -> Tensor:
            return new_tensor(tuple(tensor.shape), tensor.dtype)

        if self._memory is None:
            self._memory = LayerMemory()
            self._partials = [PartialResults() for _ in inputs.groups]
        own = place_for(source)
        groups = tuple(
            replace(group, slots=place_for(group.slots), plan=cast("CpuPlan", group.plan).for_recording(partials))
            for group, partials in zip(inputs.groups, self._partials, strict=True)
        )
        placed = replace(inputs, positions=place_for(inputs.positions), groups=groups)
        with recorded(self._memory) as recording:
            result = body(own, placed, self._caches, self._memory.next_layer)
        self.made += 1
        return _Recorded(recording=recording, source=own, inputs=placed, result=result)


def _new_passes(rows: int) -> Passes:
    from quire_kernels.cpu_runtime import new_tensor

    return Passes(
        done=new_tensor((1,), torch.int64),
        slots=new_tensor((_MOST_PASSES, rows), torch.int64),
        sampled=new_tensor((_MOST_PASSES, rows), torch.int64),
    )


def passes_at_once(inputs: "ModelInputs") -> int:
    """Return the most passes of ``Recordings.guess`` that may begin with these inputs."""
    (group,) = inputs.groups
    return min(_MOST_PASSES, cast("CpuPlan", group.plan).lasts)
