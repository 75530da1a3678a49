"""The bound on a step's time, and the number of prompt tokens that a step may compute within it.

While sequences generate, the bound is ``--max-generation-stall``: a step with a long chunk of a prompt is a pause for
every sequence that decodes, a *generation stall*, as Agrawal et al. call it in "Taming Throughput-Latency Tradeoff in
LLM Inference with Sarathi-Serve" (OSDI 2024). There, chunks have a fixed number of tokens, profiled beforehand. Here
the bound is in seconds, and the tokens follow from the measured cost of steps, so that one default fits every machine,
model and context:

    seconds = share x decoding + per_token x prompt tokens + per_pair x pairs of a prompt token and a token it sees

where ``decoding`` is the time of a step without prompts. The chunks are as long as the bound allows, because every
chunk has a fixed cost: three quarters of the steps stay within the bound, and nearly all within 1.25 times of it.

If decoding alone takes nearly as long as the bound, or longer, prompts still get a quarter of it: a bound that cannot
be met must not halt them.

While no sequence generates, a step takes at most ``MAX_STEP_SECONDS``. Until a step ends, no new request is served, no
running one can be cancelled, and the API process cannot detect whether the engine hangs.

The class is pure except for what it learned: it neither reads a clock nor knows sequences.
"""

from collections import deque
from dataclasses import dataclass
from math import sqrt

# If nothing was measured: attending to this many tokens costs as much as one token does otherwise.
_PAIRS_PER_TOKEN = 4096.0
# Standard deviations, relative to each cost: of a step's time, of the machine's speed from step to step, of a single
# cost from step to step, and of the warm-up's measurements.
_NOISE = 0.08
_SPEED_DRIFT = 0.04
_COST_DRIFT = 0.05
_FIRST_ERRORS = (0.5, 0.2, 0.5, 0.5)
_LARGEST_ERROR = 1.0
_MOST_CHANGE = 4.0
_MOST_SURPRISE = 2.5
"""A step that took longer than this multiple of its expected time counts as that multiple: one hiccup of the machine
does not halt all prompts. The same holds for shorter steps."""
_RATIOS_KEPT = 32
_LEAST_MARGIN = 1.07
_TOLERATED_EXCESS = 1.15
"""The tolerated multiple of the bound, for all but one in ``_RATIOS_KEPT`` steps."""
_LEAST_SHARE_OF_PROMPTS = 0.25
SHORT_SHARE = 0.5
"""The share of a step's time and prompt tokens for short prompts that would otherwise wait for a long one."""

