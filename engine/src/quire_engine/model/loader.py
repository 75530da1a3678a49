"""From a model folder to a model that runs: configuration, checked weights, packed layers, and how long it took."""

import logging
import time
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from quire_engine.model.config import ModelConfig
from quire_engine.model.family import CausalLM
from quire_engine.model.linear import LinearBackend
from quire_engine.model.registry import find_family
from quire_engine.model.weights import RandomWeights, TensorSource, check_tensors, open_checkpoint

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    model: CausalLM
    weight_bytes: int
    seconds: float


def build_model(
    folder: Path,
    config: ModelConfig,
    *,
    load_format: Literal["safetensors", "dummy"],
    seed: int,
    dtype: torch.dtype,
    backend: LinearBackend,
    positions: int,
) -> BuiltModel:
    """Reads the weights layer by layer, each cast to ``dtype`` and packed before the next is read.

    positions  how many positions of rotary angles to prepare: the longest sequence
    Raises ModelFolderError.
    """
    started = time.perf_counter()
    family = find_family(config.architecture)
    source: TensorSource
    if load_format == "dummy":
        source = RandomWeights(family.tensor_shapes(config), torch.Generator().manual_seed(seed))
    else:
        source = open_checkpoint(folder)
    expected = check_tensors(family, config, source.shapes(), str(folder))

    def read(name: str) -> Tensor:
        return source.read(name).to(dtype)

    model = family.build(config, read, backend, positions)
    weight_bytes = sum(prod(shape) for shape in expected.values()) * dtype.itemsize
    seconds = time.perf_counter() - started
    _log.info(
        "loaded %s: %d tensors, %.1f MB as %s in %.2f s (%.0f MB/s)",
        folder.name,
        len(expected),
        weight_bytes / 1e6,
        backend.weights,
        seconds,
        weight_bytes / 1e6 / seconds,
    )
    return BuiltModel(model=model, weight_bytes=weight_bytes, seconds=seconds)
