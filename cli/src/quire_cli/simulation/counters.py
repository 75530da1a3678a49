"""An engine's counters, as ``/metrics`` has them: cumulative, from zero at the engine's start."""

from bisect import bisect_left
from itertools import accumulate
from math import inf

from quire_cli.simulation.sequence import Sequence
from quire_operator.domain.autoscaling.observation import Histogram

FIRST_TOKEN_WAIT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
    inf,
)
"""The buckets of the engine's times to first tokens; tests/contract compares them."""
TOKEN_GAP_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
    inf,
)
"""The buckets of the engine's times between tokens."""


class Counters:
    def __init__(self) -> None:
        self.arrived_requests = 0
        self.arrived_uncached_tokens = 0.0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.computed_prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = 0
        self.steps = 0
        self.busy_seconds = 0.0
        self._waits = [0] * len(FIRST_TOKEN_WAIT_BOUNDS)
        self._times = [0] * len(FIRST_TOKEN_WAIT_BOUNDS)
        self._gaps = [0] * len(TOKEN_GAP_BOUNDS)

    def arrived(self, sequence: Sequence) -> None:
        """Return the share of a new prompt that is expected in the cache: the share found so far."""
        self.arrived_requests += 1
        self.arrived_uncached_tokens += sequence.prompt_tokens * (1.0 - self.hit_share)

    @property
    def hit_share(self) -> float:
        """The cached share of prompt tokens so far."""
        return self.cached_prompt_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def admitted(self, sequence: Sequence) -> None:
        """For the first time."""
        self.prompt_tokens += sequence.prompt_tokens
        self.cached_prompt_tokens += sequence.cached

    def first_token(self, waited_seconds: float, whole_seconds: float) -> None:
        """Count a first token by the time that it waited, and by the whole time since its request arrived."""
        self._waits[bisect_left(FIRST_TOKEN_WAIT_BOUNDS, waited_seconds)] += 1
        self._times[bisect_left(FIRST_TOKEN_WAIT_BOUNDS, whole_seconds)] += 1

    def token_gaps(self, count: int, seconds: float) -> None:
        """Count tokens that came this long after the one before."""
        self._gaps[bisect_left(TOKEN_GAP_BOUNDS, seconds)] += count

    def first_token_waits(self) -> Histogram:
        return Histogram(bounds=FIRST_TOKEN_WAIT_BOUNDS, counts=tuple(accumulate(self._waits)))

    def first_token_times(self) -> Histogram:
        return Histogram(bounds=FIRST_TOKEN_WAIT_BOUNDS, counts=tuple(accumulate(self._times)))

    def gaps(self) -> Histogram:
        return Histogram(bounds=TOKEN_GAP_BOUNDS, counts=tuple(accumulate(self._gaps)))
