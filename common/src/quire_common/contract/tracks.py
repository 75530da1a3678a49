"""The figures that the gateway reports about the tracks of a model with a canary, and their histograms. Pure.

{"models": {"chat": {"revision": "5f0c", "tracks": {"canary": {
    "requests": 512, "errors": 1, "unanswered": 0,
    "latencies": {"timeToFirstToken": {"61": 14, "62": 9}, "interTokenLatency": {"35": 23}}}},
    "answers": {"compared": 320, "different": 0, "nearTies": 2, "failed": 0}}}}

The latencies are those of requests that met the same load per replica on both tracks. A histogram maps bins to counts;
each bin is 5 % wider than the one before, which resolves a change of 15 %.
"""

import math

EQUAL_LOAD = 0.1
"""The relative difference up to which the loads of two replicas count as equal. It stems from whole percentages."""
TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY = "timeToFirstToken", "interTokenLatency"
_GROWTH = math.log(1.05)
_SHORTEST_SECONDS = 1e-4
_MOST_BINS = 320


def bin_of(seconds: float) -> int:
    """Return the bin of a latency."""
    if seconds <= _SHORTEST_SECONDS:
        return 0
    return min(_MOST_BINS, int(math.log(seconds / _SHORTEST_SECONDS) / _GROWTH))


def bin_start(number: float) -> float:
    """Return the latency in seconds at which a bin starts; fractions are within a bin."""
    return _SHORTEST_SECONDS * math.exp(number * _GROWTH)
