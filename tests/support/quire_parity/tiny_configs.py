"""A tiny configuration of any causal language model in transformers, with the usual names of its fields."""

from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

VOCABULARY = 250
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Mixtures of experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "moe_top_k": 2,
    "num_expert_group": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 1,
    "first_k_dense_replace": 1,
    "mlp_layer_types": None,
    # Latent attention: values narrower than keys.
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    # Windows.
    "layer_types": None,
    "sliding_window": 24,
    "attention_chunk_size": 32,
    # Fields of one family each.
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "embedding_size": 64,
    "ffn_hidden_size": 96,
    "max_seq_len": 128,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "global_head_dim": 16,
    "num_kv_shared_layers": 0,
    "dff": 96,
}


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return the configuration. Raises what the type's own configuration class raises."""
    known = CONFIG_MAPPING[model_type]
    if _has(known, "kv_lora_rank"):  # latent attention has as many heads of keys as of queries
        changes = {"num_key_value_heads": _SIZES["num_attention_heads"], **changes}
    fields = {name: value for name, value in {**_SIZES, **changes}.items() if _has(known, name) or name in changes}
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **fields)
    return config


def _has(config_class: Any, name: str) -> bool:
    fields = set(getattr(config_class, "__dataclass_fields__", ())) | set(config_class.__init__.__annotations__)
    return name in fields or config_class.attribute_map.get(name) in fields
