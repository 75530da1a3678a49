"""The number of drafts that a step verifies, by measured costs and measured acceptance.

With acceptance rate a, the i-th draft of a sequence yields a further token with probability a^i, because all drafts
before it must be accepted as well. So for every total number of drafts the best distribution is known, and
``choose_lengths`` compares these totals by the expected tokens per second. Drafts begin at an expected gain of
``_START`` and end below ``_STAY``.

The costs are running averages over the steps themselves, so whatever is in use is measured. What is not in use is
probed: drafts by a few steps whose losses may take ``_PROBED_SHARE`` of the time, and steps without drafts by one in
``_LONGEST_DISTANCE``. Drafts that lost more than they gained recently end, whatever the costs say.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import exp, log
from typing import NamedTuple

from quire_engine.core.stall_bound import StepCosts

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""The numbers of tokens whose cost is learned, and the lower ends of the ranges of batch sizes."""
_LEAST_SHARE, _COMMON_SHARE = 0.15, 0.05
"""The least shares of a step's error that correct the measured size, and all sizes. The first steps correct more: the
estimates of the warm-up are often wrong, and by one factor everywhere."""
_CHANGES, _FIRST_CHANGES, _FIRST_STEPS = (0.25, 0.15), (1.0, 0.4), 4.0
"""The logarithms of the largest fall and rise that one step may claim, because hiccups, which only take longer, must
not decide; and those of the first steps of a size."""
_UNMEASURED = StepCosts(fixed=1.0, per_token=0.05, per_pair=0.0)
"""Costs in a unit of their own, if the warm-up measured none."""
_LEAST_COST_OF_TOKEN = 0.02
"""The least cost of a token at first, relative to a step of one: drafts that seem to be free would always be tried."""

_LARGEST_RATE, _LEAST_PROBABILITY = 0.98, 0.01
"""No draft counts as certain, so that of several sequences' drafts the earlier ones come first."""
_FINEST = 8
"""The most sequences for which every total number of drafts is compared; with twice as many, every second one is."""

_START, _STAY, _HOPELESS = 1.08, 1.02, 0.8
"""The expected gains from which on drafts begin, below which they end, and below which a probe of them ends early."""
_PROMISING = 0.5
"""Prompt lookup learns its rates without verification, and is probed only if one of them is at least this high."""
_PROBED_SHARE, _PROBE_STEPS = 0.005, 3
"""The share of all time that probes may lose, and their steps with drafts."""
_CATCH_UP = 3.0
"""The probable time in which a draft model computes what it has missed, in steps without drafts."""
_MOST_SAVED, _LARGEST_LOSS = 32.0, 16.0
"""The most that is saved for probes, and that one step of them counts as lost, in steps without drafts."""
_FEW = 2
"""The most sequences that are probed at first whatever the estimates say: a probe is never cheaper, and drafts gain
most there if they are accepted. They also choose again when a sequence has ended."""
_FIRST_WAIT, _LONGEST_WAIT, _MEASURED = 2, 64, 8
"""The steps without drafts after a choice against them, which double, and the last of them that are measured: other
steps cost nothing but a count."""
_FIRST_DISTANCE, _LONGEST_DISTANCE = 4, 64
"""The steps with drafts between measurements without them, which double."""
_LARGEST_EXCESS, _HICCUP = 4.0, 2.0
"""The time, in steps without drafts, whose loss ends drafts, and the multiple of its expected time that a step counts
as at most for that."""
_BESIDE_SHARE, _SURPRISE = 0.05, 1.3
"""The weight of the newest time for prompts, and the multiple of a draft model's expected time that is not for them."""


class CostTable:
    """The expected seconds of a step by its number of tokens, at least 1.

    The costs are not a line: up to a tile of rows, further tokens cost almost nothing, and then they cost in stairs. So
    a line has a correction at each of a few sizes, and one for all, which follows what changes all steps, such as a
    busy machine, and keeps seldom measured sizes comparable.
    """

    __slots__ = ("_all", "_fixed", "_own", "_per_token", "_steps", "_weights")

    def __init__(self, *, fixed: float, per_token: float) -> None:
        self._fixed, self._per_token = fixed, max(per_token, _LEAST_COST_OF_TOKEN * fixed)
        self._all, self._steps = 0.0, 0
        self._own, self._weights = [0.0] * len(_SIZES), [0.0] * len(_SIZES)

    def copy(self) -> "CostTable":
        """Return a table that starts with these costs."""
        other = CostTable(fixed=self._fixed, per_token=self._per_token)
        other._all, other._own = self._all, list(self._own)
        return other

    def seconds(self, tokens: int) -> float:
        place, share = _between(tokens)
        own = self._own[place]
        if share:
            own += (self._own[place + 1] - own) * share
        return (self._fixed + self._per_token * (tokens - 1)) * exp(self._all + own)

    def observe(self, tokens: int, seconds: float) -> None:
        """Correct the costs by a step of ``tokens`` tokens."""
        if seconds <= 0.0:
            return
        place, share = _between(tokens)
        fall, rise = _FIRST_CHANGES if self._weights[place] < _FIRST_STEPS else _CHANGES
        error = min(max(log(seconds / self.seconds(tokens)), -fall), rise)
        self._steps += 1
        known = self._weights[place] / (self._weights[place] + _FIRST_STEPS)
        self._all += max(_COMMON_SHARE * known, 0.4 / self._steps**2) * error
        for near, part in ((place, 1.0 - share), (place + 1, share)):
            if part:
                self._own[near] += max(_LEAST_SHARE, 0.5 / (1.0 + self._weights[near])) * part * error
                self._weights[near] += part


