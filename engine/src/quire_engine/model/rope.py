"""Rotary position embedding's frequencies, with the ways checkpoints stretch them to longer contexts.

Pure arithmetic on floats, no torch: ``layers`` makes the table of cosines and sines from the result.
"""

import math
from dataclasses import dataclass
from typing import Any

from quire_engine.model.config_fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All frequencies divided by one factor (position interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's: long waves divided by the factor, short ones kept, a smooth passage between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None


_TYPES = ("default", "linear", "llama3")


def parse_rope(raw: dict[str, Any], problems: list[str], default_theta: float = 10_000.0) -> RopeConfig:
    """From ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    name = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    given = raw.get(name)
    if given is not None and not isinstance(given, dict):
        problems.append(f"{name} is {given!r}; an object is needed")
        given = None
    # An old checkpoint names its theta at the top, and the kind of scaling "type".
    merged = {"rope_theta": raw.get("rope_theta"), **(given or {})}
    merged["rope_type"] = merged.get("rope_type") or merged.get("type")
    fields = Fields(merged, problems, prefix=f"{name}.")
    theta = fields.positive_float("rope_theta", default=default_theta)
    return RopeConfig(theta=theta, scaling=_parse_scaling(fields))


def _parse_scaling(fields: Fields) -> LinearScaling | Llama3Scaling | None:
    match fields.one_of("rope_type", _TYPES, default="default"):
        case "linear":
            return LinearScaling(factor=fields.positive_float("factor"))
        case "llama3":
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
        case _:
            return None


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> list[float]:
    """Radians per position of each pair of components, head_dim / 2 of them."""
    plain = [rope.theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
    match rope.scaling:
        case LinearScaling(factor=factor):
            return [frequency / factor for frequency in plain]
        case Llama3Scaling() as scaling:
            return [_llama3(frequency, scaling) for frequency in plain]
        case None:
            return plain


def _llama3(frequency: float, scaling: Llama3Scaling) -> float:
    wavelength = 2.0 * math.pi / frequency
    turns = scaling.original_max_position_embeddings / wavelength
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return kept * frequency + (1.0 - kept) * frequency / scaling.factor
