"""A model in stages of one layer each gives the same tokens as transformers in float32, for every native family.

The stages run one after the other in this process; ``test_tensor_parallel`` runs some in processes of their own.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from quire_parity.native import CASES
from quire_parity.schedules import SCHEDULES
from torch import Tensor

from quire_engine.model.candidate import BuildOptions, BuiltModel
from quire_engine.model.divided import Links, OneRank
from quire_engine.model.family import CausalLM
from quire_engine.model.layers import ModelInputs
from quire_engine.model.loader import NativeCandidate
from quire_engine.model.model_part import ModelPart
from quire_kernels.kv_cache import KVCache


class Handover:
    """The connection between two stages."""

    def __init__(self) -> None:
        self._residual: Tensor | None = None

    def send(self, residual: Tensor) -> None:
        assert self._residual is None
        self._residual = residual

    def receive(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        residual, self._residual = self._residual, None
        assert residual is not None and residual.shape == (rows, columns) and residual.dtype == dtype
        return residual


@dataclass(frozen=True, slots=True)
class Stages:
    """A model whose stages each have one layer."""

    stages: list[CausalLM]

    def __call__(self, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> Tensor:
        for stage, cache in zip(self.stages, caches, strict=True):
            logits = stage(inputs, (cache,))
        return logits


@pytest.fixture
def in_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every model be built in stages, which together have its weights and no others."""
    whole = NativeCandidate.build

    def build(candidate: NativeCandidate, options: BuildOptions) -> BuiltModel:
        count = candidate.shape.num_layers
        between = [None, *(Handover() for _ in range(count - 1)), None]
        built = []
        for stage in range(count):
            part = ModelPart(stage=stage, stages=count)
            links = Links(part=part, tensor=OneRank(), before=between[stage], after=between[stage + 1])
            built.append(whole(candidate.divided(part), replace(options, links=links)))
        alone = whole(candidate, options)
        # The last stage multiplies by the embedding's table where both are the same.
        twice = candidate.shape.vocab_size * candidate.shape.hidden_size * options.dtype.itemsize
        shared = twice if candidate.shape.tie_word_embeddings and not options.backend.copies else 0
        assert sum(stage.weight_bytes for stage in built) == alone.weight_bytes + shared
        return replace(alone, model=Stages([stage.model for stage in built]))

    monkeypatch.setattr(NativeCandidate, "build", build)


@pytest.mark.parametrize("name", CASES)
def test_each_family_gives_the_same_tokens_in_stages(name: str, parity: Any, in_stages: None) -> None:
    parity.check(CASES[name], SCHEDULES["prefix hits"])
