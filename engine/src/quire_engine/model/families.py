"""The families of models that quire runs natively: one row for each architecture of config.json.

A row describes how the configuration is read and which layers there are. ``quire_common.model_memory`` has the family's
windows and head dim, and the larger models that contain the family as their text part. A family that needs nothing new
from ``decoder`` is added in these two tables only. This module needs no torch.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire_engine.model.dialect import (
    Dialect,
    local_and_global_rope,
    one_rope,
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
    dialect: Dialect = field(default_factory=Dialect)
    traits: Traits


_GELU = ("hidden_activation", "gelu_pytorch_tanh")
FAMILIES: Mapping[str, NativeFamily] = {
    # Gemma 2: norms before and after each part, scaled embeddings, soft caps, windows in every other layer.
    "Gemma2ForCausalLM": NativeFamily(
        dialect=Dialect(
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
            activation=_GELU,
            query_scalar=256,
            caps_logits=True,
            parse_ropes=local_and_global_rope,
        ),
        traits=Traits(qk_norm=True, norm_outputs=True, norm_offset=1.0, scale_embedding=True, gelu=True),
    ),
    # Llama: pre-norm, rotary positions, grouped-query attention, SwiGLU; biases where the config says so.
    "LlamaForCausalLM": NativeFamily(
        traits=Traits(),
    ),
    # Mistral: Llama whose layers may have a sliding window.
    "MistralForCausalLM": NativeFamily(
        traits=Traits(),
    ),
    # Mixtral: Mistral with a mixture of experts in every layer.
    "MixtralForCausalLM": NativeFamily(
        dialect=Dialect(
            rms_norm_eps=1e-5,
            parse_ropes=functools.partial(one_rope, default_theta=1e6),
            parse_experts=mixtral_experts,
        ),
        traits=Traits(experts=ExpertNames(part="block_sparse_moe", gate="w1", up="w3", down="w2")),
    ),
    # Phi-3 and Phi-4: checkpoints join projections of one input; part of a head may stay unrotated.
    "Phi3ForCausalLM": NativeFamily(
        dialect=Dialect(partial_rotary=True, rms_norm_eps=1e-5),
        traits=Traits(fused=True),
    ),
    # Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values.
    "Qwen2ForCausalLM": NativeFamily(
        traits=Traits(qkv_bias=True),
    ),
    # Qwen3: Llama whose queries and keys are normalized per head before they are rotated.
    "Qwen3ForCausalLM": NativeFamily(
        traits=Traits(qk_norm=True),
    ),
    # Qwen3-MoE: Qwen3 with a mixture of experts in most layers.
    "Qwen3MoeForCausalLM": NativeFamily(
        dialect=Dialect(parse_experts=qwen3_moe_experts),
        traits=Traits(qk_norm=True, experts=ExpertNames(part="mlp", gate="gate_proj", up="up_proj", down="down_proj")),
    ),
}
SUPPORTED = tuple(sorted(FAMILIES))


def find_dialect(architecture: str) -> Dialect:
    """Return the dialect of an architecture's config.json; an unknown one is read like Llama."""
    family = FAMILIES.get(architecture)
    return Dialect() if family is None else family.dialect
