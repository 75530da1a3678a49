"""A model folder that was found servable, before its weights are read: by a native family, or by transformers.

A native family goes first wherever there is one. Which it is, is said here and nowhere else: to the runner both are a
shape now and a ``CausalLM`` later.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch

from quire_engine.errors import ModelFolderError
from quire_engine.model.family import CausalLM
from quire_engine.model.linear import LinearBackend
from quire_engine.model.registry import SUPPORTED
from quire_engine.model.shape import ModelShape
from quire_engine.model.text_part import text_config
from quire_engine.model_folder import NO_OVERRIDES, ConfigOverrides, read_config

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


def find_candidate(
    folder: Path, *, impl: ModelImpl, trust_remote_code: bool, overrides: ConfigOverrides = NO_OVERRIDES
) -> Candidate:
    """Raises ModelFolderError with the reasons why the folder cannot be served."""
    if impl == "transformers" or (impl == "auto" and not _is_native(folder, overrides)):
        from quire_engine.model.transformers_backend.candidate import find_transformers_candidate

        return find_transformers_candidate(folder, trust_remote_code=trust_remote_code, overrides=overrides)
    from quire_engine.model.loader import find_native_candidate

    return find_native_candidate(folder, overrides)


def _is_native(folder: Path, overrides: ConfigOverrides) -> bool:
    """Whether there is a family by the architecture's name; what cannot be read is the native loader's to refuse."""
    try:
        raw = read_config(folder, overrides)
    except ModelFolderError:
        return True
    architectures = (text_config(raw) or raw).get("architectures")
    return isinstance(architectures, list) and any(name in SUPPORTED for name in architectures)
