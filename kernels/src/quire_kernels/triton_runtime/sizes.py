"""Sizes of grids and blocks, computed on the host before each launch.

Triton's functions of the same names are compiled-time functions that can be called from the host too, at several
microseconds per call, which adds up to milliseconds in an eager step of a large model.
"""


def cdiv(value: int, divisor: int) -> int:
    """Return ``value / divisor``, rounded up; ``divisor`` is positive."""
    return -(-value // divisor)


def next_power_of_2(value: int) -> int:
    """Return the smallest power of two that is at least ``value``; 1 for 0 and negative values."""
    return 1 << (value - 1).bit_length() if value > 1 else 1
