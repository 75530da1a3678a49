"""The text part of a checkpoint that also supports images: its configuration and tensors, as those of a decoder.

``…ForConditionalGeneration`` checkpoints contain a decoder of a family with its own model. Here its fields and tensor
names become those of that family; image parts are not read. This module needs no torch.
"""

from typing import Any

from quire_engine.model.families import FAMILIES

_TEXT_PARTS = {
    whole: (name, defaults) for name, family in FAMILIES.items() for whole, defaults in family.text_part_of.items()
}
"""The decoder's architecture and the values that its checkpoints leave out, by the larger model's architecture."""
_OF_THE_WHOLE = ("eos_token_id", "quantization_config")
"""The fields next to ``text_config`` that describe the decoder."""
_TIED = "tie_word_embeddings"
_PREFIXES = (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."))
_LATER_PREFIX = "model.language_model."
_OF_IMAGES = ("vision_tower.", "multi_modal_projector.", "visual.")


_HEADLESS = ("Model", "ForSequenceClassification")
"""The ends of the names of architectures that are a decoder with another head than the LM head, or without one."""
_CAUSAL = "ForCausalLM"


def decoder_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the decoder: of the text part of a larger model, or without another head.

    A classifier is read as a decoder only if ``classifier_from_token`` says that its head consists of rows of the LM
    head.
    """
    text = text_config(raw) or raw
    return _causal(text) if isinstance(text.get("architectures"), list) else text


def _causal(raw: dict[str, Any]) -> dict[str, Any]:
    ends = _HEADLESS if raw.get("classifier_from_token") else _HEADLESS[:1]
    for name in raw["architectures"]:
        for end in ends:
            if isinstance(name, str) and name.endswith(end) and name.removesuffix(end) + _CAUSAL in FAMILIES:
                return {**raw, "architectures": [name.removesuffix(end) + _CAUSAL]}
    return raw


def text_config(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Return the configuration of the decoder in a larger model; None if ``raw`` is not such a model."""
    named = raw.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    part = next((_TEXT_PARTS[name] for name in names if name in _TEXT_PARTS), None)
    if part is None:
        return None
    family, defaults = part
    stated = raw.get("text_config")
    # Qwen's first checkpoints have the decoder's fields at the top level.
    own = (
        stated if isinstance(stated, dict) else {name: value for name, value in raw.items() if name != "vision_config"}
    )
    whole = {name: raw[name] for name in _OF_THE_WHOLE if raw.get(name) is not None}
    given = {name: value for name, value in own.items() if value is not None or name not in defaults}
    text = {**defaults, **given, **whole}
    # transformers 4 writes the flag into text_config, 5 next to it, and each writes its default into the other place.
    flags = [raw.get(_TIED) if raw.get(_TIED) is not None else defaults.get(_TIED), own.get(_TIED)]
    text[_TIED] = True if True in flags else next((flag for flag in flags if flag is not None), None)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(name), dict):
            text[name] = _one_rotation(text[name])
    return {**text, "architectures": [family]}


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
