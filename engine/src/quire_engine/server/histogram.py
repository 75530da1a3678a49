"""A histogram that is cheap to add to: a search in a tuple and two additions."""

from bisect import bisect_left
from itertools import accumulate


class Histogram:
    """Counts by upper bound, inclusive as Prometheus has it; the last count is of what is above every bound."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[int]:
        return list(accumulate(self._counts))


def one_two_five(maximum: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 … up to ``maximum``."""
    bounds: list[float] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > maximum:
                return tuple(bounds)
            bounds.append(float(digit * power))
        power *= 10
