"""The part of a model that one rank has: a share of every layer (tensor parallel), and some of the layers (pipeline).

Layers, heads and the inner sizes of feed-forward layers are divided evenly, the vocabulary as evenly as possible. A
rank has at least one KV head: if there are fewer than ranks, several ranks have the same one. The first stage has the
embedding, the last one the last norm and the LM head. This module needs no torch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from quire_engine.model.config import ModelConfig
from quire_engine.model.experts import ExpertsConfig

Span = tuple[int, int]
"""The first index and the one after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    tensor_rank: int = 0
    tensor_size: int = 1
    """The number of ranks that share each layer."""
    stage: int = 0
    stages: int = 1
    """The number of stages, which each have a part of the layers."""

    @property
    def is_first(self) -> bool:
        """True if this part begins with the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True if this part ends with the LM head."""
        return self.stage == self.stages - 1

    def layers(self, count: int) -> Span:
        """Return this stage's layers of a model with ``count`` layers."""
        return count * self.stage // self.stages, count * (self.stage + 1) // self.stages

    def share(self, count: int) -> Span:
        """Return this rank's share of ``count`` things that are divided as evenly as possible."""
        return self.share_of(self.tensor_rank, count)

    def share_of(self, rank: int, count: int) -> Span:
        """Return the share of another rank of the same layers."""
        return count * rank // self.tensor_size, count * (rank + 1) // self.tensor_size

    def kv_heads(self, count: int) -> Span:
        """Return this rank's KV heads, of which it has at least one."""
        if count >= self.tensor_size:
            return self.share(count)
        first = self.tensor_rank * count // self.tensor_size
        return first, first + 1


WHOLE_MODEL = ModelPart()


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The elements of a tensor that a rank reads, along one dimension."""

    dim: int
    """The dimension, counted without that of the experts if one tensor has all of them."""
    spans: tuple[Span, ...]
    """Several spans are concatenated: the parts of a tensor that joins projections."""
    is_zero: bool = False
    """True for a bias that another rank adds to the sum of all ranks: here it is 0."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the elements that the rank reads of a tensor, or of the tensors of all experts."""
        dim = self.dim + (len(whole) - 2 if len(whole) > 2 else 0)
        length = sum(end - begin for begin, end in self.spans)
        return (*whole[:dim], length, *whole[dim + 1 :])


def part_problems(config: ModelConfig, *, tensor: int, pipeline: int = 1) -> list[str]:
    """Return why a model cannot be divided among so many ranks; empty if it can."""
    problems = list(_tensor_problems(config, tensor))
    if config.num_layers % pipeline:
        fits = [size for size in range(1, config.num_layers + 1) if config.num_layers % size == 0]
        problems.append(
            f"--pipeline-parallel-size {pipeline} does not divide the model's {config.num_layers} layers"
            f" (num_hidden_layers): use {_in_words(fits)}"
        )
    return problems


def _tensor_problems(config: ModelConfig, tensor: int) -> Iterator[str]:
    flag = f"--tensor-parallel-size {tensor}"
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % tensor:
        yield f"{flag} does not divide the model's {heads} attention heads (num_attention_heads): use {_sizes(heads)}"
    elif kv_heads % tensor and tensor % kv_heads:
        yield (
            f"{flag} and the model's {kv_heads} KV heads (num_key_value_heads) do not divide each other: use"
            f" {_sizes(heads, kv_heads)}"
        )
    inner = {"intermediate_size": config.intermediate_size}
    if config.experts is not None:
        if all(config.experts.in_layer):
            inner.clear()
        inner["the intermediate size of an expert"] = config.experts.intermediate_size
    for name, size in inner.items():
        if size % tensor:
            yield f"{flag} does not divide {size} ({name})"


def _sizes(heads: int, kv_heads: int | None = None) -> str:
    fits = [
        size
        for size in range(1, heads + 1)
        if heads % size == 0 and (kv_heads is None or kv_heads % size == 0 or size % kv_heads == 0)
    ]
    return _in_words(fits)


def _in_words(sizes: list[int]) -> str:
    return f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])


def divided(config: ModelConfig, part: ModelPart) -> ModelConfig:
    """Return the configuration of one rank's part; the vocabulary and the hidden size stay those of the model."""
    first, last = part.kv_heads(config.num_kv_heads)
    begin, end = part.layers(config.num_layers)
    return replace(
        config,
        num_layers=end - begin,
        num_heads=config.num_heads // part.tensor_size,
        num_kv_heads=last - first,
        intermediate_size=config.intermediate_size // part.tensor_size,
        windows=config.windows[begin:end],
        all_groups=config.kv_groups,
        ropes=config.ropes[begin:end],
        experts=None if config.experts is None else _divided_experts(config.experts, part, begin, end),
        has_lm_head=config.has_lm_head and part.is_last,
    )


def _divided_experts(experts: ExpertsConfig, part: ModelPart, begin: int, end: int) -> ExpertsConfig:
    return replace(
        experts,
        intermediate_size=experts.intermediate_size // part.tensor_size,
        in_layer=experts.in_layer[begin:end],
    )


_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def is_in_part(config: ModelConfig, part: ModelPart, name: str) -> bool:
    """Return whether a part reads some of the tensor ``name`` of the whole model ``config``."""
    if (match := _LAYER.match(name)) is not None:
        begin, end = part.layers(config.num_layers)
        return begin <= int(match[1]) < end
    if name == "model.embed_tokens.weight":
        return part.is_first or (part.is_last and config.tie_word_embeddings)
    return part.is_last
