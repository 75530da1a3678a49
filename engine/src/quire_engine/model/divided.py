"""The layers of one rank's part of a model: sums over the ranks that share a layer, stages, and the model's two ends.

Legend: T tokens, R rows of logits, H hidden size, V vocabulary, W the rank's share of the vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from quire_engine.model.layers import DecoderLayer, ModelInputs, Norm, cap, normalise, rows_with_logits, run_layers
from quire_engine.model.linear import Linear
from quire_engine.model.model_part import ModelPart
from quire_engine.model.recordings import Recordings
from quire_kernels.kv_cache import KVCache
from quire_kernels.moe import Routes


class TensorGroup(Protocol):
    """The ranks that share each layer; all of them call the same operations in the same order."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the ranks, with the same bits on all of them; ``x`` may be changed."""
        ...

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Return the columns of all ranks on the first one; the result on other CPUs has no meaning."""
        ...


class OneRank:
    """The ``TensorGroup`` of a stage with one rank."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return x


class StageBefore(Protocol):
    """The connection to the stage that computes the layers before this one's."""

    def receive(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Wait for the residual stream [rows, columns] of the next step and return it."""
        ...


class StageAfter(Protocol):
    """The connection to the stage that computes the layers after this one's."""

    def send(self, residual: Tensor) -> None:
        """Send the residual stream of a step; ``residual`` is not changed afterwards."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """A rank's part of the model, and its connections to the other ranks."""

    part: ModelPart
    tensor: TensorGroup
    before: StageBefore | None = None
    """None on the first stage."""
    after: StageAfter | None = None
    """None on the last stage."""


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """A linear layer that is divided by its inputs: each rank has a part of the sum."""

    base: Linear
    all_reduce: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.all_reduce(self.base(x))


@dataclass(frozen=True, slots=True)
class SummedExperts:
    """Experts that are each divided by their intermediate size, summed over the ranks together."""

    base: Callable[[Tensor, Routes], Tensor]
    all_reduce: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        return self.all_reduce(self.base(x, routes))


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedEmbedding:
    """The rows of the embedding for a share of the vocabulary."""

    weight: Tensor  # [W, H]
    first: int
    """The first token of the share."""
    all_reduce: Callable[[Tensor], Tensor]
    scale: float | None

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [T, H] of ``token_ids`` [T]: one rank has each, and the others add 0."""
        places = token_ids - self.first
        inside = (places >= 0) & (places < self.weight.shape[0])
        found = functional.embedding(torch.where(inside, places, 0), self.weight)
        found.masked_fill_(~inside.unsqueeze(1), 0.0)
        found = self.all_reduce(found)
        return found if self.scale is None else found.mul_(self.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedHead:
    """The last norm, and the LM head for a share of the vocabulary."""

    norm: Norm
    lm_head: Linear  # H to W
    widths: tuple[int, ...]
    """The shares of all ranks."""
    group: TensorGroup
    soft_cap: float | None

    def __call__(self, addend: Tensor | None, residual: Tensor) -> Tensor:
        """Return the logits [R, V] on the first rank, and on every GPU; elsewhere they have no meaning.

        residual, addend  [R, H], what the layers leave
        """
        if residual.shape[0] == 0:
            return residual.new_empty((0, sum(self.widths)))
        logits = self.lm_head(normalise(addend, residual, self.norm))
        logits = logits if self.soft_cap is None else cap(logits, self.soft_cap)
        return self.group.gather(logits.contiguous(), self.widths)


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedDecoder:
    """One rank's part of a pre-norm decoder, a ``CausalLM`` whose logits exist on the first rank of the last stage.

    On GPUs they exist on all ranks.
    """

    hidden_size: int
    embedding: DividedEmbedding | None
    """None on all stages but the first."""
    before: StageBefore | None
    layers: tuple[DecoderLayer, ...]
    after: StageAfter | None
    head: DividedHead | None
    """None on all stages but the last."""
    recordings: Recordings = field(init=False, repr=False, compare=False, default_factory=Recordings)

    def __call__(self, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> Tensor:
        """Return the logits [R, V] of ``inputs.logits_rows`` on the first rank of the last stage.

        Other ranks of that stage return a tensor without meaning, and other stages an empty one.
        """
        if self.embedding is not None:
            residual = self.embedding(inputs.token_ids)
        else:
            assert self.before is not None
            weight = self.layers[0].mlp_norm.weight
            residual = self.before.receive(inputs.token_ids.shape[0], self.hidden_size, weight.dtype)
        if self.head is not None:
            rows = rows_with_logits(inputs)
            return self.head(*run_layers(self.layers, residual, inputs, caches, self.recordings, rows))
        addend, residual = run_layers(self.layers, residual, inputs, caches, self.recordings)
        assert self.after is not None and addend is not None
        # The next layer's norm would add and round in the same way, so that stages change no bit.
        self.after.send(residual + addend)
        return residual.new_empty((0, 0))
