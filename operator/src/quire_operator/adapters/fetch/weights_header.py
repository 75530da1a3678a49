"""How many parameters a safetensors file holds, by its header alone; and whether the file is as long as that says.

For files of this machine and for those of which ranges can be had.
"""

import json
from collections.abc import Callable
from math import prod

_MAX_HEADER_BYTES = 100 * 10**6
"""The safetensors format's own limit."""
FIRST_READ_BYTES = 128 << 10
"""Holds most headers whole: one request rather than two."""
_MOST_DIMENSIONS, _LARGEST = 16, 2**53

Read = Callable[[int, int], bytes]
"""Bytes from an offset, so many or fewer."""


class NoWeights(ValueError):
    """It is no whole safetensors file; says why."""


def count_parameters(read: Read, size_bytes: int) -> int:
    """Elements of all tensors; raises ``NoWeights``."""
    start = read(0, FIRST_READ_BYTES)
    length = int.from_bytes(start[:8], "little")
    if not 2 <= length <= _MAX_HEADER_BYTES:
        raise NoWeights("its first eight bytes are no header's length")
    text = start[8 : 8 + length]
    if len(text) < length:
        text += read(len(start), length - len(text))
    try:
        tensors = [entry for name, entry in json.loads(text).items() if name != "__metadata__"]
        data_bytes = max((entry["data_offsets"][1] for entry in tensors), default=0)
        elements = sum(_elements(entry["shape"]) for entry in tensors)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise NoWeights(f"its header can't be read: {error}") from error
    missing = 8 + length + data_bytes - size_bytes
    if missing > 0:
        raise NoWeights(f"its last {missing} bytes are missing")
    return int(elements)


def _elements(shape: list[int]) -> int:
    """Anybody may publish a header, and numbers of thousands of digits would take minutes to multiply."""
    if len(shape) > _MOST_DIMENSIONS or not all(isinstance(size, int) and 0 <= size <= _LARGEST for size in shape):
        raise ValueError("a tensor's shape is none")
    return prod(shape)
