"""A model folder with random weights that a real engine loads quickly: Llama's layout, a tokenizer of bytes."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "dtype": "float32",
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def write_tiny_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(_weights(np.random.default_rng(0)), folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokens}))
    return folder


def _weights(random: np.random.Generator) -> dict[str, np.ndarray]:
    hidden, inner, keys = 64, 128, 32

    def matrix(*shape: int) -> np.ndarray:
        return random.normal(0, 0.05, shape).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(260, hidden), "model.norm.weight": np.ones(hidden, np.float32)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}.{name}.weight"] = np.ones(hidden, np.float32)
        for name, rows in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden)):
            weights[f"{at}.self_attn.{name}_proj.weight"] = matrix(rows, hidden)
        weights[f"{at}.mlp.gate_proj.weight"] = matrix(inner, hidden)
        weights[f"{at}.mlp.up_proj.weight"] = matrix(inner, hidden)
        weights[f"{at}.mlp.down_proj.weight"] = matrix(hidden, inner)
    return weights
