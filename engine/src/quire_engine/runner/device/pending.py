"""A step in flight on the device: its later output, and the only place where the host waits for it."""

from dataclasses import dataclass

from torch import Tensor

from quire_engine.core.batch import Batch, RunnerOutput
from quire_engine.runner.device.accelerator import Mark
from quire_engine.runner.device.faults import FULL_IN_STEP, device_faults
from quire_engine.runner.device.reports import PendingReport, read_prompts, spread
from quire_engine.runner.device.sampler import DrawPlan
from quire_engine.runner.device.swap import TimedCopy


@dataclass(slots=True)
class GpuClock:
    """The total time of steps on the device."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """A ``core.ports.PendingOutput``. The tensors are copies in host memory, complete when ``done`` is reached."""

    batch: Batch
    plan: DrawPlan
    token_ids: Tensor | None  # [K] int64
    report: PendingReport | None
    prompts: PendingReport | None
    copies: list[TimedCopy]
    started: Mark
    """The mark before the model; ``ran`` is after it, ``done`` after the sampling."""
    ran: Mark
    done: Mark
    prepare_seconds: float
    clock: GpuClock

    def wait(self) -> RunnerOutput:
        with device_faults(f"running a step of {self.batch.num_tokens} tokens", when_full=FULL_IN_STEP):
            self.done.wait()
            swap_seconds = sum(copy.wait() for copy in self.copies)
            run_seconds, sample_seconds = self.ran.seconds_since(self.started), self.done.seconds_since(self.ran)
        self.clock.seconds += run_seconds + sample_seconds
        reported = self.plan.reported
        return RunnerOutput(
            token_ids=[] if self.token_ids is None else self.token_ids.tolist(),
            logprobs=None if reported is None else spread(self.report, reported.places.array, self.plan.count),
            prompt_logprobs=read_prompts(self.batch, self.prompts),
            prepare_seconds=self.prepare_seconds,
            run_seconds=run_seconds,
            sample_seconds=sample_seconds,
            swap_seconds=swap_seconds,
        )