def _between(tokens: int) -> tuple[int, float]:
    """Return the number of the size at or below ``tokens``, and the share of the way to the next one."""
    place = bisect_right(_SIZES, tokens) - 1
    if place == len(_SIZES) - 1:
        return place, 0.0
    return place, (tokens - _SIZES[place]) / (_SIZES[place + 1] - _SIZES[place])


class AcceptanceRate:
    """The share of verified drafts that were accepted, with more weight on recent ones."""

    __slots__ = ("_accepted", "_keep", "_verified")

    def __init__(self, start: float, *, weight: float, memory: float) -> None:
        """``start`` counts like ``weight`` drafts; about ``memory`` drafts back count."""
        self._accepted, self._verified = start * weight, weight
        self._keep = 1.0 - 1.0 / memory

    @property
    def value(self) -> float:
        return self._accepted / self._verified

    def observe(self, accepted: int, verified: int) -> None:
        """Record a verification. Drafts after the first rejected one say nothing about the rate."""
        decided = min(accepted + 1, verified)
        kept = self._keep**decided
        self._accepted = self._accepted * kept + accepted
        self._verified = self._verified * kept + decided


class Choice(NamedTuple):
    lengths: list[int]
    """The best number of drafts for each sequence, at least one in total if any is possible."""
    gain: float
    """The expected tokens per second relative to those without drafts; 0 if none is possible."""
    tokens: float
    """The expected tokens per sequence."""


