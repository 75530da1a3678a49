"""The figures that the gateway reports about the tracks of a model with a canary, and their histograms. Pure.

{"models": {"chat": {"revision": "5f0c", "tracks": {"canary": {
    "requests": 512, "warmRequests": 23, "errors": 1,
    "levels": {"2": {"timeToFirstToken": {"61": 14, "62": 9}, "interTokenLatency": {"35": 23}}}}},
    "answers": {"compared": 320, "different": 0, "nearTies": 2, "failed": 0}}}}

The latencies are those of warm requests, whose replicas were not just started.
A level is a range of the load that a request met at its replica, so that latencies can be compared at equal load. A
histogram maps bins to counts; each bin is 5 % wider than the one before, which resolves a change of 15 %.
"""

import math

TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY = "timeToFirstToken", "interTokenLatency"
LEVELS = 8
_GROWTH = math.log(1.05)
_SHORTEST_SECONDS = 1e-4
_MOST_BINS = 320


def load_level(requests: float) -> int:
    """Return the level of a replica that had so many requests: 0, 1, 2-3, 4-7, …, 64 and more."""
    return min(LEVELS - 1, int(requests).bit_length())


def level_range(level: int) -> str:
    """Return the requests of a level as text."""
    if level <= 1:
        return str(level)
    low = 2 ** (level - 1)
    return f"{low}+" if level == LEVELS - 1 else f"{low}-{2 * low - 1}"


def bin_of(seconds: float) -> int:
    """Return the bin of a latency."""
    if seconds <= _SHORTEST_SECONDS:
        return 0
    return min(_MOST_BINS, int(math.log(seconds / _SHORTEST_SECONDS) / _GROWTH))


def bin_start(number: float) -> float:
    """Return the latency in seconds at which a bin starts; fractions are within a bin."""
    return _SHORTEST_SECONDS * math.exp(number * _GROWTH)
