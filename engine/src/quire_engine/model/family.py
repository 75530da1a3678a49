"""The interface of a family of models: the tensors of its checkpoints, and the construction of a model from them."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from quire_engine.model.config import ModelConfig
from quire_engine.model.divided import Links
from quire_engine.model.layers import ModelInputs
from quire_engine.model.linear import LinearBackend
from quire_engine.model.model_part import ModelPart, Split
from quire_kernels.kv_cache import KVCache


class ReadTensor(Protocol):
    @property
    def names(self) -> Collection[str]:
        """The names of all tensors in the checkpoint."""
        ...

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family as functions, not classes: families differ in names, shapes and the combination of shared layers."""

    tensor_shapes: Callable[[ModelConfig, Collection[str]], Mapping[str, tuple[int, ...]]]
    """(config, names): the tensors that a checkpoint with these names must contain. The names select the layout if a
    family's checkpoints have several; without names, it is the usual one."""

    is_ignorable: Callable[[ModelConfig, str], bool]
    """(config, name): return whether another tensor may be ignored, because it is computed or a copy."""

    build: Callable[[ModelConfig, ReadTensor, LinearBackend, int, Links | None], CausalLM]
    """(config, read, backend, positions, links): read each tensor once, layer by layer, and return the model. With
    ``links``, ``config`` and ``read`` are those of a rank's part of it."""

    split: Callable[[ModelConfig, ModelPart, str], Split | None]
    """(config, part, name): return the share of a tensor that a rank reads; None means all of it."""
