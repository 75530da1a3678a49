"""Speculation for the scheduler: the drafts of each step, and what their verification teaches.

A draft is a token that a sequence may continue with. A step computes a sequence's last token and its drafts together,
samples after each of them with the seed and the position that the sequence has there in any case, and keeps the sampled
tokens up to the first that differs from its draft. So the answer is the one without speculation; drafts only decide how
many steps it takes.

The scheduler calls ``plan`` before each step and ``observe`` after it. A step without drafts may be planned while the
one before it runs; ``awaits_commit`` says when not. Nothing here knows tensors or the clock.
"""

from collections import Counter
from dataclasses import dataclass

from quire_engine.core.batch import Batch, DraftedLines, RunnerOutput
from quire_engine.core.kv_manager import KVManager
from quire_engine.core.plan import Plan
from quire_engine.core.policy import Policy
from quire_engine.core.sequence import Sequence
from quire_engine.core.speculation.policy import AcceptanceRate, DraftPolicy
from quire_engine.core.speculation.proposers import Proposer, ProposerFactory, why_not
from quire_engine.core.stall_bound import StepCosts
from quire_engine.core.stats import Counters

_FIRST_RATE, _FIRST_WEIGHT, _ENGINE_MEMORY = 0.6, 10.0, 300.0
_PRIOR_WEIGHT, _SEQUENCE_MEMORY = 2.0, 24.0
_MOST_PROMPTS = 2 / 3
"""The largest share of a step's tokens that may be of prompts if its time is to say what a token costs."""
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
    """The drafts of all sequences, of which each has at most ``max_tokens`` in a step; see ``DraftPolicy``."""

    def __init__(
        self,
        proposers: ProposerFactory,
        *,
        max_tokens: int,
        most_drafts: int,
        costs: StepCosts | None,
        seconds_per_pass: float | None = None,
    ) -> None:
        self._proposers = proposers
        self._max_tokens = max_tokens
        self._learns_unverified = seconds_per_pass is None
        self._policy = DraftPolicy(costs, most_drafts=most_drafts, seconds_per_pass=seconds_per_pass)
        self._states: dict[int, _State] = {}
        self._rate = AcceptanceRate(_FIRST_RATE, weight=_FIRST_WEIGHT, memory=_ENGINE_MEMORY)
        self._finds_none = False
        """True if no sequence had a proposal when one was looked for last."""

    def awaits_commit(self, sequences: int) -> bool:
        """Return whether the next step, of so many running sequences, may have drafts.

        All tokens of its sequences must be known then, so that the step in flight is to be committed first.
        """
        return not self._finds_none and not self._policy.excludes_drafts(sequences)

    @property
    def prepares(self) -> bool:
        """False if drafts do not pay at the present load, so that computing prompts for them is probably in vain."""
        return self._policy.prepares

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        if self._states.pop(sequence.key, None) is not None:
            self._policy.sequence_ended()

    def plan(self, running: list[Sequence], counters: Counters, *, ahead: bool = False) -> dict[int, list[int]]:
        """Return the drafts that the next step should verify, by the key of their sequence.

        A step that is planned ``ahead``, while its sequences' last tokens are sampled, has none.
        """
        if not running:
            return {}
        if not self._policy.begin_step(len(running)):
            counters.undrafted_sequences["cost"] += len(running)
            return {}
        without: Counter[str] = Counter()
        candidates = self._candidates(running, without, ahead=ahead)
        self._finds_none = not candidates
        lengths = [0] * len(candidates)
        if candidates and not ahead:
            lengths = self._policy.choose(
                [candidate.state.rate.value for candidate in candidates],
                [len(candidate.proposal) for candidate in candidates],
                others=without.total(),
            )
        drafts: dict[int, list[int]] = {}
        for candidate, length in zip(candidates, lengths, strict=True):
            if length:
                drafts[candidate.sequence.key] = candidate.proposal[:length]
            else:
                without["cost"] += 1
                if self._learns_unverified:
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

    def observe(self, flight: Plan, output: RunnerOutput, *, elapsed: float, counters: Counters) -> None:
        """Advance sequences by their accepted drafts, and learn from the step.

        ``elapsed`` is the time since the output of the step before, or 0 if it is not known: the scheduling is in it
        unless it was done ahead.
        """
        drafts = flight.batch.num_drafts
        if drafts:
            assert output.counts is not None
            self._verify(flight, output.counts, counters)
        own = output.run_seconds + output.sample_seconds + output.draft_seconds
        if output.is_first or own <= 0.0 or not flight.sampled:
            return
        tokens = flight.batch.num_tokens
        if flight.prompts.tokens > _MOST_PROMPTS * tokens:
            self._policy.observe_prompts(output.draft_seconds, passes=max(drafts, default=0))
            return
        self._policy.observe_step(
            tokens,
            # Inputs may be prepared while the step before runs, but no step takes less than its own time.
            max(elapsed, own) if elapsed else own + output.prepare_seconds,
            drafts=sum(drafts),
            accepted=len(output.token_ids) - len(flight.sampled),
            passes=max(drafts, default=0),
            draft_seconds=output.draft_seconds,
        )

    def _verify(self, flight: Plan, counts: list[int], counters: Counters) -> None:
        for sequence, drafts, count in zip(flight.sampled, flight.drafts_of_sampled(), counts, strict=True):
            counters.scheduled_tokens += count - 1
            if drafts and not sequence.finished:
                if sequence.row is not None:  # else it was preempted meanwhile, and computes these tokens again
                    sequence.num_computed += count - 1
                self._rate.observe(count - 1, drafts)
                if (state := self._states.get(sequence.key)) is not None:
                    state.rate.observe(count - 1, drafts)
                counters.count_drafts(drafts, count - 1)


def add_drafts(plan: Plan, kv: KVManager, sequence: Sequence, drafts: list[int], *, others: int) -> int:
    """Add drafts after the last token of the next sequence of the plan; return how many have room.

    ``others`` sequences come after it. ``num_computed`` counts drafts only when they are accepted.
    """
    end = sequence.num_tokens
    covered = kv.extend_for_drafts(sequence, end + len(drafts), others=others)
    drafts = drafts[: covered - end]
    if drafts:
        plan.token_ids += drafts
        plan.drafted[len(plan.sequences)] = len(drafts)
    return len(drafts)


def drafted_lines(batch: Batch, token_ids: list[int]) -> list[DraftedLines]:
    """Return the lines of each sequence that samples in a batch with drafts, whose inputs are ``token_ids``."""
    found: list[DraftedLines] = []
    line = end = 0
    for scheduled, drafts, samples in zip(batch.num_scheduled, batch.num_drafts, batch.samples, strict=True):
        end += scheduled
        if samples:
            found.append(DraftedLines(line, token_ids[end - drafts : end]))
            line += 1 + drafts
    return found


def grown(sampled: list[Sequence], counts: list[int], waiting: Policy) -> list[Sequence]:
    """Let sequences grow by the tokens that a step sampled beyond one each; return the sequence of each token.

    Those that were preempted while the step was in flight are in ``waiting``.
    """
    for sequence, count in zip(sampled, counts, strict=True):
        assert count == 1 or (count > 1 and (sequence.finished or sequence.num_pending == 1))
        sequence.num_tokens += count - 1
        sequence.num_pending += count - 1
        if count > 1 and sequence.row is None and not sequence.finished:
            waiting.grew(sequence, count - 1)
    return [sequence for sequence, count in zip(sampled, counts, strict=True) for _ in range(count)]
