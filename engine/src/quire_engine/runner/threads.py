"""How many threads a step computes with: all that were given, unless its layers are too small to be worth sharing.

A parallel region costs about 25 microseconds to enter and leave when waiting threads sleep, and beside a busy process
it waits for whichever thread was kept from its core. A step of a small model is a hundred such regions of a few tens of
microseconds each: on one thread it is faster, and a neighbour hardly touches it.
"""

import logging
import os

import torch

_log = logging.getLogger(__name__)

# What one thread of a present-day CPU reaches, roughly: the rule below only needs the order of magnitude.
_BYTES_PER_SECOND = 20e9
_PRODUCTS_PER_SECOND = 80e9
_WORTH_SHARING_SECONDS = 100e-6


class ThreadChooser:
    """Sets torch's threads, which the kernels follow, before a step that is large or small enough to change them."""

    def __init__(self, threads: int, *, shared_from_tokens: int) -> None:
        self._threads = threads
        self._shared_from_tokens = shared_from_tokens
        self._current = 0

    def prepare(self, num_tokens: int) -> None:
        wanted = self._threads if num_tokens >= self._shared_from_tokens else 1
        if wanted != self._current:
            torch.set_num_threads(wanted)
            self._current = wanted


def sharing_begins(*, mean_linear_bytes: float, mean_linear_weights: float) -> int:
    """From how many tokens on a linear layer of that size keeps one thread busy long enough to call for others."""
    if mean_linear_bytes / _BYTES_PER_SECOND >= _WORTH_SHARING_SECONDS:
        return 1
    return max(1, round(_WORTH_SHARING_SECONDS * _PRODUCTS_PER_SECOND / mean_linear_weights))


def use_threads(threads: int) -> int:
    """Lets torch compute with so many threads, but never more than the CPUs this process may run on; how many."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads > allowed:
        _log.warning("using %d threads instead of %d: this process may run on %d CPUs", allowed, threads, allowed)
    torch.set_num_threads(min(threads, allowed))
    return min(threads, allowed)