MAX_STEP_SECONDS = 2.0
"""The maximum time of a step of known cost while no sequence generates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """The costs in seconds, as the warm-up measures them: the initial values of the scheduler's averages.

    All above 0.
    """

    fixed: float
    """The time of a step without prompts."""
    per_token: float
    per_pair: float


@dataclass(slots=True)
class PromptWork:
    """The prompt tokens of one step."""

    tokens: int = 0
    pairs: float = 0.0

    def add(self, start: int, count: int) -> None:
        self.tokens += count
        self.pairs += count * (start + count / 2)


class StallBound:
    """The bounds on a step's time: ``max_seconds`` while sequences generate, else ``alone_seconds``.

    ``at_least`` prompt tokens may be in every step, however slow the machine, so that prompts progress. Without
    ``costs`` the first chunks are no larger. Without ``alone_seconds`` prompts are unbounded while no sequence
    generates.
    """

    def __init__(
        self,
        max_seconds: float,
        *,
        at_least: int,
        costs: StepCosts | None = None,
        alone_seconds: float | None = None,
    ) -> None:
        assert max_seconds > 0.0 and at_least > 0
        if costs is None:
            slow = max_seconds / at_least
            costs = StepCosts(fixed=slow, per_token=slow, per_pair=slow / _PAIRS_PER_TOKEN)
        self.max_seconds = max_seconds
        self.alone_seconds = alone_seconds
        self.at_least = at_least
        self._costs = _LearntCosts(costs)
        self._ratios: deque[float] = deque((_TOLERATED_EXCESS,) * 2, maxlen=_RATIOS_KEPT)
        """The actual divided by the expected seconds of recent steps with prompts."""
        self._margin = self._margin_of_ratios()

    def expected_seconds(self, work: PromptWork) -> float:
        return sum(self._costs.parts(work)) if work.tokens else self._costs.decoding

    def allowed_tokens(
        self, work: PromptWork, start: int, *, seconds: float | None = None, share: float = 1.0, extra: int = 0
    ) -> int:
        """Return how many tokens of a prompt, from its token ``start`` on, fit into a step in addition to ``work``.

        ``seconds`` is the bound of this step, by default that of one in which other sequences generate; prompts get a
        ``share`` of what decoding leaves. ``extra`` tokens of ``work`` do not count against ``at_least``.
        """
        target = (self.max_seconds if seconds is None else seconds) / self._margin
        base, tokens, pairs = self._costs.parts(work)
        left = share * max(target - base, _LEAST_SHARE_OF_PROMPTS * target) - tokens - pairs
        fitting = 0
        if left > 0.0:
            # The root of per_pair / 2 n^2 + (per_token + per_pair start) n = left, in the numerically stable form.
            per_pair = self._costs.per_pair
            linear = self._costs.per_token + per_pair * start
            fitting = int(2.0 * left / (linear + sqrt(linear * linear + 2.0 * per_pair * left)))
        return max(fitting, self.at_least - (work.tokens - extra))

    def _margin_of_ratios(self) -> float:
        """Return the factor by which a step with prompts should be expected to stay below its bound."""
        nearly_worst = sorted(self._ratios)[-2]
        return max(_LEAST_MARGIN, nearly_worst / _TOLERATED_EXCESS)

    def observe(self, work: PromptWork, seconds: float) -> None:
        """Update the costs from the time of a step, with or without prompts."""
        if seconds <= 0.0:
            return
        expected = self.expected_seconds(work)
        ratio = min(max(seconds / expected, 1.0 / _MOST_SURPRISE), _MOST_SURPRISE)
        if work.tokens:
            self._ratios.append(ratio)
            self._margin = self._margin_of_ratios()
            self._costs.learn_prompts(work, ratio)
        else:
            self._costs.learn_decoding(ratio)


class _LearntCosts:
    """A Kalman filter over the costs of a step, in relative terms.

    The state is the relative error of each cost, so no cost becomes negative and its unit does not matter. A step's
    time corrects the costs by their share in it and by their remaining uncertainty: chunks of different lengths, at
    different places of a prompt, separate the costs. Steps without prompts only inform about decoding, so hours of them
    leave the costs of prompts unchanged.
    """

    __slots__ = ("_costs", "_covariance")

    def __init__(self, costs: StepCosts) -> None:
        self._costs = [costs.fixed, 1.0, costs.per_token, costs.per_pair]
        self._covariance = [
            [error**2 if row == column else 0.0 for column in range(4)] for row, error in enumerate(_FIRST_ERRORS)
        ]

    @property
    def decoding(self) -> float:
        return self._costs[0]

    @property
    def per_token(self) -> float:
        return self._costs[2]

    @property
    def per_pair(self) -> float:
        return self._costs[3]

    def parts(self, work: PromptWork) -> tuple[float, float, float]:
        """Return the seconds of a step with prompts: the fixed part, that of tokens, and that of pairs."""
        decoding, share, per_token, per_pair = self._costs
        return share * decoding, per_token * work.tokens, per_pair * work.pairs

    def learn_prompts(self, work: PromptWork, ratio: float) -> None:
        """Update the costs from a step with prompts that took ``ratio`` times the expected time."""
        parts = self.parts(work)
        expected = sum(parts)
        base, tokens, pairs = (part / expected for part in parts)
        for row, entries in enumerate(self._covariance):
            for column in range(4):
                entries[column] += _SPEED_DRIFT**2
            entries[row] += _COST_DRIFT**2
        largest = max(self._covariance[place][place] for place in range(4))
        if largest > _LARGEST_ERROR**2:
            shrink = _LARGEST_ERROR**2 / largest
            self._covariance = [[entry * shrink for entry in entries] for entries in self._covariance]
        error = [(row[0] + row[1]) * base + row[2] * tokens + row[3] * pairs for row in self._covariance]
        self._correct(error, (error[0] + error[1]) * base + error[2] * tokens + error[3] * pairs, ratio)

    def learn_decoding(self, ratio: float) -> None:
        """Update the costs from a step without prompts."""
        self._covariance[0][0] += _SPEED_DRIFT**2
        error = [row[0] for row in self._covariance]
        self._correct(error, error[0], ratio)

    def _correct(self, error: list[float], variance: float, ratio: float) -> None:
        """Correct the costs and their covariance.

        ``error`` is the covariance of each cost with the expected time, ``variance`` that of the time.
        """
        variance += _NOISE**2
        for place, covariance in enumerate(error):
            factor = 1.0 + covariance / variance * (ratio - 1.0)
            self._costs[place] *= min(max(factor, 1.0 / _MOST_CHANGE), _MOST_CHANGE)
        for entries, covariance in zip(self._covariance, error, strict=True):
            gain = covariance / variance
            for column, other in enumerate(error):
                entries[column] -= gain * other
