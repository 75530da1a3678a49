"""A step in flight on the device: its later output, and the only place where the host waits for it."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire_engine.core.batch import Batch, RunnerOutput, TokenLogprobs
from quire_engine.runner.device.accelerator import Mark
from quire_engine.runner.device.draft_model import DeviceDraftModel, Proposed
from quire_engine.runner.device.faults import FULL_IN_STEP, device_faults
from quire_engine.runner.device.reports import PendingReport, read_prompts, spread
from quire_engine.runner.device.sampler import DrawPlan
from quire_engine.runner.device.swap import TimedCopy
from quire_engine.runner.verification import verified


@dataclass(slots=True)
class GpuClock:
    """The total time of steps on the device."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMarks:
    """The marks before and after the passes of a step, in their order."""

    started: Mark
    drafted: Mark
    """The mark after the passes of a draft model."""
    ran: Mark
    """The mark after the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """A ``core.ports.PendingOutput``. The tensors are copies in host memory, complete when ``done`` is reached."""

    batch: Batch
    plan: DrawPlan
    token_ids: Tensor | None  # [K] int64
    report: PendingReport | None
    prompts: PendingReport | None
    proposed: Proposed | None
    """The drafts of a draft model."""
    drafter: DeviceDraftModel | None
    """It takes the drafts, and what was sampled, when they have arrived."""
    copies: list[TimedCopy]
    marks: PassMarks
    done: Mark
    """The mark after the sampling."""
    prepare_seconds: float
    clock: GpuClock

    def wait(self) -> RunnerOutput:
        with device_faults(f"running a step of {self.batch.num_tokens} tokens", when_full=FULL_IN_STEP):
            marks = self.marks
            self.done.wait()
            swap_seconds = sum(copy.wait() for copy in self.copies)
            draft_seconds = marks.drafted.seconds_since(marks.started)
            run_seconds = marks.ran.seconds_since(marks.drafted)
            sample_seconds = self.done.seconds_since(marks.ran)
        self.clock.seconds += draft_seconds + run_seconds + sample_seconds
        sampled = self._sampled()
        return RunnerOutput(
            token_ids=sampled.token_ids,
            counts=sampled.counts,
            logprobs=sampled.logprobs,
            prompt_logprobs=read_prompts(self.batch, self.prompts),
            prepare_seconds=self.prepare_seconds,
            run_seconds=run_seconds,
            sample_seconds=sample_seconds,
            swap_seconds=swap_seconds,
            draft_seconds=draft_seconds,
        )

    def _sampled(self) -> "_Sampled":
        """Return the sampled tokens; of a sequence with drafts, those up to the first that is not the draft."""
        reported = self.plan.reported
        logprobs = None if reported is None else spread(self.report, reported.places.array, self.plan.count)
        if self.token_ids is None:
            return _Sampled(token_ids=[], logprobs=logprobs)
        if not self.batch.num_drafts:
            sampled = self.token_ids.tolist()
            if self.drafter is not None:
                self.drafter.note_sampled(self.batch, sampled)
            return _Sampled(token_ids=sampled, logprobs=logprobs)
        token_ids = self.token_ids.numpy()
        if self.proposed is None:
            inputs = np.asarray(self.batch.token_ids, dtype=np.int64)
        else:
            inputs = self.proposed.inputs_of(self.batch)
        found = verified(self.batch, token_ids, inputs)
        kept, counts = token_ids[found.kept].tolist(), found.counts.tolist()
        if self.drafter is not None:
            self.drafter.note_sampled(self.batch, kept, counts)
        return _Sampled(
            token_ids=kept,
            counts=counts,
            logprobs=None if logprobs is None else [logprobs[place] for place in found.kept.tolist()],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    token_ids: list[int]
    counts: list[int] | None = None
    logprobs: list[TokenLogprobs | None] | None
