"""A step of the engine: schedule, execute, commit. Only this module connects the core's decisions with a runner.

The layers below know nothing of the clients of requests, the layers above know nothing of batches. The engine reads the
clock for both. One thread calls it: ``ipc.loop`` in the engine process, or a benchmark directly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from quire_engine.config import CacheOptions, SchedulerOptions
from quire_engine.core.batch import Batch, StepOutput
from quire_engine.core.ports import LoadedModel, PendingOutput, Runner
from quire_engine.core.preemption_cost import MeasuredRates
from quire_engine.core.refusal import Refusal
from quire_engine.core.scheduler import Scheduler, SchedulerConfig
from quire_engine.core.sequence import Request
from quire_engine.core.stall_bound import MAX_STEP_SECONDS, StallBound
from quire_engine.core.stats import Counters, Gauges, StepSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The output of one step, with its times in monotonic seconds."""

    output: StepOutput
    began: float
    """The time at which this step was scheduled."""
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    batch: Batch
    pending: PendingOutput
    began: float


class Engine:
    """A scheduler and a runner, stepped together.

    ``overlap`` schedules a step while the previous one still runs, for a runner that does not wait itself.
    """

    def __init__(
        self, *, scheduler: Scheduler, runner: Runner, overlap: bool = False, now: Callable[[], float] = monotonic
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._overlap = overlap
        self._now = now
        self._flight: _Flight | None = None
        self.on_scheduled: Callable[[float], None] | None = None
        """It is called with the expected seconds of each step, before the step runs."""
        self.seconds = StepSeconds()
        self.last_step_time = now()

    def add(self, request: Request) -> Refusal | None:
        """Queue a request, or return the reason why it can never run."""
        return self._scheduler.add(request)

    def cancel(self, key: int) -> bool:
        """Cancel a request; its blocks are free at the next step. Returns False if there is no such request."""
        return self._scheduler.cancel(key)

    @property
    def has_work(self) -> bool:
        """True while requests are unfinished, or the output of a step is still to come."""
        return self._flight is not None or self._scheduler.has_unfinished

    def step(self) -> Step | None:
        """Run one step and return its output; with overlap that of the previous step, None at the first."""
        began = self._now()
        batch = self._scheduler.schedule()
        scheduled = self._now()
        self.seconds.schedule += scheduled - began
        issued = None
        if batch is not None:
            if self.on_scheduled is not None:
                self.on_scheduled(self._scheduler.expected_seconds)
            issued = _Flight(batch=batch, pending=self._runner.execute(batch).sample(), began=began)
        if self._overlap:
            issued, self._flight = self._flight, issued
        if issued is None:
            assert self._flight is not None or not self.has_work, "there is work, but no sequence can go on"
            self.seconds.run += self._now() - scheduled
            return None
        return self._finish(issued, scheduled)

    def _finish(self, flight: _Flight, scheduled: float) -> Step:
        drawn = flight.pending.wait()
        ran = self._now()
        output = self._scheduler.commit(flight.batch, drawn)
        ended = self._now()
        seconds = self.seconds
        seconds.prepare += drawn.prepare_seconds
        seconds.swap += drawn.swap_seconds
        seconds.sample += drawn.sample_seconds
        beside = drawn.prepare_seconds + drawn.swap_seconds + drawn.sample_seconds
        seconds.run += max(0.0, ran - scheduled - beside)
        seconds.output += ended - ran
        self.last_step_time = ended
        return Step(output=output, began=flight.began, ended=ended)

    def gauges(self) -> Gauges:
        """Return the current state of queue and cache."""
        return self._scheduler.gauges()

    @property
    def counters(self) -> Counters:
        """The counters since the start, or since ``reset_counters``."""
        return self._scheduler.counters

    def reset_counters(self) -> None:
        """Reset the counters, after the warm-up."""
        self._scheduler.counters = Counters()
        self.seconds = StepSeconds()

    def forget_prefixes(self) -> None:
        """Let no prefix computed so far be found any more."""
        self._scheduler.forget_prefixes()

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, rows or queues are inconsistent."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Release the runner."""
        self._runner.close()


def make_engine(model: LoadedModel, *, scheduler: SchedulerOptions, cache: CacheOptions) -> Engine:
    """Return an engine over a loaded model, as configured."""
    config = SchedulerConfig(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        policy=scheduler.policy,
        preemption_mode=scheduler.preemption_mode,
        enable_prefix_caching=cache.enable_prefix_caching,
        share_prefixes=cache.share_prefixes,
    )
    rates = MeasuredRates(
        prefill_tokens_per_second=model.prefill_tokens_per_second,
        swap_bytes_per_second=model.swap_bytes_per_second,
        block_bytes=model.block_bytes,
    )
    return Engine(
        scheduler=Scheduler(config, model.layout, rates, _stall_bound(model, scheduler.max_generation_stall_seconds)),
        runner=model.runner,
        overlap=model.asynchronous,
    )


def _stall_bound(model: LoadedModel, max_stall_seconds: float) -> StallBound | None:
    """Return the bounds on the time of a step; without measured costs only the one that the user asks for."""
    alone = None if model.step_costs is None else max(MAX_STEP_SECONDS, max_stall_seconds)
    seconds = max_stall_seconds or alone
    if seconds is None:
        return None
    return StallBound(seconds, at_least=model.layout.block_size, costs=model.step_costs, alone_seconds=alone)
