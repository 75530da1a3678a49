"""Decoder-only families with one structure and variations: their tensors, and their construction from ``Traits``.

A family's own row states only its differences. What varies between checkpoints of one family (sizes, windows, tied
embeddings) is in ``ModelConfig`` instead.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire_engine.model.adapters.layout import JoinedLinear, LinearName
from quire_engine.model.config import ModelConfig
from quire_engine.model.divided import (
    DividedDecoder,
    DividedEmbedding,
    DividedHead,
    Links,
    SummedExperts,
    SummedLinear,
)
from quire_engine.model.expert_tensors import (
    expert_shapes,
    read_down,
    read_gate_and_up,
    read_router,
    read_stacked,
)
from quire_engine.model.experts import ExpertNames, ExpertsConfig
from quire_engine.model.families import FAMILIES, Traits
from quire_engine.model.family import ReadTensor
from quire_engine.model.layers import (
    Attention,
    DecoderLayer,
    DecoderStack,
    GatedMlp,
    Norm,
    PackedExperts,
    SparseMlp,
    StackedExperts,
)
from quire_engine.model.linear import Linear, LinearBackend
from quire_engine.model.linear.backends import DeterministicLinearBackend
from quire_engine.model.model_part import ModelPart, Split
from quire_engine.model.rope import LongRopeScaling, RopeConfig
from quire_engine.model.rope_frequencies import rotation, takes_long_factors
from quire_engine.model.tensor_splits import tensor_split
from quire_engine.model.weights import TensorSource, are_equal, in_own_memory
from quire_kernels.dispatch import runs_triton
from quire_kernels.moe import Routes
from quire_kernels.store_kv import rotary_table

_log = logging.getLogger(__name__)
_EMBEDDING, _NORM, _LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class Family:
    """A family of decoders: the tensors of its checkpoints, and the construction of a model from them."""

    traits: Traits

    def tensor_shapes(self, config: ModelConfig, names: Collection[str]) -> Mapping[str, tuple[int, ...]]:
        """Return the tensors that a checkpoint with these names must contain.

        The names select the layout of experts; without names, it is the usual one.
        """
        traits = self.traits
        hidden = config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden), _NORM: (hidden,)}
        if config.has_lm_head and not config.tie_word_embeddings:
            shapes[_LM_HEAD] = (config.vocab_size, hidden)
        for index in range(config.num_layers):
            layer, experts = f"model.layers.{index}", _experts(config, index)
            for name, shape in layer_shapes(traits, config).items():
                if experts is None or not name.startswith("mlp."):
                    shapes[f"{layer}.{name}"] = shape
            if experts is not None and traits.experts is not None:
                shapes |= expert_shapes(traits.experts, experts, hidden, layer, names)
        return shapes

    def is_ignorable(self, config: ModelConfig, name: str) -> bool:
        """Return whether another tensor may be ignored, because it is computed or a copy."""
        return name.endswith(".rotary_emb.inv_freq") or (
            name == _LM_HEAD and (config.tie_word_embeddings or not config.has_lm_head)
        )

    def build(
        self, config: ModelConfig, read: ReadTensor, backend: LinearBackend, positions: int, links: Links | None
    ) -> DecoderStack | DividedDecoder:
        """Read each tensor once, layer by layer, and return the model.

        With ``links``, ``config`` and ``read`` are those of a rank's part of it.
        """
        traits = self.traits
        if links is not None:
            return _build_part(traits, config, read, backend, positions, links)
        embedding = in_own_memory(read(_EMBEDDING))
        layers = build_layers(traits, config, read, backend, positions, embedding.device)
        scale = _embedding_scale(traits, config, embedding.dtype)
        norm = _norm(traits, config, read, _NORM)
        lm_head = None
        if config.has_lm_head:
            lm_head = backend.pack(embedding if config.tie_word_embeddings else read(_LM_HEAD), None)
        return DecoderStack(
            embedding=embedding,
            layers=layers,
            norm=norm,
            lm_head=lm_head,
            embedding_scale=scale,
            logit_soft_cap=config.logit_soft_cap,
        )

    def split(self, config: ModelConfig, part: ModelPart, name: str) -> Split | None:
        """Return the share of a tensor that a rank reads; None means all of it."""
        return tensor_split(self.traits, config, part, name)


def find_family(architecture: str) -> Family:
    return Family(FAMILIES[architecture].traits)


def has_own_lm_head(source: TensorSource, dtype: torch.dtype) -> bool:
    """Return whether a checkpoint has an LM head that is not a copy of its embedding."""
    return {_EMBEDDING, _LM_HEAD} <= source.shapes().keys() and not are_equal(source, _EMBEDDING, _LM_HEAD, dtype)


def _experts(config: ModelConfig, index: int) -> ExpertsConfig | None:
    return config.experts if config.experts is not None and config.experts.in_layer[index] else None


def layer_shapes(traits: Traits, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of a layer without experts, by name within the layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {f"self_attn.{name}": (rows, hidden) for name, rows in zip(_QKV, (q, kv, kv), strict=True)}
    projections |= {f"mlp.{name}": (inner, hidden) for name in _GATE_UP}
    if traits.fused:
        projections = {"self_attn.qkv_proj": (q + 2 * kv, hidden), "mlp.gate_up_proj": (2 * inner, hidden)}
    projections |= {"self_attn.o_proj": (hidden, q), "mlp.down_proj": (hidden, inner)}
    norms = _layer_norms(traits)
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in norms if name is not None}
    if traits.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    for name, shape in projections.items():
        shapes[f"{name}.weight"] = shape
        if _has_bias(traits, config, name):
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def joined_linears(config: ModelConfig) -> tuple[JoinedLinear, ...]:
    """Return the linear layers that can have adapters: all but those of experts, the embedding and the LM head."""
    traits = FAMILIES[config.architecture].traits
    shapes = layer_shapes(traits, config)
    parts: tuple[tuple[LinearName, str, tuple[str, ...]], ...] = (
        ("qkv", "self_attn", ("qkv_proj",) if traits.fused else _QKV),
        ("out", "self_attn", ("o_proj",)),
        ("gate_up", "mlp", ("gate_up_proj",) if traits.fused else _GATE_UP),
        ("down", "mlp", ("down_proj",)),
    )
    return tuple(
        JoinedLinear(
            layer=index,
            name=name,
            modules=tuple(f"model.layers.{index}.{part}.{module}" for module in modules),
            outputs=tuple(shapes[f"{part}.{module}.weight"][0] for module in modules),
            inputs=shapes[f"{part}.{modules[0]}.weight"][1],
        )
        for index in range(config.num_layers)
        for name, part, modules in parts
        if part != "mlp" or _experts(config, index) is None
    )


class _LayerNorms(NamedTuple):
    """The names of the norms over the hidden size, in the order in which they are applied."""

    attention: str
    attention_out: str | None
    mlp: str
    mlp_out: str | None


def _layer_norms(traits: Traits) -> _LayerNorms:
    after = "post_attention_layernorm"  # the norm of the attention's output, or of the feed-forward layers' input
    if traits.norm_outputs:
        return _LayerNorms("input_layernorm", after, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return _LayerNorms("input_layernorm", None, after, None)


def _has_bias(traits: Traits, config: ModelConfig, projection: str) -> bool:
    if projection.startswith("mlp."):
        return config.mlp_bias
    if traits.qkv_bias:
        return projection != "self_attn.o_proj"
    return config.attention_bias


def build_layers(
    traits: Traits,
    config: ModelConfig,
    read: ReadTensor,
    backend: LinearBackend,
    positions: int,
    device: torch.device,
    links: Links | None = None,
) -> tuple[DecoderLayer, ...]:
    """Read and return the layers of a model, for sequences of at most ``positions`` tokens.

    The tensors of a part have the names of the whole model.
    """
    first = 0 if links is None else links.part.layers(config.num_layers * links.part.stages)[0]
    tables = {
        rope: _rotary_table(rope, config.rotary_dim, positions).to(device) for rope in dict.fromkeys(config.ropes)
    }
    return tuple(
        _build_layer(traits, config, index, f"model.layers.{first + index}", read, backend, tables[rope], links)
        for index, rope in enumerate(config.ropes)
    )


def _build_part(
    traits: Traits, config: ModelConfig, read: ReadTensor, backend: LinearBackend, positions: int, links: Links
) -> DividedDecoder:
    """Return the part of one rank. Its tensors have the names of the whole model, its layers count from 0."""
    part = links.part
    shares = [part.share_of(rank, config.vocab_size) for rank in range(part.tensor_size)]
    table = in_own_memory(read(_EMBEDDING)) if part.is_first or config.tie_word_embeddings and part.is_last else None
    embedding = None
    if part.is_first:
        assert table is not None
        embedding = DividedEmbedding(
            weight=table,
            first=shares[part.tensor_rank][0],
            all_reduce=links.tensor.all_reduce,
            scale=_embedding_scale(traits, config, table.dtype),
        )
    # Only CPUs have stages, of which the first alone has a table.
    device = torch.device("cpu") if table is None else table.device
    layers = build_layers(traits, config, read, backend, positions, device, links)
    head = None
    if part.is_last:
        weight = table if config.tie_word_embeddings else read(_LM_HEAD)
        assert weight is not None
        head = DividedHead(
            norm=_norm(traits, config, read, _NORM),
            lm_head=backend.pack(weight, None),
            widths=tuple(end - begin for begin, end in shares),
            group=links.tensor,
            soft_cap=config.logit_soft_cap,
        )
    return DividedDecoder(
        hidden_size=config.hidden_size,
        embedding=embedding,
        before=links.before,
        layers=layers,
        after=links.after,
        head=head,
    )


def _embedding_scale(traits: Traits, config: ModelConfig, dtype: torch.dtype) -> float | None:
    """Return the factor of embeddings, rounded to their dtype as in training; None without a factor."""
    return float(torch.tensor(config.hidden_size**0.5, dtype=dtype)) if traits.scale_embedding else None


def _rotary_table(rope: RopeConfig, rotary_dim: int, positions: int) -> Tensor:
    longest = positions - 1
    if isinstance(rope.scaling, LongRopeScaling):
        _log.info(
            "longrope: %s factors for every sequence: the longest may have %d tokens, the original length is %d",
            "long" if takes_long_factors(rope.scaling, longest) else "short",
            longest,
            rope.scaling.original_max_position_embeddings,
        )
    found = rotation(rope, rotary_dim, longest)
    return rotary_table(torch.tensor(found.frequencies, dtype=torch.float64), positions, found.magnitude)  # [P, DR]


def _norm(traits: Traits, config: ModelConfig, read: ReadTensor, tensor: str) -> Norm:
    weight = read(tensor)
    return Norm(weight=weight + traits.norm_offset if traits.norm_offset else weight, eps=config.rms_norm_eps)


def _build_layer(
    traits: Traits,
    config: ModelConfig,
    index: int,
    prefix: str,
    read: ReadTensor,
    backend: LinearBackend,
    cos_sin: Tensor,
    links: Links | None,
) -> DecoderLayer:
    """Return layer ``index`` of ``config``, whose tensors begin with ``prefix``."""

    def linear(part: str, names: tuple[str, ...]) -> Linear:
        """Return one layer for several projections of the same input; their outputs are concatenated."""
        weight = torch.cat([read(f"{prefix}.{part}.{name}.weight") for name in names])
        biased = _has_bias(traits, config, f"{part}.{names[0]}")
        joined = torch.cat([read(f"{prefix}.{part}.{name}.bias") for name in names]) if biased else None
        return backend.pack(weight, joined)

    def summed(part: str, name: str) -> Linear:
        """Return a layer that is divided by its inputs, if the model is divided."""
        whole = linear(part, (name,))
        return whole if links is None or links.part.tensor_size == 1 else SummedLinear(whole, links.tensor.all_reduce)

    def norm(name: str) -> Norm:
        return _norm(traits, config, read, f"{prefix}.{name}.weight")

    def dense_mlp() -> GatedMlp:
        return GatedMlp(
            gate_up=linear("mlp", ("gate_up_proj",) if traits.fused else _GATE_UP),
            down=summed("mlp", "down_proj"),
            gelu=traits.gelu,
        )

    experts = _experts(config, index)
    names = _layer_norms(traits)
    return DecoderLayer(
        attention_norm=norm(names.attention),
        attention=Attention(
            qkv=linear("self_attn", ("qkv_proj",) if traits.fused else _QKV),
            out=summed("self_attn", "o_proj"),
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            cos_sin=cos_sin,
            q_norm=norm("self_attn.q_norm") if traits.qk_norm else None,
            k_norm=norm("self_attn.k_norm") if traits.qk_norm else None,
            group=config.kv_groups.index(config.windows[index]),
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
        ),
        attention_out_norm=norm(names.attention_out) if names.attention_out else None,
        mlp_norm=norm(names.mlp),
        mlp=dense_mlp() if experts is None else _build_experts(traits, experts, prefix, read, backend, links),
        mlp_out_norm=norm(names.mlp_out) if names.mlp_out else None,
    )


def _build_experts(
    traits: Traits,
    config: ExpertsConfig,
    layer: str,
    read: ReadTensor,
    backend: LinearBackend,
    links: Links | None,
) -> SparseMlp:
    names = traits.experts
    assert names is not None, "a config with experts belongs to a family that has them"
    router = read_router(names, layer, read)
    experts: Callable[[Tensor, Routes], Tensor]
    if runs_triton(router.device.type):
        deterministic = isinstance(backend, DeterministicLinearBackend)
        experts = _stack_experts(traits.gelu, names, config, layer, read, deterministic=deterministic)
    else:
        experts = _pack_experts(traits.gelu, names, config, layer, read, backend)
    if links is not None:
        experts = SummedExperts(experts, links.tensor.all_reduce)
    return SparseMlp(
        router=backend.pack(router, None, precise=True),
        experts=experts,
        per_token=config.experts_per_token,
        normalise=config.normalise_weights,
    )


def _stack_experts(
    gelu: bool, names: ExpertNames, config: ExpertsConfig, layer: str, read: ReadTensor, *, deterministic: bool
) -> StackedExperts:
    gate_up, down = read_stacked(names, layer, config.num_experts, read)
    return StackedExperts(gate_up=gate_up, down=down, gelu=gelu, deterministic=deterministic)


def _pack_experts(
    gelu: bool, names: ExpertNames, config: ExpertsConfig, layer: str, read: ReadTensor, backend: LinearBackend
) -> PackedExperts:
    """Build the experts one after the other; each is packed before the next one is read."""

    def expert(index: int) -> GatedMlp:
        return GatedMlp(
            gate_up=backend.pack(torch.cat(read_gate_and_up(names, layer, index, read)), None),
            down=backend.pack(read_down(names, layer, index, read), None),
            gelu=gelu,
        )

    return PackedExperts(experts=tuple(expert(index) for index in range(config.num_experts)))
