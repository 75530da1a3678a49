"""How many prompt tokens a step may compute, so that nobody waits for a step for long.

While sequences generate, the bound is ``--max-generation-stall``: a step with a long chunk of a prompt in it is a pause
for everyone who decodes, a *generation stall*, as Agrawal et al. call it in "Taming Throughput-Latency Tradeoff in LLM
Inference with Sarathi-Serve" (OSDI 2024). There chunks have a fixed number of tokens, profiled beforehand; here the
bound is in seconds, and the tokens follow from what steps were measured to cost, so that one default is right for every
machine, model and context:

    seconds = share x decoding + per_token x prompt tokens + per_pair x pairs of a prompt token and one it looks back on

where ``decoding`` is what a step without prompts takes. The chunks are as long as the bound allows, since every
chunk has a cost of its own: three quarters of the steps keep within the bound, and nearly all within 1.25 times of it.

Where decoding alone takes nearly as long as the bound, or longer, prompts get a quarter of it all the same: a bound
that cannot be met should not halt them.

While no sequence generates, a step takes at most ``MAX_STEP_SECONDS``. Until a step ends, no request that arrived since
is served and none that it computes can be cancelled, and the API process cannot tell whether the engine hangs.

Pure but for what it learned: it neither reads a clock nor knows sequences.
"""

from collections import deque
from dataclasses import dataclass
from math import sqrt

# Where nothing was measured: looking back on so many tokens costs as much as one token does otherwise.
_PAIRS_PER_TOKEN = 4096.0
# Standard deviations, relative to each cost: of a step's time, of the machine's speed from step to step, of one cost
# apart from the others from step to step, and of what the warm-up measured.
_NOISE = 0.08
_SPEED_DRIFT = 0.04
_COST_DRIFT = 0.05
_FIRST_ERRORS = (0.5, 0.2, 0.5, 0.5)
_LARGEST_ERROR = 1.0
_MOST_CHANGE = 4.0
_MOST_SURPRISE = 2.5
"""A step that took longer than so many times what was expected counts as if it had taken that long: one hiccup of the
machine does not halt all prompts. The same holds for shorter ones."""
_RATIOS_KEPT = 32
_LEAST_MARGIN = 1.07
_TOLERATED_EXCESS = 1.15
"""Of the bound, by all but one in ``_RATIOS_KEPT`` steps."""
_LEAST_SHARE_OF_PROMPTS = 0.25
SHORT_SHARE = 0.5
"""Of the time and the tokens that a step has for prompts: the share of short ones that would wait for a long one."""

MAX_STEP_SECONDS = 2.0
"""A step whose cost is known takes no longer, also while no sequence generates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds, as the warm-up measures them: where the scheduler's own averages begin. All above 0."""

    fixed: float
    """Of a step without prompts."""
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

    ``at_least`` prompt tokens may go into every step, however slow the machine: prompts get on. Without ``costs``
    the first chunks are no larger. Without ``alone_seconds`` prompts take what they want while no sequence generates.
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
        """Of recent steps with prompts: seconds over what was expected."""
        self._margin = self._margin_of_ratios()

    def expected_seconds(self, work: PromptWork) -> float:
        return sum(self._costs.parts(work)) if work.tokens else self._costs.decoding

    def allowed_tokens(
        self, work: PromptWork, start: int, *, seconds: float | None = None, share: float = 1.0, extra: int = 0
    ) -> int:
        """Return how many tokens of a prompt, from its token ``start`` on, fit into a step in addition to ``work``.

        ``seconds`` is the bound of this step, by default that of one in which others generate; prompts get a ``share``
        of what decoding leaves of it. ``extra`` tokens of ``work`` do not count against ``at_least``.
        """
        target = (self.max_seconds if seconds is None else seconds) / self._margin
        base, tokens, pairs = self._costs.parts(work)
        left = share * max(target - base, _LEAST_SHARE_OF_PROMPTS * target) - tokens - pairs
        fitting = 0
        if left > 0.0:
            # The root of per_pair / 2 n^2 + (per_token + per_pair start) n = left, in the form that keeps its digits.
            per_pair = self._costs.per_pair
            linear = self._costs.per_token + per_pair * start
            fitting = int(2.0 * left / (linear + sqrt(linear * linear + 2.0 * per_pair * left)))
        return max(fitting, self.at_least - (work.tokens - extra))

    def _margin_of_ratios(self) -> float:
        """Return by how much a step with prompts should be expected to stay below its bound, so that it keeps it."""
        nearly_worst = sorted(self._ratios)[-2]
        return max(_LEAST_MARGIN, nearly_worst / _TOLERATED_EXCESS)

    def observe(self, work: PromptWork, seconds: float) -> None:
        """Learn from what a step took, with or without prompts in it."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBound:
    """The bound on one step: the time that prompts and decoding may take together."""

    bound: StallBound
    seconds: float

    def allowed_tokens(self, work: PromptWork, start: int, *, extra: int = 0) -> int:
        """Return how many tokens of a prompt fit into the step in addition to ``work``; 0 or less is none."""
        return self.bound.allowed_tokens(work, start, seconds=self.seconds, extra=extra)

    def is_short(self, work: PromptWork, start: int, count: int) -> bool:
        """Return whether ``count`` tokens fit into the share of the step that a long prompt leaves to short ones."""
        return count <= self.bound.allowed_tokens(work, start, seconds=self.seconds, share=SHORT_SHARE)


class _LearntCosts:
    """A Kalman filter over the costs of a step, in relative terms.

    The state is the relative error of each cost, so no cost becomes negative and its unit does not matter. What a step
    shows corrects the costs by their share in it and by what earlier steps left uncertain: chunks of different lengths,
    at different places of a prompt, tell the costs apart. Steps without prompts tell only of decoding, so hours of
    these leave the costs of prompts as they are.
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
        """Return the seconds of a step with prompts: of what does not grow with them, of tokens, of pairs."""
        decoding, share, per_token, per_pair = self._costs
        return share * decoding, per_token * work.tokens, per_pair * work.pairs

    def learn_prompts(self, work: PromptWork, ratio: float) -> None:
        """Learn from a step with prompts that took ``ratio`` times what was expected."""
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
        """Learn from a step without prompts."""
        self._covariance[0][0] += _SPEED_DRIFT**2
        error = [row[0] for row in self._covariance]
        self._correct(error, error[0], ratio)

    def _correct(self, error: list[float], variance: float, ratio: float) -> None:
        """``error`` is the covariance of each cost with the expected time, ``variance`` that of the time."""
        variance += _NOISE**2
        for place, covariance in enumerate(error):
            factor = 1.0 + covariance / variance * (ratio - 1.0)
            self._costs[place] *= min(max(factor, 1.0 / _MOST_CHANGE), _MOST_CHANGE)
        for entries, covariance in zip(self._covariance, error, strict=True):
            gain = covariance / variance
            for column, other in enumerate(error):
                entries[column] -= gain * other
