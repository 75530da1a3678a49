"""One step: first a batch under construction, then the batch in flight and its sequences.

``Scheduler.schedule`` fills it, ``commit`` reads it.
"""

from dataclasses import dataclass, field
from typing import cast

from quire_engine.core.batch import (
    AdapterLoad,
    Admission,
    Batch,
    BlockUpdates,
    ConstrainedSequences,
    PooledPositions,
    PromptPositions,
)
from quire_engine.core.sequence import Sequence
from quire_engine.core.stall_bound import SHORT_SHARE, PromptWork, StallBound
from quire_engine.core.swap_space import Copies

"""The positions of prompts whose logprobs one step computes at most: each has a row of logits over the vocabulary."""


@dataclass(slots=True)
class Plan:
    budget: int
    positions_left: int
    """The remaining positions of prompts whose logprobs may be computed."""
    bound: StallBound | None = None
    """The bound on the time of this step, which is ``bound_seconds``; None leaves it unbounded."""
    bound_seconds: float = 0.0
    short_budget: int = field(init=False)
    """The tokens that short prompts may still use in this step before the deferred ones."""
    deferred: list[Sequence] = field(default_factory=list)
    """The running prompts that do not fit completely into this step; short waiting ones are served before them."""
    short_waits: bool | None = None
    """True if such a short prompt waits; None until a prompt does not fit, because only then it matters."""
    short_tokens: int = 0
    """The prompt tokens that were scheduled before the deferred prompts."""
    prompts: PromptWork = field(default_factory=PromptWork)
    sequences: list[Sequence] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    num_scheduled: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    feedback_tokens: list[int] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    first_scheduled_keys: list[int] = field(default_factory=list)
    first_scheduled_cached: list[int] = field(default_factory=list)
    admits: bool = True
    """False after a preemption."""
    prompt_logprobs: list[PromptPositions] = field(default_factory=list)
    reporting: list[Sequence] = field(default_factory=list)
    pooled: list[PooledPositions] = field(default_factory=list)
    pooling: list[Sequence] = field(default_factory=list)
    """The sequence of each entry of ``pooled``."""
    drafted: dict[int, int] = field(default_factory=dict)
    """The number of drafts of each sequence that has any, by its place in the columns."""
    batch: Batch = field(init=False)
    """The finished batch, from ``finish`` on."""

    def __post_init__(self) -> None:
        self.short_budget = int(self.budget * SHORT_SHARE)

    @property
    def takes_prompts(self) -> bool:
        return self.bound is None or self.allowed_tokens(0) > 0

    def allowed_tokens(self, start: int) -> int:
        """Return how many tokens of a prompt, from its token ``start`` on, this step may compute by its time bound."""
        assert self.bound is not None
        return self.bound.allowed_tokens(self.prompts, start, seconds=self.bound_seconds, extra=self.short_tokens)

    def chunk(self, sequence: Sequence, most: int) -> int:
        """Return how many tokens of a running prompt this step may compute, at most ``most`` (none if < 1)."""
        start = sequence.num_computed
        count = min(sequence.num_tokens - start, most)
        if self.bound is not None:
            count = min(count, self.allowed_tokens(start))
        if start < sequence.num_to_report:
            count = min(count, max(1, self.positions_left))
        return count

    def is_short(self, sequence: Sequence, start: int) -> bool:
        """Return whether the rest of a waiting sequence, from token ``start`` on, may go before a long prompt."""
        count = sequence.num_tokens - start
        if self.bound is None or count > min(self.short_budget, self.budget):
            return False
        if start >= sequence.num_prefill:
            return True
        return count <= self.bound.allowed_tokens(self.prompts, start, seconds=self.bound_seconds, share=SHORT_SHARE)

    def budget_for(self, sequence: Sequence, start: int, *, short: bool) -> int:
        """Return how many tokens of a waiting sequence, from ``start`` on, this step may compute.

        A ``short`` one may use them all, because the deferred prompts leave it the time.
        """
        budget = self.budget
        if sequence.num_reported < sequence.num_to_report:
            budget = min(budget, max(1, self.positions_left))
        if self.bound is not None and not short and start < sequence.num_prefill:
            budget = min(budget, self.allowed_tokens(start))
        return budget

    def report(self, sequence: Sequence, start: int, end: int) -> None:
        """Request the logprobs or the pooling of the part of a prompt that the last planned sequence computes now."""
        first, end = max(start, sequence.num_reported), min(end, sequence.num_to_report)
        if first >= end:
            return
        pooling = sequence.request.params.pooling
        if pooling is not None:
            place = len(self.sequences) - 1
            self.pooled.append(
                PooledPositions(index=place, first=first, count=end - first, token_ids=pooling.token_ids)
            )
            self.pooling.append(sequence)
        else:
            self.prompt_logprobs.append(
                PromptPositions(
                    index=len(self.sequences) - 1,
                    first=first,
                    next_token_ids=sequence.token_ids[first + 1 : end + 1],
                    num_logprobs=sequence.request.params.prompt_logprobs or 0,
                )
            )
            self.reporting.append(sequence)
        self.positions_left -= end - first
        sequence.num_reported = end

    def add_chunk(self, sequence: Sequence, count: int) -> None:
        """Add the next ``count`` tokens of a sequence whose tokens are all known."""
        start = sequence.num_computed
        end = start + count
        self.sequences.append(sequence)
        self.report(sequence, start, end)
        self.num_computed.append(start)
        self.num_scheduled.append(count)
        self.token_ids += sequence.token_ids[start:end]
        self.budget -= count
        self.short_budget -= count
        if start < sequence.num_prefill:
            self.prompts.add(start, count)
        sequence.num_computed = end
        samples = end == sequence.num_tokens
        self.samples.append(samples)
        if samples:
            self.sampled.append(sequence)
            sequence.num_tokens += 1
            sequence.num_pending = 1

    def finish(
        self,
        *,
        step: int,
        block_updates: tuple[BlockUpdates, ...],
        copies: tuple[Copies, Copies],
        released_rows: list[int],
        constrained: ConstrainedSequences | None,
        adapter_loads: list[AdapterLoad],
        prepares_drafts: bool,
    ) -> None:
        """Create the batch of the step, to which nothing is added afterwards."""
        self.batch = Batch(
            step=step,
            rows=cast("list[int]", [sequence.row for sequence in self.sequences]),  # a running sequence has a row
            num_computed=self.num_computed,
            num_scheduled=self.num_scheduled,
            token_ids=self.token_ids,
            samples=self.samples,
            feedback_tokens=self.feedback_tokens,
            admitted=self.admitted,
            block_updates=block_updates,
            released_rows=released_rows,
            swap_out=copies[0],
            swap_in=copies[1],
            prompt_logprobs=self.prompt_logprobs,
            pooled=self.pooled,
            constrained=constrained,
            num_drafts=[self.drafted.get(place, 0) for place in range(len(self.sequences))] if self.drafted else [],
            adapter_loads=adapter_loads,
            prepares_drafts=prepares_drafts,
        )

    def drafts_of_sampled(self) -> list[int]:
        """Return the number of drafts of each sequence in ``sampled``."""
        columns = zip(self.batch.num_drafts, self.batch.samples, strict=True)
        return [drafts for drafts, samples in columns if samples]
