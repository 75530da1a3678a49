"""The configuration in a model folder's config.json: it is read once, and all problems are reported together.

Only fields that affect the computation are here. The registry knows the families, and a family knows the names of its
checkpoint's tensors. This module needs no torch, so a folder can be checked before torch is loaded.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_common import model_memory
from quire_common.model_memory import Fields
from quire_engine.config_overrides import override_paths, replaced, rotation_field, with_overrides
from quire_engine.errors import ModelFolderError
from quire_engine.model.dialect import Dialect
from quire_engine.model.experts import ExpertsConfig
from quire_engine.model.families import find_dialect
from quire_engine.model.kv_scales import only_quantizes_kv_cache
from quire_engine.model.rope import RopeConfig, reach, rotation_problems
from quire_engine.model.shape import ModelShape
from quire_engine.model.text_part import decoder_config
from quire_engine.model_folder import (
    NO_OVERRIDES,
    ConfigOverrides,
    read_config,
    read_generation_config,
    read_json_object,
)

_log = logging.getLogger(__name__)
_READ_ELSEWHERE = ("model_type", "dtype", "torch_dtype", "classifier_from_token", "matryoshka_dimensions")
"""Fields of config.json that are no part of a ``ModelConfig``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelShape):
    """A decoder-only transformer with grouped-query attention and gated feed-forward layers."""

    rms_norm_eps: float
    ropes: tuple[RopeConfig, ...]
    """One entry per layer."""
    tie_word_embeddings: bool
    """True if config.json says so; the checkpoint may still have an LM head of its own."""
    attention_bias: bool
    mlp_bias: bool
    rotary_dim: int
    """The number of rotated components of a head, which are the first ones."""
    attention_scale: float
    """The factor of the products of queries and keys."""
    attention_soft_cap: float | None
    logit_soft_cap: float | None
    experts: ExpertsConfig | None = None
    has_lm_head: bool = True
    """False where only hidden states are read; then ``tie_word_embeddings`` is false too."""


def load_config(folder: Path, supported: tuple[str, ...], overrides: ConfigOverrides = NO_OVERRIDES) -> ModelConfig:
    """Return a model folder's configuration. Raise ModelFolderError that lists every problem."""
    if not folder.is_dir():
        raise ModelFolderError(f"{folder} is not a folder; a model is a folder in Hugging Face layout")
    file = folder / "config.json"
    if not file.is_file():
        raise ModelFolderError(f"{folder} has no config.json; a model is a folder in Hugging Face layout")
    generation = read_generation_config(folder, overrides)
    problems: list[str] = []
    raw = read_config(folder, overrides)
    config = parse_config(decoder_config(raw), generation, supported, problems)
    if config is None:
        raise ModelFolderError("\n  - ".join([f"{file} cannot be served:", *problems]))
    return config


def unread_overrides(folder: Path, supported: tuple[str, ...], overrides: ConfigOverrides) -> list[str]:
    """Return the names of overrides that a native family does not read: any other value would change nothing.

    An example is a field of the wrong place, such as that of ``text_config`` next to it.
    """
    content, generation = read_json_object(folder / "config.json"), read_generation_config(folder, overrides)

    def read(changes: Mapping[str, Any]) -> tuple[ModelConfig | None, list[str]]:
        problems: list[str] = []
        return parse_config(decoder_config(with_overrides(content, changes)), generation, supported, problems), problems

    def is_read(path: tuple[str, ...]) -> bool:
        try:
            return any(read(replaced(overrides.config, path, value)) != expected for value in (object(), False))
        except (TypeError, ValueError, AttributeError):  # a field whose reader expects its type
            return True

    expected = read(overrides.config)
    return [
        ".".join(path)
        for path in override_paths(overrides.config)
        if path[-1] not in _READ_ELSEWHERE and not is_read(path)
    ]


def warn_of_unread(names: list[str], reader: str) -> None:
    """Log overrides without an effect. vLLM accepts them too, and has some of its own that mean nothing here."""
    if names:
        _log.warning(
            "--hf-overrides: no effect of %s: %s does not read it there (fields of a text part belong in text_config)",
            ", ".join(names),
            reader,
        )


