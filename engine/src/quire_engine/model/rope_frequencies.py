"""From what a config says of rotary position embedding to radians per position: arithmetic on floats, no torch.

A paged cache holds keys as they were rotated, and cannot turn them again when their sequence grows. So LongRoPE's two
sets of factors are not switched within a sequence, as transformers does: the longest sequence that is served decides,
once, for all.
"""

import math
from dataclasses import dataclass

from quire_engine.model.rope import LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    frequencies: tuple[float, ...]
    """Radians per position of each pair of rotated components."""
    magnitude: float = 1.0
    """What rotated queries and keys are multiplied by, each."""


def rotation(rope: RopeConfig, rotary_dim: int, longest: int) -> Rotation:
    """``longest`` is the number of tokens of the longest sequence that will be served."""
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
        """That turns so often within the original length; between two components where the number is not whole."""
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
