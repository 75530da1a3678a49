"""The rotary frequencies in radians per position, computed from the configuration with plain floats, without torch.

A paged cache stores rotated keys and cannot rotate them again when their sequence grows. LongRoPE's two sets of factors
are therefore not switched within a sequence, as transformers does: the longest served sequence selects one set for all.
"""

import math
from dataclasses import dataclass

from quire_engine.model.rope import LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    frequencies: tuple[float, ...]
    """The radians per position of each pair of rotated components."""
    magnitude: float = 1.0
    """The factor of rotated queries and of rotated keys."""


def rotation(rope: RopeConfig, rotary_dim: int, longest: int) -> Rotation:
    """Return the rotation; ``longest`` is the number of tokens of the longest sequence that will be served."""
    plain = tuple(rope.theta ** (-2.0 * i / rotary_dim) for i in range(rotary_dim // 2))
    match rope.scaling:
        case LinearScaling(factor=factor):
            return Rotation(frequencies=tuple(frequency / factor for frequency in plain))
        case Llama3Scaling() as scaling:
            return Rotation(frequencies=tuple(_llama3(frequency, scaling) for frequency in plain))
        case YarnScaling() as scaling:
            return Rotation(frequencies=_yarn(plain, rope.theta, scaling), magnitude=scaling.attention_factor)
        case LongRopeScaling() as scaling:
            factors = scaling.long_factor if takes_long_factors(scaling, longest) else scaling.short_factor
            stretched = tuple(frequency / factor for frequency, factor in zip(plain, factors, strict=True))
            return Rotation(frequencies=stretched, magnitude=scaling.attention_factor)
        case None:
            return Rotation(frequencies=plain)


def takes_long_factors(scaling: LongRopeScaling, longest: int) -> bool:
    return longest > scaling.original_max_position_embeddings


def _llama3(frequency: float, scaling: Llama3Scaling) -> float:
    wavelength = 2.0 * math.pi / frequency
    turns = scaling.original_max_position_embeddings / wavelength
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return kept * frequency + (1.0 - kept) * frequency / scaling.factor


def _yarn(plain: tuple[float, ...], theta: float, scaling: YarnScaling) -> tuple[float, ...]:
    rotary_dim = 2 * len(plain)

    def component(turns: float) -> float:
        """Return the component with this number of turns within the original length, as a decimal number."""
        length = scaling.original_max_position_embeddings
        return rotary_dim * math.log(length / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    begin, end = component(scaling.beta_fast), component(scaling.beta_slow)
    if scaling.truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, rotary_dim - 1)
    if begin == end:
        end += 0.001
    stretched = []
    for i, frequency in enumerate(plain):
        interpolated = min(1.0, max(0.0, (i - begin) / (end - begin)))
        stretched.append(frequency / scaling.factor * interpolated + frequency * (1.0 - interpolated))
    return tuple(stretched)
