"""The parity table of the native families: a tiny random model of each, with its variations."""

from typing import Any

from quire_parity.cases import LENGTHS, Case

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
}
# Two heads' halves of 16 components each.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.6, 1.9, 2.2, 2.6],
    "long_factor": [1.3, 1.7, 2.0, 3.5, 6.0, 9.0, 14.0, 20.0],
}
# Windows are shorter than most prompts; 24 is not a multiple of the block size.
WINDOW = 24
GEMMA: dict[str, Any] = {
    "head_dim": 24,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 40,
    "tie_word_embeddings": True,
}
CASES = {
    "llama, llama3 rope": Case(family="llama", fields={"rope_parameters": LLAMA3}),
    "llama, biases, wide heads, tied": Case(
        family="llama",
        fields={"attention_bias": True, "mlp_bias": True, "head_dim": 40, "tie_word_embeddings": True},
    ),
    "llama, yarn, one head for all": Case(
        family="llama", fields={"rope_parameters": YARN, "num_key_value_heads": 1, "tie_word_embeddings": True}
    ),
    "llama, linear rope, multi-head": Case(
        family="llama",
        fields={
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
            "num_key_value_heads": 4,
        },
    ),
    "mistral, window": Case(family="mistral", fields={"sliding_window": WINDOW}),
    "qwen2, windows in its last layers": Case(
        family="qwen2",
        fields={
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "qwen3": Case(family="qwen3", fields={"head_dim": 24, "num_key_value_heads": 1}),
    "gemma2": Case(family="gemma2", fields={**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": Case(
        family="gemma3_text",
        fields={
            **GEMMA,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 4.0},
            },
        },
    ),
    "phi3, window": Case(family="phi3", fields={"sliding_window": WINDOW}),
    "phi3, longrope, short": Case(
        family="phi3",
        fields={"rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
    ),
    # Prompts below the original length are left out: there the reference changes factors on the way, quire does not.
    "phi3, longrope, long": Case(
        family="phi3",
        fields={"rope_parameters": LONGROPE, "original_max_position_embeddings": 14},
        lengths=LENGTHS[2:],
    ),
    "mixtral, window": Case(
        family="mixtral",
        fields={"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "qwen3_moe, a layer without experts": Case(
        family="qwen3_moe",
        fields={
            "num_hidden_layers": 3,
            "head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
    "phi3, partly rotated": Case(
        family="phi3",
        fields={
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
    ),
}


_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
WHOLE = {
    "gemma3, text part": Case(
        family="gemma3",
        fields={"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
        whole={"vision_config": {**_VISION, "image_size": 28, "patch_size": 14}},
    ),
    # As tools save it that write every default: the flag next to text_config is true, and the LM head is its own.
    "mistral3, text part, own LM head": Case(
        family="mistral3",
        fields={"model_type": "mistral", "head_dim": 16},
        whole={"vision_config": {**_VISION, "head_dim": 16}, "tie_word_embeddings": False},
        config={"tie_word_embeddings": True},
    ),
    "qwen2_5_vl, text part": Case(
        family="qwen2_5_vl",
        fields=_MROPE,
        whole={"vision_config": {**_QWEN_VISION, "fullatt_block_indexes": [0]}},
    ),
    "qwen2_vl, text part": Case(
        family="qwen2_vl",
        fields=_MROPE,
        whole={"vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}},
    ),
    "qwen3_vl, text part": Case(
        family="qwen3_vl",
        fields={**_MROPE, "head_dim": 16},
        whole={"vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]}},
    ),
}
"""Larger models whose text part is a native family."""