def parse_config(
    raw: dict[str, Any], generation: dict[str, Any], supported: tuple[str, ...], problems: list[str]
) -> ModelConfig | None:
    """Return the configuration, or None with the reasons in ``problems``."""
    fields = Fields(raw, problems)
    architecture = _architecture(raw, supported, problems)
    dialect = find_dialect(architecture)
    shape_begins = len(problems)
    defaults = model_memory.find_defaults(architecture)
    attention = model_memory.read_attention(fields, defaults)
    head_dim, layers, windows = attention.head_dim, attention.layers, attention.windows
    rotary_dim = int(head_dim * _partial_rotary_factor(raw, problems)) if dialect.partial_rotary else head_dim
    if len(problems) == shape_begins:
        own_dim = raw.get("head_dim") or defaults.head_dim
        problems += _head_problems(attention.hidden_size, attention.heads, own_dim, rotary_dim)
    activation_field, activation = dialect.activation
    fields.one_of(activation_field, (activation,), default=activation)
    if raw.get("use_bidirectional_attention"):
        problems.append("use_bidirectional_attention is set; only causal models are supported")
    if raw.get("is_causal") is False:
        problems.append("is_causal is false; only causal models are supported, whose tokens do not see later ones")
    quantization = raw.get("quantization_config")
    if quantization is not None and not only_quantizes_kv_cache(quantization):
        problems.append(
            "quantization_config is given; only checkpoints in 16 or 32 bits are supported: use the model's own, before"
            " it was quantized"
        )
    positions = fields.positive_int("max_position_embeddings")
    ropes = dialect.parse_ropes(raw, windows, problems)
    if not problems:
        problems += [problem for rope in dict.fromkeys(ropes) for problem in rotation_problems(rope, rotary_dim)]
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=attention.hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=layers,
        num_heads=attention.heads,
        num_kv_heads=attention.kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.positive_float("rms_norm_eps", default=dialect.rms_norm_eps),
        max_position_embeddings=max((reach(rope, positions) for rope in dict.fromkeys(ropes)), default=positions),
        ropes=ropes,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=defaults.tie_word_embeddings),
        attention_bias=fields.boolean("attention_bias", default=False),
        mlp_bias=fields.boolean("mlp_bias", default=False),
        eos_token_ids=read_eos_token_ids(raw, generation, problems),
        windows=windows,
        rotary_dim=rotary_dim,
        attention_scale=_attention_scale(fields, dialect, head_dim),
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", dialect.attention_soft_cap)
        if dialect.caps_attention
        else None,
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping", dialect.logit_soft_cap)
        if dialect.caps_logits
        else None,
        experts=dialect.parse_experts(fields, layers),
    )
    return None if problems else config


def _head_problems(hidden: int, heads: int, head_dim: int | None, rotary_dim: int) -> list[str]:
    """Return the inconsistencies between fields that are valid individually."""
    problems = []
    if head_dim is None and hidden % heads:
        problems.append(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; head_dim is not given")
    elif (head_dim or hidden // heads) % 2:
        wrong = head_dim or hidden // heads
        problems.append(f"head_dim {wrong} is odd; rotary position embedding pairs its components")
    elif rotary_dim % 2 or rotary_dim < 2:
        problems.append(f"partial_rotary_factor makes {rotary_dim} components rotate; an even number of them is needed")
    return problems


def _partial_rotary_factor(raw: dict[str, Any], problems: list[str]) -> float:
    rope = raw.get(rotation_field(raw))
    place = rope if isinstance(rope, dict) and rope.get("partial_rotary_factor") is not None else raw
    factor = Fields(place, problems).positive_float("partial_rotary_factor", default=1.0)
    if factor > 1.0:
        problems.append(f"partial_rotary_factor is {factor}; at most 1 is needed")
        return 1.0
    return factor


def _attention_scale(fields: Fields, dialect: Dialect, head_dim: int) -> float:
    if dialect.query_scalar is None:
        return float(head_dim**-0.5)
    return fields.positive_float("query_pre_attn_scalar", default=float(dialect.query_scalar)) ** -0.5


def _soft_cap(fields: Fields, name: str, default: float | None) -> float | None:
    """Return the soft cap: None for an explicit null, the family's default for an absent field."""
    value = fields.raw.get(name, default)
    return None if value is None else fields.positive_float(name, default=default)


def _architecture(raw: dict[str, Any], supported: tuple[str, ...], problems: list[str]) -> str:
    named = raw.get("architectures")
    if not isinstance(named, list) or not named or not all(isinstance(name, str) for name in named):
        problems.append(f"architectures is {named!r}; a list with one of {', '.join(supported)} is needed")
        return ""
    known = [name for name in named if name in supported]
    if not known:
        problems.append(f"architecture {', '.join(named)} is not supported; supported: {', '.join(supported)}")
        return ""
    return known[0]


def stored_dtype(folder: Path, overrides: ConfigOverrides = NO_OVERRIDES) -> model_memory.DTypeName | None:
    """Return the checkpoint's dtype in config.json."""
    return model_memory.stored_dtype(read_config(folder, overrides))


def read_eos_token_ids(raw: dict[str, Any], generation: dict[str, Any], problems: list[str]) -> tuple[int, ...]:
    """Return the ids; generation_config.json has priority, because chat models name the end-of-turn token there."""
    name = "eos_token_id"
    value = generation[name] if generation.get(name) is not None else raw.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        problems.append(f"{name} is {value!r}; a token id or a list of them is needed")
        return ()
    return tuple(ids)
