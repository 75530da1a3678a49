"""The parity table of models that transformers runs with our cache: a tiny random model of each family."""

from quire_parity.cases import VOCABULARY, Case

CASES = {
    # Learned positions, one fused layer for queries, keys and values whose weights lie transposed.
    "gpt2": Case(family="gpt2", fields={"num_key_value_heads": None}),
    # Learned positions that start at 2.
    "opt": Case(family="opt", fields={"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": None}),
    # A quarter of each head rotated, attention and feed-forward side by side.
    "gpt_neox": Case(family="gpt_neox", fields={"num_key_value_heads": None}),
    "olmo2": Case(family="olmo2"),
    # Embeddings, attention, residuals and logits have separate scales.
    "granite": Case(
        family="granite",
        fields={
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 3.0,
        },
    ),
    "phi": Case(family="phi", fields={"qk_layernorm": True, "num_key_value_heads": None}),
    # A window that is not a multiple of the block size.
    "starcoder2": Case(family="starcoder2", fields={"sliding_window": 24}),
    "cohere": Case(family="cohere", fields={"logit_scale": 0.5, "use_qk_norm": True}),
    # Attention sinks, experts with biases, a window in the first layer.
    "gpt_oss": Case(
        family="gpt_oss",
        fields={
            "head_dim": 16,
            "sliding_window": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    # Attention in chunks, no whole number of blocks; a layer without rotation whose queries grow with positions.
    "llama4": Case(
        family="llama4_text",
        fields={
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 24,
            "no_rope_layers": [1, 0],
            "floor_scale": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    # Layers of different KV heads and head dims, and embeddings for each layer.
    "gemma4": Case(
        family="gemma4_text",
        fields={
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
        },
    ),
    # Its own positions as well, and embeddings scaled.
    "biogpt": Case(family="biogpt", fields={"scale_embedding": True, "num_key_value_heads": None}),
}
