"""The number of parameters in a safetensors file, read from its header, which also shows whether the file is complete.

It works for local files and for remote files that can be read in ranges.
"""

import json
from collections.abc import Callable
from math import prod

_MAX_HEADER_BYTES = 100 * 10**6
"""The safetensors format's own limit."""
FIRST_READ_BYTES = 128 << 10
"""Enough for most headers: one request instead of two."""
_MOST_DIMENSIONS, _LARGEST = 16, 2**53

Read = Callable[[int, int], bytes]
"""A function that returns at most a number of bytes from an offset."""


class NoWeights(ValueError):
    """A file that is not a complete safetensors file; the message says why."""


def count_parameters(read: Read, size_bytes: int) -> int:
    """Return the number of elements of all tensors, or raise ``NoWeights``."""
    start = read(0, FIRST_READ_BYTES)
    length = int.from_bytes(start[:8], "little")
    if not 2 <= length <= _MAX_HEADER_BYTES:
        raise NoWeights("its first eight bytes are not the length of a header")
    text = start[8 : 8 + length]
    if len(text) < length:
        text += read(len(start), length - len(text))
    try:
        tensors = [entry for name, entry in json.loads(text).items() if name != "__metadata__"]
        data_bytes = max((entry["data_offsets"][1] for entry in tensors), default=0)
        elements = sum(_elements(entry["shape"]) for entry in tensors)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise NoWeights(f"its header cannot be read: {error}") from error
    missing = 8 + length + data_bytes - size_bytes
    if missing > 0:
        raise NoWeights(f"its last {missing} bytes are missing")
    return int(elements)


def _elements(shape: list[int]) -> int:
    """Return the elements of one tensor; the bounds keep a hostile header from taking minutes to multiply."""
    if len(shape) > _MOST_DIMENSIONS or not all(isinstance(size, int) and 0 <= size <= _LARGEST for size in shape):
        raise ValueError("a tensor has an invalid shape")
    return prod(shape)
