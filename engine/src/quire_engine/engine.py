"""A step of the engine: schedule, execute, commit. The only place that joins the core's decisions to a runner.

Below it nothing knows of requests' clients, above it nothing knows of batches. It reads the clock for both. Called from
one thread; ``ipc.loop`` drives it in the engine process, benchmarks drive it directly.
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
from quire_engine.core.stall_bound import StallBound
from quire_engine.core.stats import Counters, Gauges, StepSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    output: StepOutput
    began: float
    """When this step was scheduled."""
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    batch: Batch
    pending: PendingOutput
    began: float


class Engine:
    """``overlap`` schedules a step while the one before still runs: right for a runner that does not wait itself."""

    def __init__(
        self, *, scheduler: Scheduler, runner: Runner, overlap: bool = False, now: Callable[[], float] = monotonic
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._overlap = overlap
        self._now = now
        self._flight: _Flight | None = None
        self.seconds = StepSeconds()
        self.last_step_time = now()

    def add(self, request: Request) -> Refusal | None:
        return self._scheduler.add(request)

    def cancel(self, key: int) -> bool:
        return self._scheduler.cancel(key)

    @property
    def has_work(self) -> bool:
        return self._flight is not None or self._scheduler.has_unfinished

    def step(self) -> Step | None:
        """Run one step; what came of it, or, overlapped, of the one before: None when that was the first."""
        began = self._now()
        batch = self._scheduler.schedule()
        scheduled = self._now()
        self.seconds.schedule += scheduled - began
        issued = None
        if batch is not None:
            issued = _Flight(batch=batch, pending=self._runner.execute(batch), began=began)
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
        return self._scheduler.gauges()

    @property
    def counters(self) -> Counters:
        return self._scheduler.counters

    def reset_counters(self) -> None:
        """Begin to count, after the warm-up."""
        self._scheduler.counters = Counters()
        self.seconds = StepSeconds()

    def forget_prefixes(self) -> None:
        self._scheduler.forget_prefixes()

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    def close(self) -> None:
        self._runner.close()


def make_engine(model: LoadedModel, *, scheduler: SchedulerOptions, cache: CacheOptions) -> Engine:
    """An engine over a loaded model, as it was configured."""
    config = SchedulerConfig(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        policy=scheduler.policy,
        preemption_mode=scheduler.preemption_mode,
        enable_prefix_caching=cache.enable_prefix_caching,
    )
    rates = MeasuredRates(
        prefill_tokens_per_second=model.prefill_tokens_per_second,
        swap_bytes_per_second=model.swap_bytes_per_second,
        block_bytes=model.block_bytes,
    )
    stall_bound = None
    if scheduler.max_generation_stall_seconds > 0.0:
        stall_bound = StallBound(
            scheduler.max_generation_stall_seconds, at_least=model.layout.block_size, costs=model.step_costs
        )
    return Engine(
        scheduler=Scheduler(config, model.layout, rates, stall_bound), runner=model.runner, overlap=model.asynchronous
    )
