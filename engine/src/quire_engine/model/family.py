"""What a family of models is to the rest: which tensors its checkpoints hold, and how to build a model of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire_engine.model.config import ModelConfig
from quire_engine.model.layers import ModelInputs
from quire_engine.model.linear import LinearBackend
from quire_kernels.kv_cache import KVCache

ReadTensor = Callable[[str], Tensor]
"""The checkpoint's tensor of that name, checked, in the model's dtype."""


class CausalLM(Protocol):
    def __call__(self, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> Tensor:
        """Logits [R, V]; reads and writes each layer's cache."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Functions, not classes: a family differs in names and shapes, and in how it puts shared layers together."""

    tensor_shapes: Callable[[ModelConfig], Mapping[str, tuple[int, ...]]]
    """Every tensor that a checkpoint must hold."""

    is_ignorable: Callable[[ModelConfig, str], bool]
    """Whether a tensor beyond those may be passed over: one that is computed, or a copy of another."""

    build: Callable[[ModelConfig, ReadTensor, LinearBackend, int], CausalLM]
    """(config, read, backend, positions): reads each tensor once, layer by layer."""
