"""The families of models that quire runs natively: one row for each architecture of config.json.

A row describes how the configuration is read, which layers there are, and which larger models contain the family as
their text part. A family that needs nothing new from ``decoder`` is added here only. This module needs no torch.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_engine.model.dialect import (
    Dialect,
    all_but_every_nth_window,
    every_other_window,
    local_and_global_rope,
    one_rope,
    one_window,
    one_window_unless_null,
    same_window_if_used,
    window_if_used,
)
from quire_engine.model.experts import ExpertNames, mixtral_experts, qwen3_moe_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The differences between a family and Llama."""

    qkv_bias: bool = False
    """Queries, keys and values have a bias and the output projection has none, independently of the config."""
    qk_norm: bool = False
    """Each head's queries and keys are normalized before the rotation."""
    fused: bool = False
    """The checkpoint stores queries, keys and values as one tensor, and gate and up as one."""
    norm_outputs: bool = False
    """The outputs of attention and feed-forward layers are normalized before they are added to the residual stream."""
    norm_offset: float = 0.0
    """Added to the weights of every norm."""
    scale_embedding: bool = False
    """Embeddings are multiplied by the square root of the hidden size."""
    gelu: bool = False
    """The feed-forward layers' gate uses gelu (with tanh), else silu."""
    experts: ExpertNames | None = None
    """The names of experts, for layers that have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeFamily:
    """A family: its configuration, its layers, and the larger models that contain it."""

    dialect: Dialect = field(default_factory=Dialect)
    traits: Traits
    text_part_of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The values that checkpoints of a larger model leave out of ``text_config``, by its architecture."""


_GELU = ("hidden_activation", "gelu_pytorch_tanh")
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
FAMILIES: Mapping[str, NativeFamily] = {
    # Gemma 2: norms before and after each part, scaled embeddings, soft caps, windows in every other layer.
    "Gemma2ForCausalLM": NativeFamily(
        dialect=Dialect(
            windows=every_other_window,
            head_dim=256,
            tie_word_embeddings=True,
            activation=_GELU,
            query_scalar=256,
            caps_attention=True,
            caps_logits=True,
            attention_soft_cap=50.0,
            logit_soft_cap=30.0,
        ),
        traits=Traits(norm_outputs=True, norm_offset=1.0, scale_embedding=True, gelu=True),
    ),
    # Gemma 3: Gemma 2 with normalized queries and keys for soft caps, and a rotation within windows.
    "Gemma3ForCausalLM": NativeFamily(
        dialect=Dialect(
            windows=all_but_every_nth_window,
            head_dim=256,
            tie_word_embeddings=True,
            activation=_GELU,
            query_scalar=256,
            caps_logits=True,
            parse_ropes=local_and_global_rope,
        ),
        traits=Traits(qk_norm=True, norm_outputs=True, norm_offset=1.0, scale_embedding=True, gelu=True),
        text_part_of={"Gemma3ForConditionalGeneration": _GEMMA3_DEFAULTS},
    ),
    # Llama: pre-norm, rotary positions, grouped-query attention, SwiGLU; biases where the config says so.
    "LlamaForCausalLM": NativeFamily(
        traits=Traits(),
    ),
    # Mistral: Llama whose layers may have a sliding window.
    "MistralForCausalLM": NativeFamily(
        dialect=Dialect(windows=one_window_unless_null),
        traits=Traits(),
        text_part_of={"Mistral3ForConditionalGeneration": {"tie_word_embeddings": True}},
    ),
    # Mixtral: Mistral with a mixture of experts in every layer.
    "MixtralForCausalLM": NativeFamily(
        dialect=Dialect(
            windows=one_window,
            rms_norm_eps=1e-5,
            parse_ropes=functools.partial(one_rope, default_theta=1e6),
            parse_experts=mixtral_experts,
        ),
        traits=Traits(experts=ExpertNames(part="block_sparse_moe", gate="w1", up="w3", down="w2")),
    ),
    # Phi-3 and Phi-4: checkpoints join projections of one input; part of a head may stay unrotated.
    "Phi3ForCausalLM": NativeFamily(
        dialect=Dialect(windows=one_window, partial_rotary=True, rms_norm_eps=1e-5),
        traits=Traits(fused=True),
    ),
    # Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values.
    "Qwen2ForCausalLM": NativeFamily(
        dialect=Dialect(windows=window_if_used),
        traits=Traits(qkv_bias=True),
        text_part_of=dict.fromkeys(
            ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
            {"rope_theta": 1e6, "rms_norm_eps": 1e-5},
        ),
    ),
    # Qwen3: Llama whose queries and keys are normalized per head before they are rotated.
    "Qwen3ForCausalLM": NativeFamily(
        dialect=Dialect(windows=window_if_used, head_dim=128),
        traits=Traits(qk_norm=True),
        text_part_of={"Qwen3VLForConditionalGeneration": {"rope_theta": 5e5}},
    ),
    # Qwen3-MoE: Qwen3 with a mixture of experts in most layers.
    "Qwen3MoeForCausalLM": NativeFamily(
        dialect=Dialect(windows=same_window_if_used, parse_experts=qwen3_moe_experts),
        traits=Traits(qk_norm=True, experts=ExpertNames(part="mlp", gate="gate_proj", up="up_proj", down="down_proj")),
    ),
}
SUPPORTED = tuple(sorted(FAMILIES))


def find_dialect(architecture: str) -> Dialect:
    """Return the dialect of an architecture's config.json; an unknown one is read like Llama."""
    family = FAMILIES.get(architecture)
    return Dialect() if family is None else family.dialect
