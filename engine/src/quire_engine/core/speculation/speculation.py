"""Speculation for the scheduler: the drafts of each step, and what their verification teaches.

A draft is a token that a sequence may continue with. A step computes a sequence's last token and its drafts together,
samples after each of them with the seed and the position that the sequence has there in any case, and keeps the sampled
tokens up to the first that differs from its draft. So the answer is the one without speculation; drafts only decide how
many steps it takes.

The scheduler calls ``plan`` before each step and ``verified`` after it. Nothing here knows tensors or the clock.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Sequence
from quire_engine.core.speculation.draft_lengths import LEAST_GAIN, AcceptanceRate, choose_lengths
from quire_engine.core.speculation.ngram import NgramIndex
from quire_engine.core.speculation.step_curve import StepCurve, knot
from quire_engine.core.stall_bound import StepCosts
from quire_engine.core.stats import Counters

_FIRST_RATE = 0.6
_MOST_SEQUENCES = 1024
_ENGINE_MEMORY = 2000.0
_SEQUENCE_MEMORY = 24.0
_PRIOR_WEIGHT = 2.0
_PASS_SHARE, _LARGEST_SURPRISE = 0.1, 3.0
"""The weight of the newest time of a draft model's pass, and the most by which one may exceed the expected time."""
_PROMISING = 0.5
"""Drafts that are probably accepted are tried from time to time even if the learned costs speak against them: those of
steps with drafts are learned from no others."""
_FIRST_PLAIN, _RAREST_PLAIN = 16, 1024
"""The steps with drafts between those without any, which measure what drafts have to beat: else an estimate that is too
high would stay. The first step has none, and the distances double."""
_REST = 7
"""The steps for which the decision against a draft model's drafts stays, if the same sequences decode: a step without
drafts teaches nothing about them, and deciding for many sequences takes a tenth of a small model's step."""
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 1024
"""The steps between such trials. Each trial that changes nothing doubles them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramSettings:
    """The settings of prompt lookup: how many recent tokens must have occurred before."""

    shortest: int
    longest: int


class Proposer(Protocol):
    """The source of drafts for one sequence."""

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Return up to ``most`` tokens that may follow ``token_ids``, which only ever grows between calls."""


class ProposerFactory(Protocol):
    def __call__(self, sequence: Sequence) -> Proposer: ...


class NgramProposer:
    """A ``Proposer`` by prompt lookup."""

    __slots__ = ("_index",)

    def __init__(self, settings: NgramSettings, most_tokens: int) -> None:
        self._index = NgramIndex(shortest=settings.shortest, longest=settings.longest, most_tokens=most_tokens)

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        return self._index.propose(token_ids, most) if self._index.extend(token_ids) else []


class OpenProposer:
    """A ``Proposer`` whose drafts the runner's draft model fills in: only their number is decided here."""

    __slots__ = ()

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        return [0] * most


def ngram_proposers(settings: NgramSettings) -> ProposerFactory:
    """Return a function that gives each sequence its own index."""
    return lambda sequence: NgramProposer(settings, sequence.limit)


def why_not(params: SamplingParams) -> str | None:
    """Return why verification cannot sample as the sequence would by itself; None if it can.

    These parameters change logits by the tokens sampled before, so a draft would have to be accepted before the next
    one can be verified.
    """
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
        return "penalties"
    if params.bad_words_token_ids:
        return "bad_words"
    return "min_tokens" if params.min_tokens else None


class _State:
    """The proposer and the acceptance rate of one sequence."""

    __slots__ = ("expected", "proposer", "rate", "reason")

    def __init__(self, reason: str, proposer: Proposer | None, rate: AcceptanceRate) -> None:
        self.reason = reason
        """The reason for taking no drafts; empty if it has a proposer."""
        self.proposer = proposer
        self.rate = rate
        self.expected: tuple[int, int] | None = None
        """A position and the token proposed for it, if the step did not verify it: its success is learned anyway."""


