"""Speculation for the scheduler: the drafts of each step, and what their verification teaches.

A draft is a token that a sequence may continue with. A step computes a sequence's last token and its drafts together,
samples after each of them with the seed and the position that the sequence has there in any case, and keeps the sampled
tokens up to the first that differs from its draft. So the answer is the one without speculation; drafts only decide how
many steps it takes.

The scheduler calls ``plan`` before each step and ``verified`` after it. A step without drafts may be planned while the
one before it runs; ``awaits_commit`` says when not. Nothing here knows tensors or the clock.
"""

from collections import Counter
from dataclasses import dataclass

from quire_engine.core.sequence import Sequence
from quire_engine.core.speculation.draft_lengths import LEAST_GAIN, AcceptanceRate, choose_lengths
from quire_engine.core.speculation.load import trial_steps
from quire_engine.core.speculation.proposers import Proposer, ProposerFactory, why_not
from quire_engine.core.speculation.step_curve import StepCurve
from quire_engine.core.speculation.trials import DraftTrials, Mode
from quire_engine.core.stall_bound import StepCosts
from quire_engine.core.stats import Counters

_FIRST_RATE = 0.6
_MOST_SEQUENCES = 1024
_ENGINE_MEMORY = 2000.0
_SEQUENCE_MEMORY = 24.0
_PRIOR_WEIGHT = 2.0
_PASS_SHARE, _FIRST_PASS_SHARE = 0.1, 0.5
_LARGEST_SURPRISE, _FIRST_LARGEST_SURPRISE, _FIRST_PASSES = 1.3, 3.0, 3
"""The weight of the newest time of a draft model's pass, and the largest factor between it and the expected time that
counts: larger ones are hiccups, except at first, when only the number of weights says something."""
_PROMISING, _LIKELY = 0.5, 0.8
"""Proposals of prompt lookup have a trial only if they are probably accepted, which is learned without verification. If
they are likely to be, the next trial is soon."""
_FEW = 2
"""The most sequences whose first steps try drafts whatever the expected costs say: a trial of them is cheap, gains most
if they are easy to predict, and teaches their rates of acceptance."""
_CATCH_UP = 3.0
"""The probable time in which a draft model computes what it has missed in a pause, in steps without drafts."""
_MOST_SKIPPED = 8
"""The most steps between two looks for a proposal in a text that repeats nothing."""


