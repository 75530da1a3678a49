"""The Llama family: pre-norm, rotary positions, grouped-query attention, SwiGLU; biases where the config says so."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quire_engine.model.config import ModelConfig
from quire_engine.model.family import Family, ReadTensor
from quire_engine.model.layers import Attention, DecoderLayer, DecoderStack, GatedMlp, Norm
from quire_engine.model.linear import Linear, LinearBackend
from quire_engine.model.rope import inverse_frequencies
from quire_kernels.rotary import rotary_table

_EMBEDDING, _NORM, _LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def tensor_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden), _NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[_LM_HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for part, projections, bias in (("self_attn", attention, config.attention_bias), ("mlp", mlp, config.mlp_bias)):
        for name, shape in projections.items():
            shapes[f"{part}.{name}.weight"] = shape
            if bias:
                shapes[f"{part}.{name}.bias"] = shape[:1]
    return shapes


def is_ignorable(config: ModelConfig, name: str) -> bool:
    return name.endswith(".rotary_emb.inv_freq") or (name == _LM_HEAD and config.tie_word_embeddings)


def build(config: ModelConfig, read: ReadTensor, backend: LinearBackend, positions: int) -> DecoderStack:
    frequencies = torch.tensor(inverse_frequencies(config.rope, config.head_dim), dtype=torch.float64)
    cos_sin = rotary_table(frequencies, positions)  # [P, D]
    embedding = read(_EMBEDDING)
    layers = tuple(_build_layer(config, index, read, backend, cos_sin) for index in range(config.num_layers))
    return DecoderStack(
        embedding=embedding,
        layers=layers,
        norm=Norm(weight=read(_NORM), eps=config.rms_norm_eps),
        lm_head=backend.pack(embedding if config.tie_word_embeddings else read(_LM_HEAD), None),
    )


def _build_layer(
    config: ModelConfig, index: int, read: ReadTensor, backend: LinearBackend, cos_sin: Tensor
) -> DecoderLayer:
    prefix = f"model.layers.{index}"

    def linear(part: str, names: tuple[str, ...], bias: bool) -> Linear:
        """One layer of several projections of the same input, their outputs side by side."""
        weight = torch.cat([read(f"{prefix}.{part}.{name}.weight") for name in names])
        joined = torch.cat([read(f"{prefix}.{part}.{name}.bias") for name in names]) if bias else None
        return backend.pack(weight, joined)

    def norm(name: str) -> Norm:
        return Norm(weight=read(f"{prefix}.{name}.weight"), eps=config.rms_norm_eps)

    return DecoderLayer(
        attention_norm=norm("input_layernorm"),
        attention=Attention(
            qkv=linear("self_attn", ("q_proj", "k_proj", "v_proj"), config.attention_bias),
            out=linear("self_attn", ("o_proj",), config.attention_bias),
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            cos_sin=cos_sin,
        ),
        mlp_norm=norm("post_attention_layernorm"),
        mlp=GatedMlp(
            gate_up=linear("mlp", ("gate_proj", "up_proj"), config.mlp_bias),
            down=linear("mlp", ("down_proj",), config.mlp_bias),
        ),
    )


FAMILY = Family(tensor_shapes=tensor_shapes, is_ignorable=is_ignorable, build=build)