def choose_lengths(
    rates: Sequence[float],
    proposed: Sequence[int],
    *,
    others: int,
    most: int,
    seconds: Callable[[int], float],
    draft_seconds: Callable[[int], float] = lambda passes: 0.0,
) -> Choice:
    """Return the numbers of drafts that maximize the tokens per second, as if none were not among the choices.

    rates     the acceptance rate of each sequence with a proposal, 0 to 1
    proposed  the number of tokens proposed for each
    others    the sequences that decode in this step without a proposal
    most      the drafts that the step has room for
    seconds   the expected time of a step by its number of tokens
    draft_seconds  the time of a draft model by the largest number of drafts of a sequence
    """
    marginal = sorted(
        (
            (probability, -place)
            for place, (rate, length) in enumerate(zip(rates, proposed, strict=True))
            for probability in _probabilities(rate, length)
        ),
        reverse=True,
    )[: max(0, most)]
    base = others + len(rates)
    # With many sequences one draft more or less changes little, and each comparison costs the scheduler time.
    stride = max(1, base // _FINEST)
    expected = float(base)
    best, chosen, tokens = 0.0, 0, expected
    lengths, passes = [0] * len(rates), 0
    for total, (probability, place) in enumerate(marginal, start=1):
        expected += probability
        lengths[-place] += 1
        passes = max(passes, lengths[-place])
        if total % stride and total < len(marginal):
            continue
        speed = expected / (seconds(base + total) + draft_seconds(passes))
        if speed > best:
            best, chosen, tokens = speed, total, expected
    for _, place in marginal[chosen:]:
        lengths[-place] -= 1
    return Choice(lengths, best * seconds(base) / base, tokens / base)


def _probabilities(rate: float, length: int) -> list[float]:
    """Return the probabilities that the first, the first two, ... of ``length`` drafts are accepted.

    The first one counts, however small it is.
    """
    rate = min(rate, _LARGEST_RATE)
    probabilities: list[float] = []
    probability = rate
    for _ in range(length):
        if probability < _LEAST_PROBABILITY and probabilities:
            break
        probabilities.append(probability)
        probability *= rate
    return probabilities


class _Batches:
    """The state of one range of batch sizes."""

    __slots__ = (
        "distance",
        "draft_costs",
        "drafts",
        "excess",
        "is_new",
        "next_wait",
        "probe_left",
        "probe_loss",
        "until_plain",
        "wait",
    )

    def __init__(self) -> None:
        self.drafts, self.is_new = False, True
        """True while drafts are used, and until they first were."""
        self.wait, self.next_wait = 0, _FIRST_WAIT
        """The steps until the next choice."""
        self.until_plain, self.distance = 0, _FIRST_DISTANCE
        """The steps with drafts until one without them is measured."""
        self.probe_left = 0
        self.probe_loss = 0.0
        """The seconds that the last probe lost."""
        self.excess = 0.0
        """The time that the latest steps with drafts lost, in steps without them: of those since it was 0 last."""
        self.draft_costs: CostTable | None = None
        """The seconds of a draft model by the number of its passes in a step; None until drafts are chosen."""


class DraftPolicy:
    """The number of drafts of each sequence, by what was learned.

    ``most_drafts`` bounds those of one step. ``seconds_per_pass`` is the first estimate of the time in which a draft
    model computes one draft of all sequences; without a draft model it is None.
    """

    def __init__(self, costs: StepCosts | None, *, most_drafts: int, seconds_per_pass: float | None = None) -> None:
        first = _UNMEASURED if costs is None else costs
        self._most_drafts = most_drafts
        self._costs = CostTable(fixed=first.fixed, per_token=first.per_token)
        self._first_draft_costs = None
        if seconds_per_pass is not None:
            self._first_draft_costs = CostTable(fixed=seconds_per_pass, per_token=seconds_per_pass)
        self._batches = [_Batches() for _ in _SIZES]
        self._now, self._decoding = self._batches[0], 1
        """The range of the step that was started last, and the decoding sequences of the last choice."""
        self._has_chosen = self._drafting = False
        """True after the first choice, and while steps have drafts, so that a draft model misses nothing."""
        self._saved = 0.0
        """The seconds that probes may lose."""
        self._prompts = 0.0
        """The seconds in which a draft model computes prompts, per step with drafts."""
        self._unpaid_prompts, self._unmeasured = 0.0, 0
        """The seconds of them since the last measured step with drafts, and the steps with drafts meanwhile."""

    def _of(self, sequences: int) -> _Batches:
        return self._batches[bisect_right(_SIZES, max(1, sequences)) - 1]

    def excludes_drafts(self, sequences: int) -> bool:
        """Return whether the next step, of so many running sequences, has no drafts. The state does not change."""
        batches = self._of(sequences)
        return batches.wait > 0 or not batches.until_plain

    def begin_step(self, sequences: int) -> bool:
        """Return whether the next step may have drafts, and count it."""
        batches = self._now = self._of(sequences)
        if batches.wait:
            batches.wait -= 1
            self._drafting = False
            return False
        if not batches.until_plain:
            batches.until_plain = batches.distance
            batches.distance = min(2 * batches.distance, _LONGEST_DISTANCE)
            return False
        return True

    @property
    def prepares(self) -> bool:
        """True if a draft model should compute prompts: drafts are used, or nothing has been chosen yet."""
        return self._now.drafts or not self._has_chosen

    def choose(self, rates: Sequence[float], proposed: Sequence[int], *, others: int) -> list[int]:
        """Return the number of drafts for each sequence with a proposal; ``others`` decode without one."""
        batches, self._decoding = self._now, len(rates) + others
        choice = choose_lengths(
            rates,
            proposed,
            others=others,
            most=self._most_drafts,
            seconds=self._costs.seconds,
            draft_seconds=self._draft_seconds,
        )
        if self._goes_on(choice) or self._begins(choice, max(rates)):
            batches.until_plain -= 1
            batches.probe_left = max(0, batches.probe_left - 1)
        else:
            batches.drafts, batches.probe_left = False, 0
            batches.wait = batches.next_wait
            batches.next_wait = min(2 * batches.next_wait, _LONGEST_WAIT)
            self._prompts *= 1.0 - _BESIDE_SHARE
        self._has_chosen, self._drafting = True, batches.drafts
        return choice.lengths if batches.drafts else [0] * len(rates)

    def _goes_on(self, choice: Choice) -> bool:
        """Return whether drafts stay: while they pay, and for the steps of a probe unless these lose much."""
        batches = self._now
        if not batches.drafts or batches.excess > _LARGEST_EXCESS:
            return False
        return choice.gain >= (_HOPELESS if batches.probe_left else _STAY)

    def _begins(self, choice: Choice, best_rate: float) -> bool:
        """Return whether drafts begin, because they pay or to probe them, and what they may lose at first is saved."""
        batches = self._now
        if batches.drafts or not any(choice.lengths):
            return False
        plain = self._costs.seconds(self._decoding)
        by_model = self._first_draft_costs is not None
        if not by_model and best_rate < _PROMISING:
            return False
        loss = max(0.0, _PROBE_STEPS * plain * (choice.tokens / max(choice.gain, 1e-9) - choice.tokens))
        if by_model:
            loss += _CATCH_UP * plain
        pays = choice.gain >= _START and (batches.is_new or self._drafting)
        is_cheap = batches.is_new and by_model and self._decoding <= _FEW
        if not (pays or is_cheap) and self._saved < max(loss, batches.probe_loss):
            return False
        batches.drafts, batches.is_new, batches.next_wait = True, False, _FIRST_WAIT
        batches.probe_left, batches.probe_loss, batches.excess = _PROBE_STEPS, 0.0, 0.0
        return True

    def _draft_seconds(self, passes: int) -> float:
        """Return the expected time of the draft model in a step, with its share of that for prompts."""
        costs = self._draft_costs()
        return 0.0 if costs is None else costs.seconds(passes) + self._prompts

    def _draft_costs(self) -> CostTable | None:
        """Return the costs of drafting, which start with those of the next smaller batches."""
        batches = self._now
        if batches.draft_costs is None and self._first_draft_costs is not None:
            place = self._batches.index(batches)
            known = [other.draft_costs for other in self._batches[:place] if other.draft_costs is not None]
            batches.draft_costs = (known[-1] if known else self._first_draft_costs).copy()
        return batches.draft_costs

    def sequence_ended(self) -> None:
        """Choose again with few sequences, because the next one may be easier to predict."""
        for batches in self._batches[:_FEW]:
            batches.wait, batches.next_wait = 0, _FIRST_WAIT

    def observe_prompts(self, draft_seconds: float, *, passes: int) -> None:
        """Learn from a step that is not measured, in which a draft model may have computed prompts."""
        costs = self._draft_costs() if passes else None
        self._unpaid_prompts += max(0.0, draft_seconds - (costs.seconds(passes) if costs is not None else 0.0))
        self._unmeasured += passes > 0

    def observe_step(
        self,
        tokens: int,
        seconds: float,
        *,
        drafts: int = 0,
        accepted: int = 0,
        passes: int = 0,
        draft_seconds: float = 0.0,
    ) -> None:
        """Learn from a step with few prompt tokens or none, of which ``drafts`` tokens are drafts.

        ``passes`` is the largest number of drafts of a sequence; ``seconds`` include the ``draft_seconds``. A step with
        drafts is the one that was started last.
        """
        batches = self._now
        self._saved += _PROBED_SHARE * seconds
        if drafts:
            self._account(tokens, seconds, drafts=drafts, accepted=accepted, passes=passes)
            self._observe_drafting(passes, draft_seconds)
        else:
            self._unpaid_prompts += draft_seconds
            if batches.wait > _MEASURED:
                return
            self._saved = min(self._saved, _MOST_SAVED * seconds)
            if seconds < self._costs.seconds(tokens) / _HICCUP:  # drafts may not pay any longer: measure soon again
                batches.until_plain = batches.distance = _FIRST_DISTANCE
        self._costs.observe(tokens, seconds - draft_seconds)

    def _account(self, tokens: int, seconds: float, *, drafts: int, accepted: int, passes: int) -> None:
        """Count what a step with drafts lost, or gained if negative, compared with steps without them."""
        batches, plain = self._now, self._costs.seconds(self._decoding)
        without = self._costs.seconds(tokens - drafts) + plain * accepted / self._decoding
        loss = min(seconds, _LARGEST_LOSS * without) + self._unpaid_prompts / (1 + self._unmeasured) - without
        self._saved = min(self._saved - loss, _MOST_SAVED * plain)
        if batches.probe_left:
            batches.probe_loss += loss
        else:
            expected = self._costs.seconds(tokens) + self._draft_seconds(passes)
            batches.excess = max(0.0, batches.excess + (min(seconds, _HICCUP * expected) - without) / plain)

    def _observe_drafting(self, passes: int, seconds: float) -> None:
        costs = self._draft_costs()
        if costs is not None:
            expected = costs.seconds(passes)
            costs.observe(passes, seconds)
            if self._now.probe_left != _PROBE_STEPS - 1:  # else it computed what it had missed before
                self._unpaid_prompts += max(0.0, seconds - _SURPRISE * expected)
        self._prompts += _BESIDE_SHARE * (self._unpaid_prompts / (1 + self._unmeasured) - self._prompts)
        self._unpaid_prompts, self._unmeasured = 0.0, 0
