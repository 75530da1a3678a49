"""The number of drafts that each sequence gets in a step: those that maximize the expected tokens per second.

With acceptance rate a, the i-th draft of a sequence yields a further token with probability a^i, because all drafts
before it must be accepted as well. A draft costs what a step with one more token costs. So for every total number of
drafts the best choice is known: those with the highest probabilities. ``choose_lengths`` compares all these totals,
including none, by the measured cost of steps; with many sequences, some of them.
"""

from collections.abc import Callable, Sequence

_LARGEST_RATE = 0.98
"""No draft counts as certain, so that of several sequences' drafts the earlier ones come first."""
_LEAST_PROBABILITY = 0.01
_FINEST = 8
"""The most sequences for which every total number of drafts is compared; with twice as many, every second one is."""
LEAST_GAIN = 1.1
"""Drafts must be expected to increase the tokens per second by this factor. Less is within the error of the costs,
which do not include the scheduler's own time; and sequences that advance unevenly leave smaller steps to the last
ones."""


def choose_lengths(
    rates: Sequence[float],
    proposed: Sequence[int],
    *,
    others: int,
    most: int,
    seconds: Callable[[int], float],
    seconds_per_pass: float = 0.0,
    least_gain: float = LEAST_GAIN,
) -> list[int]:
    """Return the number of drafts for each sequence with a proposal.

    rates     the acceptance rate of each sequence with a proposal, 0 to 1
    proposed  the number of tokens proposed for each
    others    the sequences that decode in this step without a proposal
    most      the drafts that the step has room for
    seconds   the expected time of a step by its number of tokens
    seconds_per_pass  the time of a draft model for one draft of all sequences; 0 without a draft model
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
    best, chosen = least_gain * expected / seconds(base), 0
    lengths, passes = [0] * len(rates), 0
    for total, (probability, place) in enumerate(marginal, start=1):
        expected += probability
        lengths[-place] += 1
        passes = max(passes, lengths[-place])
        if total % stride and total < len(marginal):
            continue
        per_second = expected / (seconds(base + total) + passes * seconds_per_pass)
        if per_second > best:
            best, chosen = per_second, total
    for _, place in marginal[chosen:]:
        lengths[-place] -= 1
    return lengths


def _probabilities(rate: float, length: int) -> list[float]:
    """Return the probabilities that the first, the first two, ... of ``length`` drafts are accepted."""
    rate = min(rate, _LARGEST_RATE)
    probabilities = []
    probability = rate
    for _ in range(length):
        if probability < _LEAST_PROBABILITY:
            break
        probabilities.append(probability)
        probability *= rate
    return probabilities


class AcceptanceRate:
    """The share of verified drafts that were accepted, with more weight on recent ones.

    A sequence starts with a rate that it does not have to trust for long.
    """

    __slots__ = ("_kept", "_total", "_weight")

    def __init__(self, start: float, *, weight: float, memory: float) -> None:
        """``start`` counts like ``weight`` drafts; about ``memory`` drafts back count."""
        self._kept = start * weight
        self._total = weight
        self._weight = 1.0 - 1.0 / memory

    @property
    def value(self) -> float:
        return self._kept / self._total

    def observe(self, accepted: int, verified: int) -> None:
        """Record a verification. Drafts after the first rejected one say nothing about the rate."""
        decided = min(accepted + 1, verified)
        forgotten = self._weight**decided
        self._kept = self._kept * forgotten + accepted
        self._total = self._total * forgotten + decided
