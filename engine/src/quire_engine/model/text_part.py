"""The text part of a checkpoint that also supports images: its configuration and tensors, as those of a decoder.

``…ForConditionalGeneration`` checkpoints contain a decoder of a family with its own model. Here its fields and tensor
names become those of that family; image parts are not read. This module needs no torch.
"""

from typing import Any

from quire_common.model_memory import causal_architecture, text_part
from quire_engine.model.families import FAMILIES

_PREFIXES = (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."))
_LATER_PREFIX = "model.language_model."
_OF_IMAGES = ("vision_tower.", "multi_modal_projector.", "visual.")


def decoder_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the decoder: of the text part of a larger model, or without another head."""
    text = text_config(raw) or raw
    name = causal_architecture(text, FAMILIES)
    return text if name is None else {**text, "architectures": [name]}


def text_config(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Return the configuration of the decoder in a larger model; None if ``raw`` is not such a model."""
    text = text_part(raw)
    if text is not None:
        for name in ("rope_scaling", "rope_parameters"):
            if isinstance(text.get(name), dict):
                text[name] = _one_rotation(text[name])
    return text


def _one_rotation(rope: dict[str, Any]) -> dict[str, Any]:
    """Return a rotation without sections for time, height and width, in which a text has equal positions."""
    plain = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    for name in ("type", "rope_type"):
        if plain.get(name) == "mrope":
            plain[name] = "default"
    return plain


def text_tensor(name: str) -> str | None:
    """Return the decoder's own name for a tensor of the checkpoint; None for a tensor of the image part."""
    if name.removeprefix("model.").startswith(_OF_IMAGES):
        return None
    if name.startswith(_LATER_PREFIX):
        return f"model.{name.removeprefix(_LATER_PREFIX)}"
    return next((own + name.removeprefix(before) for before, own in _PREFIXES if name.startswith(before)), name)
