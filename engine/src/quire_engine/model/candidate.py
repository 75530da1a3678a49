"""A servable model folder before its weights are read, for a native family or for transformers.

For the runner both are first a shape and later a ``CausalLM``; ``loader`` selects one.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from quire_engine.model.divided import Links
from quire_engine.model.family import CausalLM
from quire_engine.model.kv_scales import KVScales
from quire_engine.model.linear import LinearBackend
from quire_engine.model.shape import ModelShape

ModelImpl = Literal["auto", "native", "transformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    model: CausalLM
    weight_bytes: int
    bytes_per_weight: int
    """The bytes per weight that is multiplied."""
    looked_up_bytes: int
    """The bytes of lookup tables within ``weight_bytes``; all other weights are multiplied."""
    seconds: float
    """The seconds for the whole construction."""
    packing_seconds: float = 0.0
    """The seconds of packing within ``seconds``, if it can be measured separately."""
    kv_scales: tuple[KVScales, ...] = ()
    """The scales of each layer for a float8 KV cache, if the checkpoint has any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    load_format: Literal["safetensors", "dummy"]
    seed: int
    dtype: torch.dtype
    backend: LinearBackend
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """The device of the weights."""
    links: Links | None = None
    """The connections to the other ranks, for a candidate that is a part of a model."""


class Candidate(Protocol):
    @property
    def shape(self) -> ModelShape: ...

    @property
    def served_by(self) -> str:
        """The code of the layers, for the log: ``quire's llama family`` or ``transformers' GPT2LMHeadModel``."""
        ...

    @property
    def is_native(self) -> bool:
        """True if every layer is native: such layers neither wait for the device nor mix rows."""
        ...

    def limited_to(self, longest: int) -> "Candidate":
        """Return the same candidate for sequences of at most ``longest`` tokens."""
        ...

    def build(self, options: BuildOptions) -> BuiltModel:
        """Read the weights and return the model. Raise ModelFolderError."""
        ...
