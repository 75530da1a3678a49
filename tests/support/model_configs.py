"""Configurations of published models."""

from typing import Any

from quire_common.model_memory import ModelConfig, ModelFacts, parse_model_config

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}


def config_of(body: dict[str, Any] = LLAMA_3_8B, **changes: Any) -> ModelConfig:
    """Return the shape of a model with this configuration, which must be valid."""
    config = parse_model_config(body | changes)
    assert isinstance(config, ModelConfig), config
    return config


def facts_of(body: dict[str, Any] = LLAMA_3_8B, **changes: Any) -> ModelFacts:
    """Return the facts about a model whose parameters were counted."""
    config = config_of(body, **changes)
    return ModelFacts(config=config, parameters=config.parameters, counted=True)