class _Plain:
    """The steps without drafts that measure the cost of doing without."""

    __slots__ = ("_left", "_pause")

    def __init__(self) -> None:
        self._left, self._pause = 0, _FIRST_PLAIN

    def is_due(self) -> bool:
        """Return whether the next step should have no drafts; called before each step that would have some."""
        if self._left:
            self._left -= 1
            return False
        self._left, self._pause = self._pause, min(2 * self._pause, _RAREST_PLAIN)
        return True


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A sequence with a proposal for the next step."""

    sequence: Sequence
    state: _State
    proposal: list[int]


class Speculation:
    """The drafts of all sequences.

    ``most_drafts`` bounds those of one step, whose logits all exist at once. ``seconds_per_pass`` is the first estimate
    of the time in which a draft model computes one draft of all sequences; without a draft model it is None.
    """

    def __init__(
        self,
        proposers: ProposerFactory,
        *,
        max_tokens: int,
        most_drafts: int,
        costs: StepCosts | None,
        seconds_per_pass: float | None = None,
    ) -> None:
        self._seconds_per_pass = seconds_per_pass
        self._proposers = proposers
        self._max_tokens = max_tokens
        self._most_drafts = most_drafts
        self._curve = StepCurve(costs)
        self._states: dict[int, _State] = {}
        self._rate = AcceptanceRate(_FIRST_RATE, weight=10.0, memory=_ENGINE_MEMORY)
        self._pause, self._waited = _FIRST_PAUSE, 0
        self._plain = [_Plain() for _ in range(knot(_MOST_SEQUENCES) + 1)]
        """The steps without drafts by the number of decoding sequences, in parts of the curve."""
        self._rest, self._resting, self._undrafted = 0, 0, Counter[str]()
        """The steps that rest without a decision, the running sequences meanwhile, and why they take no drafts."""
        self.pays = True
        """False if the last decision was against drafts, so that computing prompts for them is probably in vain."""

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._rest = 0
        self._states.pop(sequence.key, None)

    def plan(self, running: list[Sequence], counters: Counters) -> dict[int, list[int]]:
        """Return the drafts that the next step should verify, by the key of their sequence."""
        if self._rest and len(running) == self._resting:
            self._rest -= 1
            self._waited += 1
            counters.undrafted_sequences.update(self._undrafted)
            return {}
        candidates: list[_Candidate] = []
        without: Counter[str] = Counter()
        for sequence in running:
            if sequence.num_pending or not sequence.decodes or sequence.num_tokens - sequence.num_computed != 1:
                continue
            state = self._state(sequence)
            if state.proposer is None:
                without[state.reason] += 1
                continue
            self._learn_unverified(sequence, state)
            # The last token within the limit is never computed, so the drafts end before it.
            most = min(self._max_tokens, sequence.limit - sequence.num_tokens - 1)
            proposal = state.proposer.propose(sequence.token_ids, most) if most > 0 else []
            if proposal:
                candidates.append(_Candidate(sequence, state, proposal))
            else:
                without["no_proposal"] += 1
        lengths = self._choose(candidates, others=without.total()) if candidates else []
        drafts: dict[int, list[int]] = {}
        for candidate, length in zip(candidates, lengths or [0] * len(candidates), strict=True):
            if length:
                drafts[candidate.sequence.key] = candidate.proposal[:length]
            else:
                without["cost"] += 1
                if self._seconds_per_pass is None:
                    candidate.state.expected = (candidate.sequence.num_tokens, candidate.proposal[0])
        counters.undrafted_sequences.update(without)
        if self._seconds_per_pass is not None and lengths and not drafts:
            self._rest, self._resting, self._undrafted = _REST, len(running), without
        return drafts

    def _choose(self, candidates: list["_Candidate"], *, others: int) -> list[int]:
        """Return the number of drafts for each candidate; ``others`` sequences decode without a proposal.

        Return an empty list for a step that measures the cost of doing without.
        """
        rates = [candidate.state.rate.value for candidate in candidates]
        proposed = [len(candidate.proposal) for candidate in candidates]

        def choose(seconds: Callable[[int], float], least_gain: float) -> list[int]:
            return choose_lengths(
                rates,
                proposed,
                others=others,
                most=self._most_drafts,
                seconds=seconds,
                seconds_per_pass=self._seconds_per_pass or 0.0,
                least_gain=least_gain,
            )

        lengths = choose(self._curve.seconds, LEAST_GAIN)
        self.pays = any(lengths)
        if self.pays:
            self._pause, self._waited = _FIRST_PAUSE, 0
            if self._is_plain_due(len(candidates) + others):
                return []
        elif max(rates) >= _PROMISING:
            self._waited += 1
            if self._waited >= self._pause:
                self._pause, self._waited = min(2 * self._pause, _LONGEST_PAUSE), 0
                return [min(1, length) for length in proposed]
        return lengths

    def _is_plain_due(self, sequences: int) -> bool:
        return self._plain[knot(min(sequences, _MOST_SEQUENCES))].is_due()

    def _state(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence.key)
        if state is None:
            reason = why_not(sequence.request.params)
            state = self._states[sequence.key] = _State(
                reason or "",
                self._proposers(sequence) if reason is None else None,
                AcceptanceRate(self._rate.value, weight=_PRIOR_WEIGHT, memory=_SEQUENCE_MEMORY),
            )
        return state

    def verified(self, sequence: Sequence, drafts: int, accepted: int) -> None:
        """Learn from the verification of a sequence's drafts."""
        self._rate.observe(accepted, drafts)
        if (state := self._states.get(sequence.key)) is not None:
            state.rate.observe(accepted, drafts)

    def _learn_unverified(self, sequence: Sequence, state: _State) -> None:
        """Learn whether a proposal that was not verified would have been accepted."""
        if state.expected is None:
            return
        position, token_id = state.expected
        state.expected = None
        if position < len(sequence.token_ids):
            accepted = int(sequence.token_ids[position] == token_id)
            state.rate.observe(accepted, 1)
            self._rate.observe(accepted, 1)

    def computed_prompts(self) -> None:
        """Note a step that computed prompts, after which other sequences decode."""
        self._rest = 0

    def observe_step(self, tokens: int, seconds: float, *, passes: int = 0, draft_seconds: float = 0.0) -> None:
        """Learn the cost of a step without prompts, and of the passes of a draft model in it."""
        self._curve.observe(tokens, seconds)
        if self._seconds_per_pass is not None and passes and draft_seconds > 0.0:
            error = min(draft_seconds / passes / self._seconds_per_pass, _LARGEST_SURPRISE) - 1.0
            self._seconds_per_pass *= 1.0 + _PASS_SHARE * error
