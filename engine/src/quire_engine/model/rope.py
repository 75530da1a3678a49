"""The rotary position embedding in a config.json: the base, and the checkpoint's scaling to longer contexts.

This module only reads and needs no torch; ``rope_frequencies`` computes the frequencies.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from quire_common.model_memory import Fields
from quire_engine.config_overrides import rotation_field


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """A scaling that divides all frequencies by one factor (position interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """The scaling of Llama 3.1: long waves are divided by the factor, short ones are kept, with a smooth transition."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): slowly rotating components are interpolated, fast ones are kept, with a ramp between.

    Queries and keys are also multiplied by one factor.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    """True if the ramp starts and ends at whole components."""
    attention_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): one factor per frequency, in two sets: up to the original length, and beyond."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    theta: float
    scaling: Scaling | None = None


_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# The name in the first Phi-3 checkpoints.
_LONGROPE_BEFORE = "su"


def parse_rope(raw: dict[str, Any], problems: list[str], default_theta: float = 10_000.0) -> RopeConfig:
    """Return the rotation from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    name = rotation_field(raw)
    given = raw.get(name)
    if given is not None and not isinstance(given, dict):
        problems.append(f"{name} is {given!r}; an object is needed")
        given = None
    # An old checkpoint has its theta at the top level, and calls the kind of scaling "type".
    merged = {"rope_theta": raw.get("rope_theta"), **(given or {})}
    merged["rope_type"] = merged.get("rope_type") or merged.get("type")
    # Phi-3 has the original length at the top level, where it takes precedence.
    if raw.get("original_max_position_embeddings") is not None:
        merged["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    if merged["rope_type"] == _LONGROPE_BEFORE or (merged["rope_type"] == "yarn" and "short_factor" in merged):
        merged["rope_type"] = "longrope"
    fields = Fields(merged, problems, prefix=f"{name}.")
    theta = fields.positive_float("rope_theta", default=default_theta)
    return RopeConfig(theta=theta, scaling=_parse_scaling(fields, replace(fields, raw=raw, prefix="")))


def reach(rope: RopeConfig, positions: int) -> int:
    """Return the positions that a model can use: YaRN extends the original length by its factor."""
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling):
        return positions
    return max(positions, int(scaling.original_max_position_embeddings * scaling.factor))


def _parse_scaling(fields: Fields, model: Fields) -> Scaling | None:
    match fields.one_of("rope_type", _TYPES, default="default"):
        case "linear":
            return LinearScaling(factor=fields.positive_float("factor"))
        case "llama3":
            return _parse_llama3(fields)
        case "yarn":
            return _parse_yarn(fields, model)
        case "longrope":
            return _parse_longrope(fields, model)
        case "dynamic":
            # It only scales beyond max_position_embeddings, and no longer sequence is served.
            fields.positive_float("factor")
            return None
        case _:
            return None


def _parse_llama3(fields: Fields) -> Llama3Scaling:
    low, high = fields.positive_float("low_freq_factor"), fields.positive_float("high_freq_factor")
    if low >= high:
        fields.problems.append(
            f"{fields.prefix}low_freq_factor {low} is not below {fields.prefix}high_freq_factor {high}"
        )
    return Llama3Scaling(
        factor=fields.positive_float("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=fields.positive_int("original_max_position_embeddings"),
    )


def _parse_yarn(fields: Fields, model: Fields) -> YarnScaling:
    longest = model.positive_int("max_position_embeddings", default=1)
    original = fields.positive_int("original_max_position_embeddings", default=longest)
    factor = fields.positive_float("factor", default=longest / original)
    fast, slow = fields.positive_float("beta_fast", default=32.0), fields.positive_float("beta_slow", default=1.0)
    if fast < slow:
        fields.problems.append(f"{fields.prefix}beta_fast {fast} is below {fields.prefix}beta_slow {slow}")
    # Both or none: one alone has no effect.
    scales = [fields.raw.get(name) for name in ("mscale", "mscale_all_dim")]
    inferred = yarn_magnitude(factor)
    if all(scales):
        mscale, of_all = (fields.positive_float(name) for name in ("mscale", "mscale_all_dim"))
        inferred = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, of_all)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=fields.boolean("truncate", default=True),
        attention_factor=fields.positive_float("attention_factor", default=inferred),
    )


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _parse_longrope(fields: Fields, model: Fields) -> LongRopeScaling:
    longest = model.positive_int("max_position_embeddings", default=1)
    original = fields.positive_int("original_max_position_embeddings")
    factor = fields.positive_float("factor", default=longest / original)
    grows = factor > 1.0 and original > 1
    inferred = math.sqrt(1.0 + math.log(factor) / math.log(original)) if grows else 1.0
    return LongRopeScaling(
        short_factor=fields.positive_floats("short_factor"),
        long_factor=fields.positive_floats("long_factor"),
        original_max_position_embeddings=original,
        attention_factor=fields.positive_float("attention_factor", default=inferred),
    )


def rotation_problems(rope: RopeConfig, rotary_dim: int) -> list[str]:
    """Return the inconsistencies between the scaling and the number of rotated components of a head."""
    if not isinstance(rope.scaling, LongRopeScaling):
        return []
    return [
        f"{name} has {len(factors)} numbers; {rotary_dim // 2} are needed, one for two of the {rotary_dim} components"
        " of a head that are rotated"
        for name, factors in (("short_factor", rope.scaling.short_factor), ("long_factor", rope.scaling.long_factor))
        if len(factors) != rotary_dim // 2
    ]
