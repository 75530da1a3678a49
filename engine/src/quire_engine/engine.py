"""A step of the engine: schedule, execute, commit. Only this module connects the core's decisions with a runner.

The layers below know nothing of the clients of requests, the layers above know nothing of batches. The engine reads the
clock for both. One thread calls it: ``ipc.loop`` in the engine process, or a benchmark directly.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic

from quire_engine.config import SpeculationOptions
from quire_engine.core.adapter_slots import AdapterRequests
from quire_engine.core.batch import Batch, ConstrainedSequences, StepOutput, TokenMasks
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.ports import AdapterEvent, AdapterStore, ForwardPass, LoadedModel, PendingOutput, Runner
from quire_engine.core.preemption_cost import MeasuredRates
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.sequence import Request
from quire_engine.core.speculation.proposers import NgramSettings, OpenProposer, ngram_proposers
from quire_engine.core.speculation.speculation import Speculation, drafted_lines
from quire_engine.core.stall_bound import MAX_STEP_SECONDS, StallBound
from quire_engine.core.stats import Counters, Gauges, StepSeconds
from quire_engine.grammar.matchers import Matchers
from quire_engine.grammar.spec import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    batch: Batch
    pending: PendingOutput
    began: float


class Engine:
    """A scheduler and a runner, stepped together.

    ``overlap`` schedules a step while the previous one still runs, for a runner that does not wait itself. With
    several ``stages``, as many steps run at once, of which each has other sequences.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        matchers: Matchers | None = None,
        adapters: AdapterStore | None = None,
        overlap: bool = False,
        stages: int = 1,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """``matchers`` constrain sequences by grammars, ``adapters`` hold the adapters in host memory.

        Without them no request may have one.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._overlap = overlap
        self._most_flights = stages if stages > 1 else 1 + overlap
        self._now = now
        self._flights: deque[_Flight] = deque()
        self._matchers = matchers
        self._unprepared: dict[int, Request] = {}
        """Requests whose grammar is being compiled, by key, in the order of their arrival."""
        self._failed: dict[int, str] = {}
        self._adapter_store = adapters
        self._adapters = None if adapters is None else AdapterRequests(adapters, scheduler.adapters)
        self._adapter_events: list[AdapterEvent] = []
        self.on_scheduled: Callable[[float], None] | None = None
        """It is called with the expected seconds of each step, before the step runs."""
        self.seconds = StepSeconds()
        self.last_step_time = now()
        self._output_time: float | None = None
        """The time of the last output; None if there was no work since."""

    def add(self, request: Request) -> str | None:
        """Queue a request, or return the reason why it can never run.

        A request with an adapter is queued when that is in host memory, and one with a grammar when the grammar is
        compiled: see ``add_prepared``.
        """
        if request.adapter is None:
            return self._add_with_adapter(request)
        if self._adapters is None:
            return "this engine serves no adapters (--enable-lora)"
        return self._adapters.add(request)

    def _add_with_adapter(self, request: Request) -> str | None:
        """Queue a request whose adapter, if it has one, is in host memory."""
        grammar = request.params.grammar
        if grammar is None and request.params.reasoning_phase is None:
            return self._scheduler.add(request)
        assert self._matchers is not None
        if grammar is None or self._matchers.request(grammar):
            return self._add_constrained(request, grammar)
        self._unprepared[request.key] = request
        return None

    def add_prepared(self) -> None:
        """Queue the requests whose adapter was read or whose grammar was compiled since the last call."""
        if self._adapters is not None:
            self._add_adapted(self._adapters)
        if not self._unprepared or self._matchers is None:
            return
        compiled = set(self._matchers.take_compiled())
        for key, request in list(self._unprepared.items()):
            grammar = request.params.grammar
            if grammar in compiled:
                del self._unprepared[key]
                refusal = self._add_constrained(request, grammar)
                if refusal is not None:
                    self._failed[key] = refusal
                    if self._adapters is not None:
                        self._adapters.ended(key)

    def _add_adapted(self, adapters: AdapterRequests) -> None:
        events, failed = adapters.take_events()
        self._adapter_events += events
        self._failed |= failed
        for request in adapters.advance():
            refusal = self._add_with_adapter(request)
            if refusal is not None:
                adapters.ended(request.key)
                self._failed[request.key] = refusal

    def load_adapter(self, adapter: int, folder: str) -> None:
        """Read and check an adapter; ``take_adapter_events`` reports the result."""
        if self._adapters is not None:
            self._adapters.load(adapter, folder)

    def unload_adapter(self, adapter: int) -> None:
        """Remove an adapter when its last request has ended; new requests for it are refused."""
        if self._adapters is not None:
            self._adapters.unload(adapter)

    def take_adapter_events(self) -> list[AdapterEvent]:
        """Return the adapters that were read since the last call, and those that cannot be."""
        events, self._adapter_events = self._adapter_events, []
        return events

    def _add_constrained(self, request: Request, grammar: str | None) -> str | None:
        assert self._matchers is not None
        refusal = self._scheduler.add(request)
        if refusal is None and (reason := self._matchers.start(request.key, grammar, request.params)) is not None:
            self._scheduler.cancel(request.key)
            return reason
        return refusal

    def take_failed(self) -> dict[int, str]:
        """Return the requests that failed by themselves since the last call, and why; they have ended."""
        failed, self._failed = self._failed, {}
        return failed

    def cancel(self, key: int) -> bool:
        """Cancel a request; its blocks are free at the next step. Returns False if there is no such request."""
        found = self._unprepared.pop(key, None) is not None
        if not found:
            if self._matchers is not None:
                self._matchers.discard(key)
            found = self._scheduler.cancel(key)
        # Last, because an adapter that was unloaded leaves its slot with its last request.
        if self._adapters is not None:
            found = self._adapters.ended(key) or found
        return found

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Take in the tokens of the model, which grammars need."""
        if self._matchers is not None:
            self._matchers.set_vocabulary(vocabulary)

    @property
    def matchers(self) -> Matchers | None:
        """The matchers of the constrained sequences; None if no request may have a grammar."""
        return self._matchers

    @property
    def has_work(self) -> bool:
        """True while requests are unfinished, or the output of a step is still to come."""
        return bool(self._flights) or self._scheduler.has_unfinished

    def step(self) -> StepOutput | None:
        """Issue a step and return the output of the oldest one, or None while more may be issued before it ends.

        A step that depends on the one in flight is issued by the next call.
        """
        began = self._now()
        if self._scheduler.awaits_commit:
            return self._finish(self._flights.popleft(), began)
        batch = self._scheduler.schedule()
        scheduled = self._now()
        self.seconds.schedule += scheduled - began
        ended = None
        if batch is not None:
            if self.on_scheduled is not None:
                self.on_scheduled(self._scheduler.expected_seconds)
            forward = self._runner.execute(batch)
            masks = None
            if batch.constrained is not None:
                if self._overlap and self._flights:
                    # The masks depend on the tokens of the step before, which the host has not seen yet.
                    ended = self._finish(self._flights.popleft(), scheduled)
                masks = self._masks(batch, batch.constrained, forward)
            self._flights.append(_Flight(batch=batch, pending=forward.sample(masks), began=began))
        if ended is not None:
            return ended
        if self._flights and (batch is None or len(self._flights) >= self._most_flights):
            return self._finish(self._flights.popleft(), scheduled)
        assert self._flights or not self.has_work, "there is work, but no sequence can go on"
        self.seconds.run += self._now() - scheduled
        return None

    def _finish(self, flight: _Flight, scheduled: float) -> StepOutput:
        drawn = flight.pending.wait()
        ran = self._now()
        elapsed = ran - (flight.began if self._output_time is None else self._output_time) - drawn.swap_seconds
        output = self._scheduler.commit(flight.batch, drawn, began=flight.began, elapsed=elapsed)
        ended = self._now()
        self._output_time = ran if self.has_work else None
        seconds = self.seconds
        seconds.prepare += drawn.prepare_seconds
        seconds.swap += drawn.swap_seconds
        seconds.sample += drawn.sample_seconds
        beside = drawn.prepare_seconds + drawn.swap_seconds + drawn.sample_seconds
        seconds.run += max(0.0, ran - scheduled - beside)
        if self._adapters is not None:
            for finished in output.finished:
                self._adapters.ended(finished.key)
        if self._matchers is not None:
            for finished in output.finished:
                self._matchers.discard(finished.key)
            self._matchers.follow(output.keys, output.token_ids)
        seconds.output += ended - ran
        self.last_step_time = ended
        return output

    def _masks(self, batch: Batch, constrained: ConstrainedSequences, forward: ForwardPass) -> TokenMasks | None:
        """Return the masks of a step; a sequence that cannot have one ends, and its token is discarded."""
        assert self._matchers is not None
        lines = drafted_lines(batch, forward.token_ids) if batch.num_drafts else None
        masks = self._matchers.masks(constrained, lines)
        for key in masks.failed:
            self.cancel(key)
        self._failed |= masks.failed
        return masks.tokens()

    def gauges(self) -> Gauges:
        """Return the current state of queue and cache.

        A request that waits for its grammar or its adapter is queued.
        """
        gauges = self._scheduler.gauges()
        unread = [] if self._adapters is None else self._adapters.waiting
        if not self._unprepared and not unread:
            return gauges
        lengths = [len(request.prompt_token_ids) for request in (*self._unprepared.values(), *unread)]
        waiting = {request.adapter for request in unread if request.adapter is not None}
        return replace(
            gauges,
            num_waiting=gauges.num_waiting + len(lengths),
            queued_tokens=gauges.queued_tokens + sum(lengths),
            waiting_adapters=[*gauges.waiting_adapters, *waiting.difference(gauges.waiting_adapters)],
        )

    @property
    def counters(self) -> Counters:
        """The counters since the start, or since ``reset_counters``."""
        return self._scheduler.counters

    def reset_counters(self) -> None:
        """Reset the counters, after the warm-up."""
        self._scheduler.counters = Counters()
        self.seconds = StepSeconds()

    def on_prepared(self, wake: Callable[[], None]) -> None:
        """Let ``wake`` be called, in another thread, whenever a grammar is compiled or an adapter was read."""
        if self._adapter_store is not None:
            self._adapter_store.on_read = wake
        if self._matchers is not None:
            self._matchers.on_compiled = wake

    def forget_prefixes(self) -> None:
        """Let no prefix computed so far be found any more."""
        self._scheduler.forget_prefixes()

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, rows or queues are inconsistent."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Release the runner and the threads of the grammars and the adapters."""
        self._runner.close()
        if self._adapter_store is not None:
            self._adapter_store.close()
        if self._matchers is not None:
            self._matchers.close()


