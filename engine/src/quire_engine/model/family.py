"""What a family of models is to the rest: which tensors its checkpoints hold, and how to build a model of them."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire_engine.model.config import ModelConfig
from quire_engine.model.layers import ModelInputs
from quire_engine.model.linear import LinearBackend
from quire_kernels.kv_cache import KVCache


class ReadTensor(Protocol):
    @property
    def names(self) -> Collection[str]:
        """Of all tensors that the checkpoint holds."""
        ...

    def __call__(self, name: str, part: int | None = None) -> Tensor:
        """The checkpoint's tensor of that name, checked, in the model's dtype; or one part along its first dimension,
        and no more than that is read."""
        ...


class CausalLM(Protocol):
    def __call__(self, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> Tensor:
        """Logits [R, V]; reads and writes each layer's cache."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Functions, not classes: a family differs in names and shapes, and in how it puts shared layers together."""

    tensor_shapes: Callable[[ModelConfig, Collection[str]], Mapping[str, tuple[int, ...]]]
    """(config, names): every tensor that a checkpoint must hold which has tensors of these names. They matter where
    a family's checkpoints come in several layouts; of no names, it is the usual one."""

    is_ignorable: Callable[[ModelConfig, str], bool]
    """Whether a tensor beyond those may be passed over: one that is computed, or a copy of another."""

    build: Callable[[ModelConfig, ReadTensor, LinearBackend, int], CausalLM]
    """(config, read, backend, positions): reads each tensor once, layer by layer."""
