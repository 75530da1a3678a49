"""The interfaces of a model to the runner, and of a checkpoint to the construction of a model."""

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from torch import Tensor

from quire_engine.model.layers import ModelInputs
from quire_kernels.kv_cache import KVCache


class ReadTensor(Protocol):
    @property
    def names(self) -> Collection[str]: ...

    def __call__(self, name: str, part: int | None = None) -> Tensor:
        """Return the named tensor, checked and in the model's dtype, or read only one part of its first dimension."""
        ...


class CausalLM(Protocol):
    def __call__(self, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> Tensor:
        """Return logits [R, V]; read and write each layer's cache."""
        ...


@runtime_checkable
class CapturableLM(CausalLM, Protocol):
    """A model whose steps can be captured as CUDA graphs, in two parts: only the first one is in the graph."""

    def hidden_states(self, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> Tensor:
        """Return the hidden states [R, H] of ``inputs.logits_rows``."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, V] of hidden states [R, H]."""
        ...
