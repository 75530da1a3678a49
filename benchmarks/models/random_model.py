"""Create a checkpoint with random weights in a real shape, which every server can load.

It has Llama's layers, bfloat16 safetensors and a tokenizer in which each id is a distinct piece of visible text. The
tokenizer matters for measurements: a server sends nothing for a token that decodes to no text, so the client would take
a later token for the first. Speed depends on the shape alone, not on the weights.

This module knows no servers. torch is imported only when weights are generated.
"""

import json
import string
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MARK = "quire-random-model.json"
"""The file that is written last: a folder with it is complete, and it describes the checkpoint."""
END_OF_TEXT = "<|endoftext|>"
ROPE_THETA = 100_000.0
RMS_NORM_EPS = 1e-5
STANDARD_DEVIATION = 0.02
SILENT = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""The last products of a layer, without which it changes nothing."""
# In byte-level BPE a space is written Ġ, a newline Ċ.
_SPACE, _NEWLINE = "Ġ", "Ċ"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """The dimensions of a Llama. The defaults are SmolLM2-135M's."""

    hidden: int = 576
    layers: int = 30
    heads: int = 9
    kv_heads: int = 3
    intermediate: int = 1536
    vocabulary: int = 49_152
    max_positions: int = 8_192
    tied_embeddings: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads) + self.hidden * self.hidden
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)
        return embeddings + self.layers * layer + self.hidden


SMOLLM2_135M = LlamaShape()
SHAPES = {
    "5M": LlamaShape(hidden=256, layers=6, heads=8, kv_heads=4, intermediate=704, vocabulary=4096),
    "15M": LlamaShape(hidden=384, layers=8, heads=6, kv_heads=2, intermediate=1024, vocabulary=8192),
    "50M": LlamaShape(hidden=512, layers=14, heads=8, kv_heads=4, intermediate=1408, vocabulary=16384),
    "135M": SMOLLM2_135M,
    "300M": LlamaShape(hidden=896, layers=24, heads=14, kv_heads=2, intermediate=3328, vocabulary=49152),
    "500M": LlamaShape(hidden=1024, layers=32, heads=16, kv_heads=4, intermediate=3712, vocabulary=49152),
}


def ensure_model(folder: Path, shape: LlamaShape = SMOLLM2_135M, *, seed: int = 0) -> Path:
    """Return ``folder`` with a complete checkpoint of ``shape``, created if it is absent.

    Raise ValueError if the folder has other content.
    """
    mark = folder / MARK
    made_from = json.dumps({"config": _config(shape), "seed": seed}, indent=1) + "\n"
    if mark.is_file() and mark.read_text(encoding="utf-8") == made_from:
        return folder
    ours = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    strangers = sorted(path.name for path in folder.glob("*") if path.name not in {*ours, MARK})
    if strangers:
        raise ValueError(f"{folder} holds {', '.join(strangers)} already; name an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    mark.unlink(missing_ok=True)
    write_weights(folder / "model.safetensors", shape, seed=seed)
    write_description(folder, shape)
    mark.write_text(made_from, encoding="utf-8")
    return folder


def write_description(folder: Path, shape: LlamaShape) -> None:
    """Write everything except the weights: enough for an engine that generates its own (``--load-format dummy``)."""
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    _write(folder / "config.json", _config(shape))
    _write(folder / "generation_config.json", special)
    _write(folder / "tokenizer.json", tokenizer(shape.vocabulary))
    _write(folder / "tokenizer_config.json", _tokenizer_config(shape))


def write_weights(path: Path, shape: LlamaShape, *, seed: int) -> None:
    """Write normal weights and norms of one, in bfloat16, under the names of Hugging Face's Llama."""
    from safetensors.torch import save_file

    save_file(random_weights(shape, seed=seed), str(path), metadata={"format": "pt"})


def random_weights(shape: LlamaShape, *, seed: int, silent: tuple[str, ...] = ()) -> "dict[str, torch.Tensor]":
    """Return the weights by name; those whose names end with one of ``silent`` are zero."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in tensor_shapes(shape).items():
        if len(size) == 1:
            tensors[name] = torch.ones(size, dtype=torch.bfloat16)
        elif name.endswith(silent):
            tensors[name] = torch.zeros(size, dtype=torch.bfloat16)
        else:
            sampled = torch.empty(size).normal_(std=STANDARD_DEVIATION, generator=generator)
            tensors[name] = sampled.to(torch.bfloat16)
    return tensors


def tensor_shapes(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the checkpoint; a weight is [out, in]."""
    kv = shape.kv_heads * shape.head_dim
    layer = {
        "input_layernorm": (shape.hidden,),
        "self_attn.q_proj": (shape.hidden, shape.hidden),
        "self_attn.k_proj": (kv, shape.hidden),
        "self_attn.v_proj": (kv, shape.hidden),
        "self_attn.o_proj": (shape.hidden, shape.hidden),
        "post_attention_layernorm": (shape.hidden,),
        "mlp.gate_proj": (shape.intermediate, shape.hidden),
        "mlp.up_proj": (shape.intermediate, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.intermediate),
    }
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    for number in range(shape.layers):
        tensors |= {f"model.layers.{number}.{name}.weight": size for name, size in layer.items()}
    tensors["model.norm.weight"] = (shape.hidden,)
    if not shape.tied_embeddings:
        tensors["lm_head.weight"] = (shape.vocabulary, shape.hidden)
    return tensors


def tokenizer(vocabulary: int) -> dict[str, Any]:
    """Return a byte-level BPE ``tokenizer.json``.

    The vocabulary is END_OF_TEXT, the characters of plain ASCII, then words of two and of four letters, each merged
    from two earlier tokens, so that text can be encoded as well as decoded.
    """
    merges = list(islice(_merges(), vocabulary - 1 - len(_alphabet())))
    tokens = [END_OF_TEXT, *_alphabet(), *(first + second for first, second in merges)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 0, "content": END_OF_TEXT, **special}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [f"{first} {second}" for first, second in merges],
        },
    }


def _alphabet() -> list[str]:
    visible = string.digits + string.ascii_letters + string.punctuation
    return [*visible, _SPACE, _NEWLINE]


def _merges() -> Iterator[tuple[str, str]]:
    """Yield merges of letters into words of two, and of those into words of four."""
    letters = string.ascii_lowercase
    pairs = [first + second for first, second in product(letters, letters)]
    return chain(product(letters, letters), product(pairs, pairs))


def _config(shape: LlamaShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied_embeddings,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def _tokenizer_config(shape: LlamaShape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_positions,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        # Each message is on its own line, which is enough to try the chat endpoint.
        "chat_template": "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}",
    }


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=None if path.name == "tokenizer.json" else 1) + "\n", encoding="utf-8")


@contextmanager
def model_folder(shape: LlamaShape) -> Iterator[Path]:
    """Write a folder for ``--load-format dummy`` and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="quire-shape-") as name:
        write_description(Path(name), shape)
        yield Path(name)
