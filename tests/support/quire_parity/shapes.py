"""Shapes and configurations of small Llama models, for tests that load none."""

from typing import Any

from quire_engine.model.config import ModelConfig
from quire_engine.model.rope import RopeConfig
from quire_engine.model.shape import ModelShape

_SHAPE: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "vocab_size": 320,
    "max_position_embeddings": 8192,
    "eos_token_ids": (1,),
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 256,
}


def shape(**changes: Any) -> ModelShape:
    """Return a shape, without windows unless they are given."""
    fields = {**_SHAPE, **changes}
    return ModelShape(**{"windows": (None,) * fields["num_layers"], **fields})


def config(**changes: Any) -> ModelConfig:
    """Return a configuration, without windows unless they are given."""
    fields = {**_SHAPE, **changes}
    usual = {
        "windows": (None,) * fields["num_layers"],
        "rms_norm_eps": 1e-5,
        "ropes": (RopeConfig(theta=1e4),) * fields["num_layers"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "rotary_dim": fields["head_dim"],
        "attention_scale": fields["head_dim"] ** -0.5,
        "attention_soft_cap": None,
        "logit_soft_cap": None,
    }
    return ModelConfig(**{**usual, **fields})