class _State:
    """The proposer and the acceptance rate of one sequence."""

    __slots__ = ("expected", "misses", "proposer", "rate", "reason", "skipped")

    def __init__(self, reason: str, proposer: Proposer | None, rate: AcceptanceRate) -> None:
        self.reason = reason
        """The reason for taking no drafts; empty if it has a proposer."""
        self.proposer = proposer
        self.rate = rate
        self.expected: tuple[int, int] | None = None
        """A position and the token proposed for it, if the step did not verify it: its success is learned anyway."""
        self.misses = self.skipped = 0
        """The looks in a row that found no proposal, and the steps since the last one."""

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Return a proposal of up to ``most`` tokens; look for one less often after looks in vain."""
        assert self.proposer is not None
        if most < 1:
            return []
        if self.skipped < min(self.misses, _MOST_SKIPPED) - 1:
            self.skipped += 1
            return []
        self.skipped = 0
        proposal = self.proposer.propose(token_ids, most)
        self.misses = 0 if proposal else self.misses + 1
        return proposal


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
        self._passes = 0
        self._trials = DraftTrials(most_sequences=_MOST_SEQUENCES)
        self._loads: dict[int, int] = {}
        """The load of each step in flight that is measured, for which it was planned."""
        self._finds_none = False
        """True if no sequence had a proposal when the last step was planned."""

    def awaits_commit(self, sequences: int) -> bool:
        """Return whether the next step, of so many running sequences, may have drafts.

        All tokens of its sequences must be known then, so that the step in flight is to be committed first.
        """
        return not self._finds_none and self._trials.may_draft(sequences)

    def is_paused(self, sequences: int) -> bool:
        """Return whether the next step, of so many running sequences, has no drafts, and nothing is measured by it."""
        return self._trials.is_paused(sequences)

    def passes(self, sequences: int, counters: Counters) -> bool:
        """Return True if the next step is amid a pause: it has no drafts, and need not be planned.

        This is what most steps of a draft model cost that does not pay.
        """
        if self._seconds_per_pass is None or not self._trials.passes(sequences):
            return False
        counters.undrafted_sequences["cost"] += sequences
        return True

    def observe_passed(self, step: int, seconds: float) -> bool:
        """Return True, and note its time, if a step was not planned, because it ``passes``."""
        if step in self._loads:
            return False
        self._trials.observe_passed(seconds)
        return True

    @property
    def holds_prompts(self) -> bool:
        """True if the step with prompts that was planned last is to leave them out, so that it can be measured."""
        return self._trials.holds_prompts

    @property
    def pays(self) -> bool:
        """False if drafts do not pay at the present load, so that computing prompts for them is probably in vain."""
        return self._trials.pays

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._states.pop(sequence.key, None)

    def plan(
        self,
        running: list[Sequence],
        counters: Counters,
        *,
        step: int = 0,
        ahead: bool = False,
        has_prompts: bool = False,
    ) -> dict[int, list[int]]:
        """Return the drafts that the next step, of this number, should verify, by the key of their sequence.

        A step that is planned ``ahead``, while its sequences' last tokens are sampled, has none. ``has_prompts`` says
        that the step is known to compute prompts; see ``holds_prompts``.
        """
        if not running:
            self._loads[step] = self._trials.load
            self._trials.holds_prompts = False  # the sequences for which prompts waited have ended
            return {}
        # The step after one that is ahead decides. It may be ahead if no sequence had a proposal.
        undecided = ahead and self._trials.may_draft(len(running))
        if undecided:
            mode = Mode.OFF
            self._trials.holds_prompts = False
        elif has_prompts:
            decodes = any(sequence.decodes for sequence in running)
            mode = self._trials.mode(len(running), has_prompts=True, decodes=decodes)
        else:
            mode = self._trials.mode(len(running))
        if ahead and mode is Mode.ON:
            undecided = True  # in a measurement without drafts, in which steps with prompts take no part
        self._loads[step] = self._trials.load
        if self._seconds_per_pass is not None and mode in (Mode.OFF, Mode.PLAIN) and not undecided:
            counters.undrafted_sequences["cost"] += len(running)
            return {}
        without: Counter[str] = Counter()
        candidates = self._candidates(running, without, ahead=ahead)
        self._finds_none = not candidates
        lengths = [0] * len(candidates)
        if candidates and not undecided:
            lengths = self._choose(candidates, mode, others=without.total())
        drafts: dict[int, list[int]] = {}
        for candidate, length in zip(candidates, lengths, strict=True):
            if length:
                drafts[candidate.sequence.key] = candidate.proposal[:length]
            else:
                without["cost"] += 1
                if self._seconds_per_pass is None:
                    candidate.state.expected = (len(candidate.sequence.token_ids), candidate.proposal[0])
        counters.undrafted_sequences.update(without)
        return drafts

    def _candidates(self, running: list[Sequence], without: Counter[str], *, ahead: bool) -> list[_Candidate]:
        """Return the decoding sequences with a proposal, and count the others in ``without`` by reason.

        Those of a step that is planned ``ahead`` continue the known tokens, without the pending one.
        """
        candidates: list[_Candidate] = []
        for sequence in running:
            if sequence.num_pending > ahead or not sequence.decodes or sequence.num_tokens - sequence.num_computed != 1:
                continue
            state = self._state(sequence)
            if state.proposer is None:
                without[state.reason] += 1
                continue
            self._learn_unverified(sequence, state)
            # The last token within the limit is never computed, so the drafts end before it.
            proposal = state.propose(
                sequence.token_ids, min(self._max_tokens, sequence.limit - sequence.num_tokens - 1)
            )
            if proposal:
                candidates.append(_Candidate(sequence, state, proposal))
            else:
                without["no_proposal"] += 1
        return candidates

    def _choose(self, candidates: list[_Candidate], mode: Mode, *, others: int) -> list[int]:
        """Return the number of drafts for each candidate; ``others`` sequences decode without a proposal."""
        rates = [candidate.state.rate.value for candidate in candidates]
        none = [0] * len(rates)
        if mode is Mode.PLAIN:
            return none
        if mode is Mode.OFF and max(rates) < _LIKELY:
            return none
        is_doubtful = mode is Mode.FIRST and (len(rates) > _FEW or self._trials.any_paused)
        is_trial = mode is Mode.TRIAL or (mode is Mode.FIRST and not is_doubtful and self._seconds_per_pass is not None)
        lengths = choose_lengths(
            rates,
            [len(candidate.proposal) for candidate in candidates],
            others=others,
            most=self._most_drafts,
            seconds=self._curve.seconds,
            seconds_per_pass=self._seconds_per_pass or 0.0,
            least_gain=LEAST_GAIN if is_doubtful or mode is Mode.OFF else 1.0,
        )
        if mode is Mode.OFF:
            if any(lengths):
                self._trials.hasten()
            return none
        if any(lengths):
            return lengths
        if is_trial and (self._seconds_per_pass is not None or max(rates) >= _PROMISING):
            return [1] * min(len(rates), self._most_drafts) + none[self._most_drafts :]
        self._trials.refused(self._loss_of_trial(rates, others=others))
        return none

    def _loss_of_trial(self, rates: list[float], *, others: int) -> float:
        """Return what a trial with a draft for each candidate loses, in steps without drafts, by the expected costs.

        Its first step also computes what a draft model has missed.
        """
        sequences, drafts = len(rates) + others, min(len(rates), self._most_drafts)
        seconds = self._curve.seconds(sequences + drafts) + (self._seconds_per_pass or 0.0)
        loss = seconds / self._curve.seconds(sequences) - (1.0 + sum(rates[:drafts]) / sequences)
        return trial_steps(sequences) * max(0.0, loss) + (_CATCH_UP if self._seconds_per_pass is not None else 0.0)

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

    def observe_prompts(self, *, passes: int, draft_seconds: float, elapsed: float = 0.0, step: int = 0) -> None:
        """Learn the cost of a step with prompts, in which a draft model may have computed these, too.

        The first step of its size counts like one with prompts: its time says nothing of later ones.
        """
        self._loads.pop(step, None)
        drafting = passes * (self._seconds_per_pass or 0.0)
        self._trials.observe_prompts(max(0.0, draft_seconds - drafting), drafted=passes > 0, whole=elapsed)

    def observe_step(
        self,
        tokens: int,
        seconds: float,
        *,
        sequences: int,
        sampled: int,
        passes: int = 0,
        draft_seconds: float = 0.0,
        elapsed: float | None = None,
        step: int = 0,
    ) -> None:
        """Learn from a step without prompts, in which ``sequences`` gained ``sampled`` tokens.

        ``passes`` is the largest number of drafts that a sequence had, and ``draft_seconds`` the time of a draft model.
        Trials compare the ``elapsed`` seconds between the outputs of the step before and of this one: the scheduling is
        in them unless it was done ahead. If they are not known, the other times stand for them. ``step`` is the number
        with which it was planned.
        """
        load = self._loads.pop(step, None)
        if seconds <= 0.0 or not sequences:
            return
        whole = seconds + draft_seconds if elapsed is None else elapsed
        if not passes:
            self._trials.observe_plain(whole, load=load)
            self._curve.observe(tokens, seconds)
            return
        self._trials.observe_drafted(
            whole,
            expected=self._curve.seconds(tokens) + passes * (self._seconds_per_pass or 0.0),
            yielded=sampled / sequences,
            sequences=sequences,
            load=load,
        )
        self._curve.observe(tokens, seconds)
        if self._seconds_per_pass is not None and draft_seconds > 0.0:
            self._passes += 1
            first = self._passes <= _FIRST_PASSES
            largest = _FIRST_LARGEST_SURPRISE if first else _LARGEST_SURPRISE
            ratio = min(max(draft_seconds / passes / self._seconds_per_pass, 1.0 / largest), largest)
            self._seconds_per_pass *= ratio ** (_FIRST_PASS_SHARE if first else _PASS_SHARE)
