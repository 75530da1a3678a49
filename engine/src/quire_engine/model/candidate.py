"""A model folder that was found servable, before its weights are read: by a native family, or by transformers.

To the runner both are a shape now and a ``CausalLM`` later; ``loader`` decides between them.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from quire_engine.model.family import CausalLM
from quire_engine.model.linear import LinearBackend
from quire_engine.model.shape import ModelShape

ModelImpl = Literal["auto", "native", "transformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    model: CausalLM
    weight_bytes: int
    bytes_per_weight: int
    """Of those that are multiplied by."""
    looked_up_bytes: int
    """Of these: tables of which rows are looked up, while everything else is multiplied by."""
    seconds: float
    """From nothing to the whole model."""
    packing_seconds: float = 0.0
    """Of these: making layers of tensors that were read, where the two can be told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    load_format: Literal["safetensors", "dummy"]
    seed: int
    dtype: torch.dtype
    backend: LinearBackend
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the weights will lie."""


class Candidate(Protocol):
    @property
    def shape(self) -> ModelShape: ...

    @property
    def served_by(self) -> str:
        """What runs the layers, for the log: ``quire's llama family`` or ``transformers' GPT2LMHeadModel``."""
        ...

    @property
    def is_native(self) -> bool:
        """Whether every layer is one of ours, of which we know that it neither waits for the device nor mixes rows."""
        ...

    def limited_to(self, longest: int) -> "Candidate":
        """The same for sequences of at most so many tokens."""
        ...

    def build(self, options: BuildOptions) -> BuiltModel:
        """Reads the weights. Raises ModelFolderError."""
        ...
