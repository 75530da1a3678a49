"""The shape of a model, read from its config.json: only what the capacity arithmetic needs.

The keys are those of Hugging Face configurations; a multimodal one has the language model's under ``text_config``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quire_operator.domain.capacity.attention_windows import Windows, read_windows
from quire_operator.domain.resource.fields import Fields, Problem

DTypeName = Literal["float32", "float16", "bfloat16"]
# The meaning of a config that omits a field; the engine's ``model/dialect`` has the same defaults.
_GEMMA_4 = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
_HEAD_DIM: Mapping[str, int] = {
    **dict.fromkeys(("Gemma2ForCausalLM", "Gemma3ForCausalLM", *_GEMMA_4), 256),
    "GptOssForCausalLM": 64,
    **dict.fromkeys(("Llama4ForCausalLM", "Qwen3ForCausalLM"), 128),
}
_TIED_UNSAID = frozenset({"Gemma2ForCausalLM", "Gemma3ForCausalLM", *_GEMMA_4})
_MAX_INT32 = 2**31 - 1
_MOST_LAYERS = 10_000
"""The operator iterates over the layers of configs from unknown authors, so their number is bounded."""
DTYPE_BYTES: Mapping[DTypeName, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of a decoder-only transformer."""

    family: str
    """The first of ``architectures``, else ``model_type``; shown to users."""
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    """At most ``heads``; with grouped-query attention the KV cache has only these."""
    head_dim: int
    intermediate_size: int
    experts: int
    """The number of feed-forward blocks per layer; 1 for a dense model."""
    vocab_size: int
    tied_embeddings: bool
    max_positions: int | None
    """The longest sequence that the model supports."""
    dtype: DTypeName | None
    """The dtype of the stored checkpoint; None if the config does not say."""
    windows: Windows
    kv_widths: tuple[int, ...]
    """The numbers of a token's keys by layer: KV heads × head dim."""

    @property
    def adapter_width(self) -> int:
        """The numbers of an adapter of rank 1 for every linear layer: the inputs and outputs of each module."""
        queries = self.heads * self.head_dim
        attention = sum(
            (self.hidden_size + queries) + 2 * (self.hidden_size + keys) + (queries + self.hidden_size)
            for keys in self.kv_widths
        )
        # Experts have no adapters.
        feed_forward = 3 * (self.hidden_size + self.intermediate_size) if self.experts == 1 else 0
        return attention + self.layers * feed_forward

    @property
    def parameters(self) -> int:
        """The number of parameters in the Llama layout; a close estimate for similar families."""
        attention = self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        router = self.hidden_size * self.experts if self.experts > 1 else 0
        feed_forward = 3 * self.hidden_size * self.intermediate_size * self.experts + router
        norms = 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.layers * (attention + feed_forward + norms) + embeddings + self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The inputs of the capacity arithmetic."""

    config: ModelConfig
    parameters: int
    counted: bool
    """True if ``parameters`` was counted in the headers of the weight files, not computed from the config."""


def parse_model_config(body: Mapping[str, object]) -> ModelConfig | tuple[Problem, ...]:
    """Return the shape in a config.json, or all reasons why it cannot be read."""
    problems: list[Problem] = []
    root = Fields(body, path="", problems=problems)
    text = root.section("text_config") if root.has("text_config") else root
    heads = _size(text, "num_attention_heads", "n_head")
    hidden = _size(text, "hidden_size", "n_embd")
    experts = text.integer("num_local_experts", default=None) or text.integer("num_experts", default=None) or 1
    family = _family(root)
    layers = _size(text, "num_hidden_layers", "n_layer", maximum=_MOST_LAYERS)
    kv_heads = text.integer("num_key_value_heads", default=heads, minimum=1)
    head_dim = text.integer("head_dim", default=_HEAD_DIM.get(family, max(1, hidden // heads)), minimum=1)
    windows = read_windows(family, text, layers)
    config = ModelConfig(
        family=family,
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_intermediate_size(text, hidden, experts),
        experts=experts,
        vocab_size=_size(text, "vocab_size"),
        tied_embeddings=_are_embeddings_tied(family, root, text),
        max_positions=text.integer("max_position_embeddings", default=None, minimum=1),
        dtype=_dtype(root, text),
        windows=windows,
        kv_widths=_kv_widths(family, text, windows, kv_heads, head_dim),
    )
    if not problems and config.heads % config.kv_heads:
        text.problem("num_key_value_heads", f"must divide num_attention_heads ({heads}), got {config.kv_heads}")
    return tuple(problems) if problems else config


def _kv_widths(family: str, fields: Fields, windows: Windows, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Return KV heads × head dim by layer; ``per_layer_config`` or Gemma 4's fields may give layers their own."""
    if fields.has("per_layer_config"):
        layers = fields.section("per_layer_config")
        own = [layers.section(str(layer)) if layers.has(str(layer)) else None for layer in range(len(windows))]
        return tuple(
            kv_heads * head_dim
            if layer is None
            else layer.integer("num_key_value_heads", default=kv_heads, minimum=1)
            * layer.integer("head_dim", default=head_dim, minimum=1)
            for layer in own
        )
    if family not in _GEMMA_4:
        return (kv_heads * head_dim,) * len(windows)
    full_dim = fields.integer("global_head_dim", default=512, minimum=1)
    full_heads = fields.integer("num_global_key_value_heads", default=None, minimum=1)
    full_heads = full_heads if full_heads is not None and fields.raw("attention_k_eq_v") is True else kv_heads
    return tuple(full_heads * full_dim if window is None else kv_heads * head_dim for window in windows)


def _size(fields: Fields, *keys: str, maximum: int = _MAX_INT32) -> int:
    """Return a required size from the first of these keys that is present; 1 after a problem was added."""
    for key in keys:
        if fields.has(key):
            return fields.integer(key, default=1, minimum=1, maximum=maximum)
    fields.problem(keys[0], "is missing")
    return 1


def _are_embeddings_tied(family: str, *places: Fields) -> bool:
    """Return True if the embeddings are tied, by the config or by the family's default."""
    said = [fields.raw("tie_word_embeddings") for fields in places]
    return True in said or (family in _TIED_UNSAID and False not in said)


def _intermediate_size(fields: Fields, hidden: int, experts: int) -> int:
    if experts > 1 and fields.has("moe_intermediate_size"):
        return fields.integer("moe_intermediate_size", default=1, minimum=1)
    return fields.integer("intermediate_size", default=4 * hidden, minimum=1)


def _family(root: Fields) -> str:
    names = root.raw("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    return root.text("model_type", default="unknown")


def _dtype(*places: Fields) -> DTypeName | None:
    """Return the dtype. transformers 5 writes ``dtype``, 4 wrote ``torch_dtype``."""
    for fields in places:
        for key in ("dtype", "torch_dtype"):
            match fields.raw(key):
                case "float32" | "float16" | "bfloat16" as name:
                    return name
    return None
