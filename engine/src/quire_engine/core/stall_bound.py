"""How many prompt tokens a step may take while other sequences generate, so that none of these waits for long.

A step with a long chunk of a prompt in it is a pause for everyone who decodes: a *generation stall*, as Agrawal et al.
call it in "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (OSDI 2024). There chunks have a
fixed number of tokens, profiled beforehand; here the bound is in seconds, and the tokens follow from what steps were
measured to cost, so that one default is right for every machine, model and context:

    seconds = fixed + per_token x prompt tokens + per_pair x pairs of a prompt token and one it looks back on

Where decoding alone takes nearly as long as the bound, or longer, prompts get a quarter of it all the same: a bound
that cannot be met should not halt them. Pure but for the averages: it neither reads a clock nor knows sequences.
"""

from dataclasses import dataclass
from math import sqrt

# Where nothing was measured: looking back on so many tokens costs as much as one token does otherwise.
_PAIRS_PER_TOKEN = 4096.0
_LEARNING_RATE = 0.3
_MOST_SURPRISE = 2.5
"""A step that took longer than so many times what was expected counts as if it had taken that long: one hiccup of the
machine does not halt all prompts. The same holds for shorter ones."""
_SPREAD_RATE = 0.1
_SPREADS_KEPT_FREE = 3.0
_LEAST_SHARE_OF_PROMPTS = 0.25


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
    """``at_least`` prompt tokens may go into every step, however slow the machine: prompts get on. Without ``costs``
    the first chunks are no larger."""

    def __init__(self, max_seconds: float, *, at_least: int, costs: StepCosts | None = None) -> None:
        assert max_seconds > 0.0 and at_least > 0
        if costs is None:
            slow = max_seconds / at_least
            costs = StepCosts(fixed=slow, per_token=slow, per_pair=slow / _PAIRS_PER_TOKEN)
        self.max_seconds = max_seconds
        self.at_least = at_least
        self._fixed, self._per_token, self._per_pair = costs.fixed, costs.per_token, costs.per_pair
        self._spread = 0.05
        """By how much steps took longer than expected, as a share of it, on average."""

    def expected_seconds(self, work: PromptWork) -> float:
        return self._fixed + self._per_token * work.tokens + self._per_pair * work.pairs

    def allowed_tokens(self, work: PromptWork, start: int) -> int:
        """Tokens of a prompt, from its token ``start`` on, that fit into a step beside ``work``. 0 is none."""
        bound = self.max_seconds / (1.0 + _SPREADS_KEPT_FREE * self._spread)
        prompts = max(bound - self._fixed, _LEAST_SHARE_OF_PROMPTS * bound)
        left = prompts + self._fixed - self.expected_seconds(work)
        fitting = 0
        if left > 0.0:
            # The root of per_pair / 2 n^2 + (per_token + per_pair start) n = left, in the form that keeps its digits.
            linear = self._per_token + self._per_pair * start
            fitting = int(2.0 * left / (linear + sqrt(linear * linear + 2.0 * self._per_pair * left)))
        return max(fitting, self.at_least - work.tokens)

    def observe(self, work: PromptWork, seconds: float) -> None:
        """What a step took, with or without prompts in it. Each part of the cost answers for its share of an error."""
        if seconds <= 0.0:
            return
        expected = self.expected_seconds(work)
        surprise = min(max(seconds / expected, 1.0 / _MOST_SURPRISE), _MOST_SURPRISE) - 1.0
        if work.tokens:
            self._spread += _SPREAD_RATE * (max(0.0, surprise) - self._spread)
        change = _LEARNING_RATE * surprise / expected
        self._fixed *= 1.0 + change * self._fixed
        self._per_token *= 1.0 + change * self._per_token * work.tokens
        self._per_pair *= 1.0 + change * self._per_pair * work.pairs
