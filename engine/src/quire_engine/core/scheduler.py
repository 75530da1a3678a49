"""The scheduler, without phases: which tokens of which sequence the next step computes, and the effects of its samples.

Every sequence has ``num_tokens`` and ``num_computed``, and each step lets it catch up within the token budget: running
sequences first, in order, then waiting ones. Chunked prefill is the rest of a prompt that exceeds the budget; decoding
is a sequence that lacks one token; a preempted sequence lacks all its tokens again; a prefix in the cache is already
computed. ``Engine.step`` calls ``schedule``, lets the runner execute the batch, and calls ``commit``. ``schedule`` may
run once ahead of the previous commit, and then counts pending samples as unknown tokens. With several stages it runs
ahead by as many steps, and no sequence is in a step while its sample is pending. With speculation it runs ahead while
no sequence has drafts: ``awaits_commit`` says when a step depends on the one in flight.

Nothing here knows tensors, messages or the clock.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from operator import attrgetter
from typing import TypeVar

from quire_engine.core.adapter_slots import AdapterQueue, AdapterSlots
from quire_engine.core.admission import AdmissionControl, Admitted, PromptDeferral, Rows
from quire_engine.core.batch import (
    Batch,
    ConstrainedSequences,
    FinishedSequence,
    PooledPart,
    PromptLogprobs,
    RunnerOutput,
    StepOutput,
)
from quire_engine.core.forks import ParkedChildren
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.core.kv_manager import KVManager
from quire_engine.core.options import ModelTraits, SchedulerOptions
from quire_engine.core.plan import Plan
from quire_engine.core.policy import make_policy
from quire_engine.core.preemption import Preemption
from quire_engine.core.preemption_cost import MeasuredRates
from quire_engine.core.preemptor import Preemptor
from quire_engine.core.sequence import Request, Sequence
from quire_engine.core.speculation.speculation import Speculation, add_drafts, grown
from quire_engine.core.stall_bound import StallBound
from quire_engine.core.stats import Counters, Gauges

T = TypeVar("T")

_order = attrgetter("order")


class Scheduler:
    """The scheduler. ``rates`` are the initial rates for preemption by measured cost.

    Without rates it recomputes until steps were measured. Without a ``stall_bound``, prompts use the rest of the token
    budget in order, however long that takes. With ``speculation``, see ``awaits_commit``.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        model: ModelTraits,
        layout: KVCacheLayout,
        rates: MeasuredRates | None = None,
        stall_bound: StallBound | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        assert 0 < options.max_num_seqs <= options.max_num_batched_tokens
        self._options, self._model = options, model
        self._layout = layout
        self._kv = KVManager(
            layout,
            max_chunk=options.max_num_batched_tokens,
            enable_prefix_caching=options.enable_prefix_caching,
            share_prefixes=options.share_prefixes,
        )
        self._rates = MeasuredRates() if rates is None else rates
        self._stall_bound = stall_bound
        self._speculation = speculation
        self._arrivals = 0
        self._sequences: dict[int, Sequence] = {}
        self.adapters = AdapterSlots(model.adapter_slots)
        policy = make_policy(options.policy)
        self._waiting = AdapterQueue(policy, self.adapters) if model.adapter_slots else policy
        self._parked = ParkedChildren()
        self._num_constrained = 0
        self._running: list[Sequence] = []  # in order: the last is the first to be preempted
        self._rows = Rows(options.max_num_seqs, self.adapters)
        self._admission = AdmissionControl(waiting=self._waiting, kv=self._kv, rows=self._rows)
        self._deferral = PromptDeferral(stall_bound=stall_bound, kv=self._kv, admission=self._admission)
        self._in_flight: deque[Plan] = deque()
        self._most_in_flight = max(2, model.stages)
        # A step has its share of the tokens and the sequences, so that there is as much work for each stage.
        self._step_tokens = -(-options.max_num_batched_tokens // model.stages)
        self._step = 0
        self.counters = Counters()
        self._preemptor = Preemptor(
            options.preemption_mode,
            running=self._running,
            waiting=self._waiting,
            parked=self._parked,
            kv=self._kv,
            rows=self._rows,
            rates=self._rates,
            counted=self._count_preemption,
        )

    def add(self, request: Request) -> str | None:
        """Queue a request, or return the reason why it can never run."""
        assert request.key not in self._sequences and request.prompt_token_ids
        assert request.adapter is None or self._model.adapter_slots
        assert (request.params.pooling is not None) == self._model.pools
        # A prompt that is pooled is the whole sequence: the token after it stands for the end, and is never computed.
        longest = self._model.max_model_len + self._model.pools
        limit = min(len(request.prompt_token_ids) + request.params.max_tokens, longest)
        refusal = refuse(
            num_prompt=len(request.prompt_token_ids),
            limit=limit,
            max_model_len=self._model.max_model_len,
            pools=self._model.pools,
            max_cached_tokens=self._layout.max_tokens,
        )
        if refusal is not None:
            return refusal
        self._arrivals += 1
        sequence = Sequence(
            request,
            order=self._waiting.order(request, arrival=self._arrivals),
            limit=limit,
            eos_token_ids=self._model.eos_token_ids,
            num_groups=len(self._layout.groups),
        )
        self._sequences[request.key] = sequence
        self._num_constrained += sequence.masked
        parent = None if request.parent is None else self._sequences.get(request.parent)
        if parent is None:
            self._waiting.push(sequence)
        else:
            self._fork(sequence, parent)
        return None

    def _fork(self, child: Sequence, parent: Sequence) -> None:
        """Let a sequence wait for its parent, which computes their common prompt."""
        if not self._options.enable_prefix_caching:
            child.family = parent.family = parent.order[1]  # its arrival, which no other sequence shares
        self._parked.park(child, parent)
        self._release_children()

    def cancel(self, key: int) -> bool:
        """End a request at once, so that its blocks are free for the next step; return False for an unknown key."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return False
        self._end(sequence)
        return True

    def _end(self, sequence: Sequence) -> None:
        sequence.finished = True
        del self._sequences[sequence.key]
        if self._speculation is not None:
            self._speculation.forget(sequence)
        self._num_constrained -= sequence.masked
        for child in self._parked.take_all(sequence):
            self._waiting.push(child)
        if sequence.parent is not None:
            self._parked.discard(sequence)
        elif sequence.row is None:
            self._waiting.discard(sequence)
            self._kv.discard_swapped(sequence)
        else:
            del self._running[bisect_left(self._running, sequence.order, key=_order)]
            self._kv.release(sequence)
            self._rows.take_back(sequence)

    @property
    def awaits_commit(self) -> bool:
        """True if the steps in flight must be committed before the next one is scheduled.

        That is so if one of them has drafts, because only its output says how far sequences advance, and if the next
        one may have drafts, because these continue known tokens.
        """
        if self._speculation is None or not self._in_flight or self._model.stages > 1:
            return False
        return bool(self._in_flight[-1].batch.num_drafts) or self._speculation.awaits_commit(len(self._running))

    def schedule(self) -> Batch | None:
        """Return the next step, or None if no sequence can continue before a commit or a new request."""
        assert len(self._in_flight) < self._most_in_flight, "schedule() runs too far ahead of commit()"
        tokens = self._step_tokens
        positions = self._model.max_prompt_logprobs_positions
        # Pooled positions have no row of logits, so that only the token budget bounds them.
        plan = Plan(tokens, tokens if self._model.pools else positions)
        self._waiting.arrange(self._running)
        self._displace()
        self._kv.leave_behind(self._running)
        self._deferral.bound_step(plan, self._running)
        self._serve_running(plan, self._running if self._model.stages == 1 else self._turn())
        self._release_children()
        if plan.deferred:
            self._serve_deferred(plan)
        if plan.admits:
            self._admit_waiting(plan)
        if not plan.sequences:
            return None
        self._step += 1
        plan.finish(
            step=self._step,
            block_updates=self._kv.take_updates(),
            copies=self._kv.swap_space.take_copies(),
            released_rows=self._rows.take_released(),
            constrained=_constrained(plan.sampled) if self._num_constrained else None,
            adapter_loads=self.adapters.take_loads() if self.adapters.count else [],
            prepares_drafts=self._speculation is None or self._speculation.prepares,
        )
        self.counters.adapter_loads += len(plan.batch.adapter_loads)
        self.counters.swapped_out_blocks += sum([len(copies.sources) for copies in plan.batch.swap_out])
        self.counters.swapped_in_blocks += sum([len(copies.sources) for copies in plan.batch.swap_in])
        self._in_flight.append(plan)
        self.counters.steps += 1
        self.counters.scheduled_tokens += len(plan.token_ids)
        if plan.drafted:
            self.counters.scheduled_tokens -= sum(plan.drafted.values())
        return plan.batch

    def _turn(self) -> list[Sequence]:
        """Return the running sequences of the next of several steps in flight: their share, without pending samples.

        A prompt of which a part is in flight continues: every stage computes the parts in order.
        """
        most = -(-len(self._running) // self._model.stages)
        return [sequence for sequence in self._running if not sequence.num_pending][:most]

    def _plan_drafts(self, speculation: Speculation, running: list[Sequence]) -> dict[int, list[int]]:
        """Return the drafts that running sequences may get in the next step, by their key."""
        ahead = self._model.stages == 1 and bool(self._in_flight)
        assert not ahead or not self._in_flight[-1].batch.num_drafts, "a step with drafts must be committed first"
        return speculation.plan(running, self.counters, ahead=ahead)

    def _serve_running(self, plan: Plan, running: list[Sequence]) -> None:
        """Let these running sequences, which are in order, catch up.

        This loop dominates the step's cost: one pass, plain attributes, no calls.
        """
        budget = plan.budget
        sequences, sampled, samples = plan.sequences, plan.sampled, plan.samples
        num_computed, num_scheduled, token_ids = plan.num_computed, plan.num_scheduled, plan.token_ids
        drafts = None if self._speculation is None else self._plan_drafts(self._speculation, running)
        behind = len(running)
        # Preemption removes from the end of ``_running``, never what this loop has passed.
        for sequence in running if running is self._running else _with_rows(running):
            behind -= 1
            start = sequence.num_computed
            if sequence.num_tokens >= sequence.limit:
                continue  # its last sampled token is pending
            count = sequence.num_tokens - start  # more than one also after a step that sampled several
            is_prompt = start < sequence.num_prefill
            if is_prompt:
                # One token is left for each later sequence: a long prompt does not starve those that decode.
                count = self._deferral.chunk(plan, sequence, budget - behind)
                if count < 1:
                    continue  # it waits for short ones, or another prompt used this step's time
            elif count > 1:
                count = min(count, budget - behind)
            end = start + count
            if end > sequence.capacity and not self._preemptor.make_room(sequence, end, plan):
                break
            if sequence.num_pending:
                plan.feedback_tokens.append(len(token_ids))
                token_ids.append(0)
            elif count == 1:
                token_ids.append(sequence.token_ids[start])
            else:
                token_ids += sequence.token_ids[start:end]
            if drafts and (proposed := drafts.get(sequence.key)):
                count += add_drafts(plan, self._kv, sequence, proposed[: budget - behind - 1], others=behind)
            sequences.append(sequence)
            if is_prompt:
                plan.prompts.add(start, end - start)
                plan.report(sequence, start, end)
            num_computed.append(start)
            num_scheduled.append(count)
            sequence.num_computed = end
            if end == sequence.num_tokens:
                samples.append(True)
                sampled.append(sequence)
                sequence.num_tokens = end + 1
                sequence.num_pending += 1
            else:
                samples.append(False)
            budget -= count
        plan.budget = budget

    def _serve_deferred(self, plan: Plan) -> None:
        """Admit short prompts, and give the long ones the rest. This preempts no other sequence of the plan."""
        before = plan.prompts.tokens
        if plan.admits:
            self._admit_waiting(plan, short=True)
        plan.short_tokens = plan.prompts.tokens - before
        self._deferral.serve_deferred(plan)
        self._release_children()

    def _displace(self) -> None:
        """Preempt for the first in the queue, if it lacks a row or did not fit and the policy allows it."""
        sequence = self._waiting.first()
        if (
            sequence is None
            or len(self._running) < 2
            or (self._rows.any_free and not self._admission.is_blocked(sequence))
        ):
            return
        if self._waiting.displaces(sequence, self._running[-1]):
            self._preemptor.preempt_last()

    def _count_preemption(self, preemption: Preemption) -> None:
        self.counters.preemptions[preemption.label] += 1

    def _release_children(self) -> None:
        """Queue the children whose parent's prompt is scheduled to its end, and make it findable."""
        for parent, children in self._parked.take_ready():
            self._kv.publish_computed(parent)
            for child in children:
                self._waiting.push(child)

    def _admit_waiting(self, plan: Plan, *, short: bool = False) -> None:
        """Admit sequences in order while the first in the queue fits, or only while it is ``short``."""
        self._admission.begin_step()
        while (admitted := self._admission.next(plan, alone=not self._running, short=short)) is not None:
            self._enter(admitted, plan)

    def _enter(self, admitted: Admitted, plan: Plan) -> None:
        """Add an admitted sequence to the running ones, and its first chunk to the plan."""
        sequence = admitted.sequence
        self._rows.assign(sequence)
        count = self._kv.enter(sequence, admitted.placement, budget=admitted.budget)
        insort(self._running, sequence, key=_order)
        start = sequence.num_computed
        if sequence.num_preemptions == 0:
            # The cache may hold tokens of another engine's output, too.
            sequence.num_cached = min(start, sequence.num_prompt)
            plan.first_scheduled_keys.append(sequence.key)
            plan.first_scheduled_cached.append(sequence.num_cached)
            self._waiting.admitted(sequence)
            self.counters.prompt_tokens += sequence.num_prompt
            if self._options.enable_prefix_caching:
                self.counters.prefix_cache_queries += sequence.num_prompt
                self.counters.prefix_cache_hits += sequence.num_cached
        self.counters.recomputed_tokens += max(0, sequence.num_lost - start)
        sequence.num_lost = 0
        plan.admitted.append(sequence.admission())
        plan.add_chunk(sequence, count)
        self._admission.entered(sequence)
        self._parked.admitted(sequence)
        self._release_children()

    def commit(self, batch: Batch, output: RunnerOutput, *, began: float = 0.0, elapsed: float = 0.0) -> StepOutput:
        """Apply the tokens that a step sampled: sequences grow and end.

        Tokens of sequences that have ended are discarded. ``began`` is the time at which the step was scheduled,
        ``elapsed`` the seconds since the output of the step before, or 0 if they are not known.
        """
        plan = self._in_flight.popleft()
        assert plan.batch is batch, "steps are committed in the order they were scheduled"
        sampled = self._observe(plan, output, elapsed)
        # Before the sequences end that sampled their last token: the end of a prompt is reported with it.
        prompt_logprobs = [
            PromptLogprobs(sequence.key, entries)
            for sequence, entries in zip(plan.reporting, output.prompt_logprobs, strict=True)
            if not sequence.finished
        ]
        pooled = [
            PooledPart(sequence.key, values)
            for sequence, values in zip(plan.pooling, output.pooled, strict=True)
            if not sequence.finished
        ]
        keys: list[int] = []
        finished: list[FinishedSequence] = []
        discarded: list[int] = []
        for index, (sequence, token_id) in enumerate(zip(sampled, output.token_ids, strict=True)):
            if sequence.finished:
                discarded.append(index)
                continue
            known = sequence.token_ids
            known.append(token_id)
            sequence.num_pending -= 1
            keys.append(sequence.key)
            if token_id in sequence.stop_ids or len(known) >= sequence.limit:
                reason = sequence.finish_reason()
                if reason is not None:
                    self._end(sequence)
                    finished.append(FinishedSequence(sequence.key, reason, token_id if reason == "stop" else None))
        self.counters.generation_tokens += 0 if self._model.pools else len(keys)
        self.counters.discarded_tokens += len(discarded)
        return StepOutput(
            began=began,
            keys=keys,
            token_ids=_without(output.token_ids, discarded),
            logprobs=None if output.logprobs is None else _without(output.logprobs, discarded),
            finished=finished,
            first_scheduled_keys=plan.first_scheduled_keys,
            first_scheduled_cached=plan.first_scheduled_cached,
            prompt_logprobs=prompt_logprobs,
            pooled=pooled,
        )

    def _observe(self, plan: Plan, output: RunnerOutput, elapsed: float) -> list[Sequence]:
        """Learn from a step whatever the next ones depend on; return the sequence of each sampled token."""
        self._rates.observe_step(plan.batch, output, prompt_tokens=plan.prompts.tokens)
        sampled = plan.sampled if output.counts is None else grown(plan.sampled, output.counts, self._waiting)
        if self._speculation is not None:
            self._speculation.observe(plan, output, elapsed=elapsed, counters=self.counters)
        self._waiting.record_sampled(sampled)
        if self._stall_bound is not None:
            seconds = output.prepare_seconds + output.run_seconds + output.sample_seconds + output.draft_seconds
            self._stall_bound.observe(plan.prompts, seconds)
        return sampled

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    @property
    def expected_seconds(self) -> float:
        """The expected time of the step that was scheduled last; 0 if it is unknown."""
        if self._stall_bound is None or not self._in_flight:
            return 0.0
        return self._stall_bound.expected_seconds(self._in_flight[-1].prompts)

    def gauges(self) -> Gauges:
        """Return the state of queues, blocks and adapters, for metrics."""
        running, waiting, parked = self._running, self._waiting, self._parked
        pools, adapters = self._kv.pools, self.adapters
        queued = {sequence.request.adapter: None for sequence in waiting.sequences()} if adapters.count else {}
        return Gauges(
            num_running=len(running),
            num_waiting=len(waiting) + len(parked),
            queued_tokens=waiting.num_tokens + parked.num_tokens,
            parked_tokens=parked.num_tokens,
            prefilling_tokens=sum([sequence.num_to_prefill for sequence in running]),
            blocks_total=sum(pool.num_blocks for pool in pools),
            blocks_used=sum(pool.num_used for pool in pools),
            blocks_cached=sum(pool.num_cached for pool in pools),
            kv_usage=max(pool.num_used / pool.num_blocks for pool in pools),
            kv_slots_wasted=self._kv.wasted_slots(running),
            swap_blocks_total=sum(self._kv.swap_space.num_blocks),
            swap_blocks_used=self._kv.swap_space.num_used,
            adapter_slots=adapters.count,
            loaded_adapters=adapters.loaded,
            running_adapters=adapters.running,
            waiting_adapters=[adapter for adapter in queued if adapter is not None],
        )

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; running sequences continue."""
        self._kv.forget_prefixes(self._waiting.sequences())
        self._admission.forget_blocked()

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, rows and queues are consistent. For tests and a debug switch."""
        running, waiting, parked = self._running, self._waiting.sequences(), self._parked.sequences()
        self._kv.check_integrity(running, [*waiting, *parked])
        self._rows.check_integrity([sequence.row for sequence in running if sequence.row is not None])
        self.adapters.check_integrity(running)
        self._parked.check_integrity(self._sequences)
        assert len(waiting) == len(self._waiting)
        assert sum(sequence.num_tokens - sequence.num_computed for sequence in waiting) == self._waiting.num_tokens
        assert sorted(sequence.key for sequence in [*running, *waiting, *parked]) == sorted(self._sequences)
        assert running == sorted(running, key=_order)
        assert all(sequence.row is not None for sequence in running)
        assert all(sequence.row is None and sequence.parent is None for sequence in waiting)
        for sequence in self._sequences.values():
            assert len(sequence.token_ids) + sequence.num_pending == sequence.num_tokens <= sequence.limit
            assert sequence.num_computed < sequence.num_tokens


def _constrained(sampled: list[Sequence]) -> ConstrainedSequences | None:
    """Return those of the sampled sequences that have a grammar; None if none has one."""
    places = [place for place, sequence in enumerate(sampled) if sequence.masked]
    return ConstrainedSequences(places=places, keys=[sampled[place].key for place in places]) if places else None


def _with_rows(sequences: list[Sequence]) -> Iterator[Sequence]:
    """Yield the sequences in order, without those that are preempted meanwhile."""
    for sequence in sequences:
        if sequence.row is not None:
            yield sequence


def _without(column: list[T], places: list[int]) -> list[T]:
    if not places:
        return column
    left_out = set(places)
    return [entry for place, entry in enumerate(column) if place not in left_out]


def refuse(
    *, num_prompt: int, limit: int, max_model_len: int, max_cached_tokens: int | None, pools: bool = False
) -> str | None:
    """Return why a request can never be served, or None.

    ``limit`` is the length at which the sequence ends; with ``pools`` that is one token behind its prompt.
    ``max_cached_tokens`` is the capacity of the KV cache for a single sequence, or None if every layer has a window.
    """
    if pools:
        most = max_model_len if max_cached_tokens is None else min(max_model_len, max_cached_tokens)
        if num_prompt <= most:
            return None
        what = "this model takes" if most == max_model_len else "the KV cache holds"
        return f"the prompt has {num_prompt} tokens; {what} at most {most}"
    if num_prompt >= max_model_len:
        return (
            f"the prompt has {num_prompt} tokens; this model takes at most {max_model_len - 1}, "
            f"which leaves one of its {max_model_len} for the answer"
        )
    # The last token of a sequence is sampled but never computed: it needs no slot.
    if max_cached_tokens is not None and limit - 1 > max_cached_tokens:
        most = max_cached_tokens + 1
        advice = f"max_tokens of at most {most - num_prompt} would fit" if num_prompt < most else "no answer would fit"
        return (
            f"the prompt of {num_prompt} tokens and its answer come to {limit} tokens; "
            f"the KV cache holds {most}, so {advice}"
        )
    return None
