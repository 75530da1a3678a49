"""The bound on a step's time, and the number of prompt tokens that a step may compute within it.

While sequences generate, the bound is ``--max-generation-stall``: a step with a long chunk of a prompt is a pause for
every sequence that decodes, a *generation stall*, as Agrawal et al. call it in "Taming Throughput-Latency Tradeoff in
LLM Inference with Sarathi-Serve" (OSDI 2024). There, chunks have a fixed number of tokens, profiled beforehand. Here
the bound is in seconds, and the tokens follow from the measured cost of a token, so that one default fits every
machine, model and context. While no sequence generates, a step takes at most ``MAX_STEP_SECONDS``: until it ends, no
new request is served, no running one can be cancelled, and the API process cannot detect whether the engine hangs.
"""

from dataclasses import dataclass
from math import sqrt

# If nothing was measured: attending to this many tokens costs as much as one token does otherwise.
_PAIRS_PER_TOKEN = 4096.0
# The weights of the newest step in the averages. A cost rises faster than it falls, so that chunks are shorter on a
# machine whose speed varies.
_RISE, _FALL = 0.4, 0.15
_MAX_SURPRISE = 2.5
"""A step that took longer than this multiple of its expected time counts as that multiple: one hiccup of the machine
does not halt all prompts. The same holds for shorter steps."""
_MARGIN = 1.07
_MIN_SHARE_OF_PROMPTS = 0.25
"""The share of the bound for prompts where decoding alone takes nearly as long as the bound, or longer."""
SHORT_SHARE = 0.5
"""The share of a step's time and prompt tokens for short prompts that would otherwise wait for a long one."""

MAX_STEP_SECONDS = 2.0
"""The maximum time of a step of known cost while no sequence generates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """The costs in seconds, as the warm-up measures them; all above 0."""

    fixed: float
    """The time of a step without prompts."""
    per_token: float
    per_pair: float
    """The time per pair of a prompt token and a token that it sees."""


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
        self._at_least = at_least
        self._decoding, self._per_token = costs.fixed, costs.per_token
        self._tokens_per_pair = costs.per_pair / costs.per_token

    def expected_seconds(self, work: PromptWork) -> float:
        return self._decoding + self._per_token * (work.tokens + self._tokens_per_pair * work.pairs)

    def allowed_tokens(
        self, work: PromptWork, start: int, *, seconds: float | None = None, share: float = 1.0, extra: int = 0
    ) -> int:
        """Return how many tokens of a prompt, from its token ``start`` on, fit into a step in addition to ``work``.

        ``seconds`` is the bound of this step, by default that of one in which other sequences generate; prompts get a
        ``share`` of what decoding leaves. ``extra`` tokens of ``work`` do not count against ``at_least``.
        """
        target = (self.max_seconds if seconds is None else seconds) / _MARGIN
        left = share * max(target - self._decoding, _MIN_SHARE_OF_PROMPTS * target)
        tokens = left / self._per_token - work.tokens - self._tokens_per_pair * work.pairs
        fitting = 0
        if tokens > 0.0:
            # The root of per_pair / 2 n^2 + (1 + per_pair start) n = tokens, in the numerically stable form.
            linear = 1.0 + self._tokens_per_pair * start
            fitting = int(2.0 * tokens / (linear + sqrt(linear * linear + 2.0 * self._tokens_per_pair * tokens)))
        return max(fitting, self._at_least - (work.tokens - extra))

    def observe(self, work: PromptWork, seconds: float) -> None:
        """Update the cost of decoding, or that of a prompt token, from the time of a step."""
        if seconds <= 0.0:
            return
        expected = self.expected_seconds(work)
        seconds = min(max(seconds, expected / _MAX_SURPRISE), expected * _MAX_SURPRISE)
        if not work.tokens:
            self._decoding += _FALL * (seconds - self._decoding)
            return
        # Decoding may be cheaper in a step with prompts, but a token costs something.
        prompts = max(seconds - self._decoding, _MIN_SHARE_OF_PROMPTS * seconds)
        per_token = prompts / (work.tokens + self._tokens_per_pair * work.pairs)
        self._per_token += (_RISE if per_token > self._per_token else _FALL) * (per_token - self._per_token)
