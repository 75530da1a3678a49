"""From the values that the engine read at a prompt's tokens to an embedding, a similarity or a score. Pure."""

import math
import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence
from operator import mul

Vector = Sequence[float]


def total(parts: Sequence[bytes]) -> Vector:
    """Return the sum of all parts of a prompt, each float32 in the byte order of the machine."""
    first, *others = [array("f", part) for part in parts]
    if not others:
        return first
    return [math.fsum(values) for values in zip(first, *others, strict=True)]


def embedding(parts: Sequence[bytes], *, divisor: int, dimensions: int | None, normalize: bool) -> "array[float]":
    """Return an embedding: the sum over ``divisor`` tokens divided by it, cut to ``dimensions``, then normalized."""
    values = total(parts)[:dimensions]
    scale = 1.0 / divisor
    if normalize:
        length = math.sqrt(dot(values, values))
        # Only the zero vector has no direction.
        scale = 1.0 / length if length else 1.0
    return array("f", [value * scale for value in values])


def dot(one: Vector, other: Vector) -> float:
    """Return the scalar product."""
    return math.fsum(map(mul, one, other))


def similarity(one: Vector, other: Vector) -> float:
    """Return the cosine of the angle between two vectors; 0 if one of them is zero."""
    lengths = math.sqrt(dot(one, one) * dot(other, other))
    return dot(one, other) / lengths if lengths else 0.0


def relevance(parts: Sequence[bytes]) -> float:
    """Return the probability of relevance from the logit of the positive token and, if there is one, the negative's."""
    logits = total(parts)
    difference = logits[0] - (logits[1] if len(logits) > 1 else 0.0)
    # Neither branch overflows.
    if difference >= 0:
        return 1.0 / (1.0 + math.exp(-difference))
    return math.exp(difference) / (1.0 + math.exp(difference))


def base64_of(vector: "array[float]") -> str:
    """Return the vector as base64 of little-endian float32, as in OpenAI's API."""
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return b64encode(vector.tobytes()).decode("ascii")
