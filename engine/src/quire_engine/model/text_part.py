"""The text part of a checkpoint that also sees images: its configuration and its tensors, as a decoder's own.

``…ForConditionalGeneration`` checkpoints contain a decoder of a family that has a model of its own. Here its fields and
tensor names become those of that family; what belongs to images is not read. Needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextPart:
    family: str
    """The architecture of the decoder alone."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that the checkpoints leave out because they are the defaults of transformers' configuration."""


_TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": _TextPart(
        family="Gemma3ForCausalLM",
        defaults={
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
        },
    ),
    "Mistral3ForConditionalGeneration": _TextPart(family="MistralForCausalLM"),
    "Qwen2VLForConditionalGeneration": _TextPart(family="Qwen2ForCausalLM"),
    "Qwen2_5_VLForConditionalGeneration": _TextPart(family="Qwen2ForCausalLM"),
    "Qwen3VLForConditionalGeneration": _TextPart(family="Qwen3ForCausalLM"),
}
_OF_THE_WHOLE = ("tie_word_embeddings", "eos_token_id", "quantization_config")
"""Fields that are written beside ``text_config`` and mean the decoder."""
_PREFIXES = (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."))
_LATER_PREFIX = "model.language_model."
_OF_IMAGES = ("vision_tower.", "multi_modal_projector.", "visual.")


def text_config(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Return the configuration of the decoder in a larger model; None where ``raw`` is no such model."""
    named = raw.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    part = next((_TEXT_PARTS[name] for name in names if name in _TEXT_PARTS), None)
    if part is None:
        return None
    given = raw.get("text_config")
    # Qwen's first checkpoints have the decoder's fields at the top.
    own = given if isinstance(given, dict) else {name: value for name, value in raw.items() if name != "vision_config"}
    whole = {name: raw[name] for name in _OF_THE_WHOLE if raw.get(name) is not None}
    text = {**part.defaults, **{name: value for name, value in own.items() if value is not None}, **whole}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(name), dict):
            text[name] = _one_rotation(text[name])
    return {**text, "architectures": [part.family]}


def _one_rotation(rope: dict[str, Any]) -> dict[str, Any]:
    """Return a rotation without sections for time, height and width: a text has the same position in each."""
    plain = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    for name in ("type", "rope_type"):
        if plain.get(name) == "mrope":
            plain[name] = "default"
    return plain


def text_tensor(name: str) -> str | None:
    """Return the decoder's own name of a tensor of the checkpoint; None for a tensor of images."""
    if name.removeprefix("model.").startswith(_OF_IMAGES):
        return None
    if name.startswith(_LATER_PREFIX):
        return f"model.{name.removeprefix(_LATER_PREFIX)}"
    return next((own + name.removeprefix(before) for before, own in _PREFIXES if name.startswith(before)), name)