def make_engine(
    model: LoadedModel,
    *,
    scheduler: SchedulerOptions,
    speculation: SpeculationOptions | None = None,
) -> Engine:
    """Return an engine over a loaded model, as configured."""
    rates = MeasuredRates(
        seconds_per_token=None if model.step_costs is None else model.step_costs.per_token,
        swap_bytes_per_second=model.swap_bytes_per_second,
        block_bytes=model.block_bytes,
    )
    # A token passes through all stages, and may wait for a step with prompts at each of them.
    bound = _stall_bound(model, scheduler.max_generation_stall_seconds / model.traits.stages)
    drafts = None
    if speculation is not None and (speculation.method == "ngram" or model.seconds_per_draft is not None):
        drafts = _speculation(speculation, model)
    return Engine(
        scheduler=Scheduler(scheduler, model.traits, model.layout, rates, bound, drafts),
        runner=model.runner,
        matchers=Matchers(model.vocab_size),
        adapters=model.adapters,
        overlap=model.asynchronous,
        stages=model.traits.stages,
    )


def _speculation(options: SpeculationOptions, model: LoadedModel) -> Speculation:
    settings = NgramSettings(shortest=options.shortest_match, longest=options.longest_match)
    proposer = OpenProposer()
    return Speculation(
        ngram_proposers(settings) if options.method == "ngram" else lambda sequence: proposer,
        max_tokens=options.max_tokens,
        most_drafts=model.traits.max_prompt_logprobs_positions,
        costs=model.step_costs,
        seconds_per_pass=None if options.method == "ngram" else model.seconds_per_draft,
    )


def _stall_bound(model: LoadedModel, max_stall_seconds: float) -> StallBound | None:
    """Return the bounds on the time of a step; without measured costs only the one that the user asks for."""
    alone = None if model.step_costs is None else max(MAX_STEP_SECONDS, max_stall_seconds)
    seconds = max_stall_seconds or alone
    if seconds is None:
        return None
    return StallBound(seconds, at_least=model.layout.block_size, costs=model.step_costs, alone_seconds=alone)
