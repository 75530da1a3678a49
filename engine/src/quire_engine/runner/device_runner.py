"""The runner on a GPU: a ``core.ports.Runner`` that runs the model on one batch after another.

``execute`` issues a step and returns while it runs: the next step may be issued before this one is waited for, and uses
the tokens that this one samples without a read by the host. The host waits only in ``PendingStep.wait``, for the
sampled tokens. A step: write the inputs into pinned memory, upload them with the other changes, copy swapped blocks,
let a draft model propose tokens, run the model (a captured graph, unless the batch is too large for one), sample,
download the tokens.

With Triton's interpreter the same runner works on CPU tensors: see ``device.accelerator``.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Batch, TokenMasks
from quire_engine.model.family import CausalLM
from quire_engine.runner.adapter_store import RunnerAdapters
from quire_engine.runner.device.draft_model import DeviceDraftModel, Proposed, pass_tokens
from quire_engine.runner.device.faults import FULL_IN_STEP, device_faults
from quire_engine.runner.device.graphs import GraphSizes
from quire_engine.runner.device.passes import StagedPass
from quire_engine.runner.device.pending import GpuClock, PassMarks, PendingStep
from quire_engine.runner.device.reports import PromptReport, stage_prompt_report
from quire_engine.runner.device.sampler import DeviceDraw, DeviceSampler, DrawPlan
from quire_engine.runner.device.staging import HostToDeviceBatch
from quire_engine.runner.device.swap import TimedCopy
from quire_engine.runner.device_steps import DeviceParts, DeviceSteps
from quire_engine.runner.inputs import step_columns
from quire_engine.runner.logprobs import logits_rows
from quire_engine.runner.verification import draws_of
from quire_kernels.kv_cache import KVCache
from quire_kernels.lora import group_tokens

_FULL_IN_CAPTURE = (
    "lower --gpu-memory-utilization, so that the KV cache leaves more, or have fewer graphs by"
    " --cudagraph-capture-sizes, or none by --enforce-eager"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDraft:
    """A draft model for the device runner, whose caches are the last ``layers``."""

    model: CausalLM
    layers: int
    max_tokens: int
    """The most drafts of a sequence."""


class DeviceRunner(DeviceSteps):
    """The runner of a GPU. The caches of the ``draft`` are the last ones.

    ``capture_graphs`` captures those of ``graph_sizes`` that a step can have; the model must then be native.
    """

    def __init__(
        self,
        parts: DeviceParts,
        *,
        vocab_size: int,
        graph_sizes: GraphSizes = GraphSizes(),  # noqa: B008  (frozen)
        adapters: RunnerAdapters | None = None,
        draft: DeviceDraft | None = None,
    ) -> None:
        super().__init__(parts, room=parts.max_tokens if draft is None else pass_tokens(parts.max_tokens))
        self._adapters = adapters
        self._adapter_slots = 0 if adapters is None else adapters.pool.num_slots
        self._sampler = DeviceSampler(
            max_rows=parts.max_rows, most_draws=parts.most_draws, vocab_size=vocab_size, device=parts.device
        )
        own = len(parts.caches)
        self._drafter: DeviceDraftModel | None = None
        if draft is not None:
            own -= draft.layers
            self._drafter = self._make_drafter(draft, parts.caches[own:], graph_sizes)
        self._passes = self._make_passes(parts.caches[:own], graph_sizes, adapter_slots=self._adapter_slots)
        self._clock = GpuClock()

    def _make_drafter(
        self, draft: DeviceDraft, caches: tuple[KVCache, ...], graph_sizes: GraphSizes
    ) -> DeviceDraftModel:
        parts = self._parts
        return DeviceDraftModel(
            draft.model,
            caches,
            self._layout,
            accelerator=self._accelerator,
            workspace=self._workspace,
            sampler=self._sampler,
            max_rows=parts.max_rows,
            max_tokens=parts.max_tokens,
            max_model_len=parts.max_model_len,
            max_drafts=draft.max_tokens,
            graph_sizes=graph_sizes,
        )

    @torch.inference_mode()
    def execute(self, batch: Batch) -> "IssuedForward":
        with device_faults(f"running a step of {batch.num_tokens} tokens", when_full=FULL_IN_STEP):
            return self._execute(batch)

    @torch.inference_mode()
    def capture_graphs(self, captured: Callable[[], None] = lambda: None) -> None:
        """Capture the graphs after every kernel has run once; earlier steps and larger batches run without graphs.

        Call ``captured`` after each graph.
        """
        with device_faults("capturing CUDA graphs", when_full=_FULL_IN_CAPTURE):
            self._passes.capture_graphs(captured)
            if self._drafter is not None:
                self._drafter.capture_graphs(captured)

    def close(self) -> None:
        self._passes.close()
        if self._drafter is not None:
            self._drafter.close()
        self._accelerator.close()

    @property
    def gpu_seconds(self) -> float:
        """The seconds that finished steps took on the device, from the model's first launch to the sampling."""
        return self._clock.seconds

    def _execute(self, batch: Batch) -> "IssuedForward":
        began = time.perf_counter()
        issued = self._prepare(batch)
        prepared = time.perf_counter()
        copies = self._swapper.apply(batch)
        if self._adapters is not None:
            self._adapters.apply(batch)  # after the steps before, which may still use the slot
        started = self._accelerator.mark()
        proposed = None
        if self._drafter is not None:
            proposed = self._drafter.propose(batch, self._rows.host.tables[0], issued.staged.inputs.token_ids)
        drafted = started if self._drafter is None else self._accelerator.mark()
        logits = self._passes.run(issued.staged)
        return IssuedForward(
            runner=self,
            batch=batch,
            issued=issued,
            logits=logits,
            proposed=proposed,
            copies=copies,
            marks=PassMarks(started=started, drafted=drafted, ran=self._accelerator.mark()),
            prepare_seconds=prepared - began,
        )

    @torch.inference_mode()
    def sample(self, forward: "IssuedForward", masks: TokenMasks | None) -> PendingStep:
        """Issue the sampling of the step whose forward pass was issued last."""
        with device_faults(f"running a step of {forward.batch.num_tokens} tokens", when_full=FULL_IN_STEP):
            return self._sample(forward, masks)

    def _sample(self, forward: "IssuedForward", masks: TokenMasks | None) -> PendingStep:
        issued, logits = forward.issued, forward.logits
        prompts = None
        if issued.prompts is not None:
            prompts = issued.prompts.launch(logits).download(self._accelerator)
        drawn = self._draw(issued, logits, masks)
        if drawn is not None and not forward.batch.num_drafts:
            # After drafts the next step waits for this one, because only then its lengths are known.
            self._rows.remember(issued.staged.inputs.drawn_rows[: issued.draw.count], drawn.token_ids)
        report = drawn.report if drawn is not None else None
        return PendingStep(
            batch=forward.batch,
            plan=issued.draw,
            token_ids=None if drawn is None else self._accelerator.download(drawn.token_ids),
            report=None if report is None else report.download(self._accelerator),
            prompts=prompts,
            proposed=forward.proposed,
            drafter=self._drafter,
            copies=forward.copies,
            clock=self._clock,
            marks=forward.marks,
            done=self._accelerator.mark(),
            prepare_seconds=forward.prepare_seconds,
        )

    def _prepare(self, batch: Batch) -> "_Issued":
        """Compute and upload everything that a step needs from the host."""
        transfer = HostToDeviceBatch(self._accelerator)
        self._rows.stage(batch, transfer)
        if self._drafter is not None:
            self._drafter.stage(batch, self._rows.host.tables[0], transfer)
        columns = step_columns(batch, self._rows.host.tables, self._layout.block_size)
        wanted, draws = logits_rows(batch), draws_of(batch)
        staged = self._passes.stage(
            columns,
            wanted,
            draws,
            transfer,
            adapted=group_tokens(self._rows.slot_of_row[columns.token_rows]) if self._adapter_slots else None,
        )
        draw = self._sampler.stage(batch, draws.rows, transfer)
        prompts = stage_prompt_report(batch, wanted.reported, transfer)
        transfer.send()
        self._rows.apply()
        self._sampler.apply()
        if self._drafter is not None:
            self._drafter.apply()
        return _Issued(
            staged=staged,
            draw=draw,
            all_drawn=np.array_equal(wanted.sampled, np.arange(draw.count)),
            prompts=prompts,
        )

    def _draw(self, issued: "_Issued", logits: Tensor, masks: TokenMasks | None) -> DeviceDraw | None:
        count = issued.draw.count
        if not count:
            return None
        inputs = issued.staged.inputs
        # Nearly always all lines; other lines are in between if prompts report.
        drawn_from = logits[:count] if issued.all_drawn else logits.index_select(0, inputs.drawn_lines[:count])
        return self._sampler.draw(drawn_from, inputs, issued.draw, masks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Issued:
    """A step whose inputs are being uploaded."""

    staged: StagedPass
    draw: DrawPlan
    all_drawn: bool
    """True if the sampled lines are the first lines of the logits, in order."""
    prompts: PromptReport | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedForward:
    """The ``core.ports.ForwardPass`` of a GPU: the host has issued the model, and need not wait for it."""

    runner: DeviceRunner
    batch: Batch
    issued: _Issued
    logits: Tensor  # [R, V]
    proposed: Proposed | None
    copies: list[TimedCopy]
    marks: PassMarks
    prepare_seconds: float

    @property
    def token_ids(self) -> list[int]:
        """The inputs of the step; this waits for the drafts of a draft model."""
        return self.batch.token_ids if self.proposed is None else self.proposed.inputs_of(self.batch).tolist()

    def sample(self, masks: TokenMasks | None = None) -> PendingStep:
        """Issue the sampling and the download of the tokens."""
        return self.runner.sample(self, masks)
