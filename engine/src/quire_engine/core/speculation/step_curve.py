"""The time of a step without prompts by its number of tokens, learned while the engine runs.

The curve is not a line: up to a tile of rows, further tokens cost almost nothing, and then they cost in stairs. So it
has a correction at each of a few numbers of tokens, in addition to one for all. The latter follows what changes all
steps, such as longer contexts or a busy machine, and keeps the parts of the curve comparable that are seldom measured.
"""

from bisect import bisect_right
from math import exp, inf, log

from quire_engine.core.stall_bound import StepCosts

_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_COMMON_SHARE, _FIRST_COMMON_SHARE = 0.05, 0.4
_OWN_SHARE, _FIRST_OWN_SHARE = 0.15, 0.5
"""The shares of a step's error that correct the whole curve, and the part of it that the step measured. The first steps
correct it by more: the estimates of the warm-up are often wrong, and by one factor everywhere."""
_LARGEST_ERROR, _FIRST_LARGEST_ERROR, _FIRST_STEPS = 0.25, 1.0, 4.0
"""The largest logarithm of measured over expected time that one step may claim: hiccups must not decide. The first
steps at a place of the curve may claim more, because only the warm-up says something about it."""
_UNMEASURED = StepCosts(fixed=1.0, per_token=0.05, per_pair=0.0)
"""Costs in a unit of their own, if the warm-up measured none."""
_LEAST_SHARE_OF_TOKEN = 0.02
"""The least cost of a token at first, relative to a step of one: drafts that seem to be free would always be tried."""


class StepCurve:
    """The expected time of a decode step in seconds, or in a unit of its own until steps were measured."""

    __slots__ = ("_common", "_fixed", "_own", "_per_token", "_steps", "_weights")

    def __init__(self, costs: StepCosts | None) -> None:
        first = _UNMEASURED if costs is None else costs
        self._fixed, self._per_token = first.fixed, max(first.per_token, _LEAST_SHARE_OF_TOKEN * first.fixed)
        self._common = 0.0
        self._steps = 0
        self._own = [0.0] * len(_KNOTS)
        self._weights = [0.0] * len(_KNOTS)
        """The number of steps that measured each part."""

    def seconds(self, tokens: int) -> float:
        """Return the expected time of a step that computes ``tokens`` tokens, at least 1."""
        place, share = _between(tokens)
        own = self._own[place] * (1.0 - share)
        if share:
            own += self._own[place + 1] * share
        return self._line(tokens) * exp(self._common + own)

    def _line(self, tokens: int) -> float:
        return self._fixed + self._per_token * (tokens - 1)

    def observe(self, tokens: int, seconds: float) -> None:
        """Correct the curve by a step of ``tokens`` tokens, none of which belonged to a prompt."""
        if seconds <= 0.0:
            return
        place, share = _between(tokens)
        largest = _FIRST_LARGEST_ERROR if self._weights[place] < _FIRST_STEPS else _LARGEST_ERROR
        error = min(max(log(seconds / self.seconds(tokens)), -largest), largest)
        self._steps += 1
        self._common += max(_COMMON_SHARE, _FIRST_COMMON_SHARE / self._steps) * error
        self._correct(place, 1.0 - share, error)
        if share:
            self._correct(place + 1, share, error)

    def _correct(self, place: int, share: float, error: float) -> None:
        """Correct one part of the curve by its ``share`` of an error."""
        self._own[place] += max(_OWN_SHARE, _FIRST_OWN_SHARE / (1.0 + self._weights[place])) * error * share
        self._weights[place] += share


def knot(tokens: int) -> int:
    """Return the number of the part of the curve to which a number of tokens belongs."""
    return bisect_right(_KNOTS, tokens) - 1


def bounds(place: int) -> tuple[int, float]:
    """Return the least number of tokens that belongs to a part of the curve, and the first one above it."""
    return _KNOTS[place], _KNOTS[place + 1] if place + 1 < len(_KNOTS) else inf


def _between(tokens: int) -> tuple[int, float]:
    """Return the knot at or below ``tokens``, and the share of the way to the next one."""
    place = knot(tokens)
    if place == len(_KNOTS) - 1:
        return place, 0.0
    low, high = _KNOTS[place], _KNOTS[place + 1]
    return place, (tokens - low) / (high - low)
