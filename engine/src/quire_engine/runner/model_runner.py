"""The runner of the model: a ``core.ports.Runner`` that runs it on one batch after another, on any device.

``execute`` issues a step and returns; ``sample`` issues the sampling. On a CPU each is done when it returns. On a GPU
the step may still run: the next one may be issued before this one is waited for, and uses the tokens that this one
samples without a read by the host, which waits only in ``Step.wait``, for the sampled tokens.

A step: make the inputs and upload them with the other changes, copy swapped blocks, let a draft model propose tokens,
run the model (a captured step if its size has one), sample, download the tokens.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Batch, RunnerOutput, TokenLogprobs, TokenMasks
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.model.family import CausalLM
from quire_engine.runner.accelerator import Accelerator, Mark
from quire_engine.runner.adapter_store import RunnerAdapters
from quire_engine.runner.captured import GraphSizes
from quire_engine.runner.cpu_passes import CpuPasses
from quire_engine.runner.device_passes import DevicePasses, DeviceRows
from quire_engine.runner.draft_model import DraftModel, Proposed, draft_graph_sizes, pass_tokens
from quire_engine.runner.faults import FULL_IN_STEP, device_faults, raise_fault
from quire_engine.runner.inputs import Rows, StepColumns, step_columns, table_blocks
from quire_engine.runner.logprobs import (
    LogitsRows,
    PendingReport,
    PromptReport,
    by_prompt,
    logits_rows,
    spread,
    stage_prompt_report,
)
from quire_engine.runner.passes import Passes, PassSizes, StagedPass
from quire_engine.runner.sampler import DrawPlan, Sampler
from quire_engine.runner.staging import HostToDeviceBatch
from quire_engine.runner.swap import TimedCopy, make_swapper
from quire_engine.runner.verification import Draws, draws_of, verified
from quire_kernels.kv_cache import KVCache
from quire_kernels.lora import group_tokens
from quire_kernels.paged_attention.plan import Workspace, allocate_workspace, fixed_split_tokens

_FULL_IN_CAPTURE = (
    "lower --gpu-memory-utilization, so that the KV cache leaves more, or have fewer graphs by"
    " --cudagraph-capture-sizes, or none by --enforce-eager"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftParts:
    """A draft model for the runner, whose caches are the last ``layers``."""

    model: CausalLM
    layers: int
    max_tokens: int
    """The most drafts of a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """The things that a runner is made of."""

    model: CausalLM
    caches: tuple[KVCache, ...]
    """On a device they have one block more than the layout says, for padding."""
    layout: KVCacheLayout
    num_heads: int
    """The query heads of the widest layer."""
    max_rows: int
    max_tokens: int
    max_model_len: int
    accelerator: Accelerator
    graph_sizes: GraphSizes = GraphSizes()
    """The steps to capture ahead, if the model is native."""
    most_drafts: int = 0
    """The most drafts that a step verifies."""
    in_flight: int = 2
    """The most steps that are issued and not done."""
    deterministic: bool = False
    """True if attention does not depend on how a sequence is divided into steps."""
    adapters: RunnerAdapters | None = None

    @property
    def most_draws(self) -> int:
        return self.max_rows + self.most_drafts

    @property
    def device(self) -> torch.device:
        return self.accelerator.device


class StepRunner:
    """The state of a runner, and the part of a step that all runners have in common."""

    def __init__(self, parts: RunnerParts, draft: DraftParts | None = None) -> None:
        self._parts, self._accelerator, layout = parts, parts.accelerator, parts.layout
        is_device = parts.accelerator.is_device
        for group in layout.groups if is_device else ():
            assert all(parts.caches[layer].num_blocks > group.num_blocks for layer in group.layers), "no spare block"
        room = parts.max_tokens if draft is None else pass_tokens(parts.max_tokens)
        self._workspace = self._make_workspace(room) if is_device else None
        self._swapper = make_swapper(self._accelerator, layout, parts.caches)
        self._rows = self._make_rows(layout, max_tokens=parts.max_tokens)
        own = len(parts.caches) - (0 if draft is None else draft.layers)
        self._passes = self._make_passes(
            parts.model,
            parts.caches[:own],
            layout,
            self._rows,
            sizes=PassSizes(
                rows=parts.max_rows,
                tokens=parts.max_tokens,
                logits=parts.most_draws,
                draws=parts.most_draws,
                adapter_slots=0 if parts.adapters is None else parts.adapters.pool.num_slots,
            ),
            graph_sizes=parts.graph_sizes,
            in_flight=parts.in_flight,
        )

    def _make_workspace(self, room: int) -> Workspace:
        parts = self._parts
        return allocate_workspace(
            max_tokens=max(room, parts.max_rows),
            heads=parts.num_heads,
            head_dim=max(cache.head_dim for cache in parts.caches),
            device=parts.caches[0].keys.device,
            split_tokens=fixed_split_tokens(parts.max_model_len) if parts.deterministic else None,
        )

    def _make_rows(self, layout: KVCacheLayout, *, max_tokens: int) -> Rows:
        parts, max_blocks = self._parts, table_blocks(layout, self._parts.max_model_len)
        if not self._accelerator.is_device:
            return Rows(layout, max_rows=parts.max_rows, max_blocks=max_blocks, device=parts.device)
        return DeviceRows(
            layout, max_rows=parts.max_rows, max_blocks=max_blocks, max_tokens=max_tokens, device=parts.device
        )

    def _make_passes(
        self,
        model: CausalLM,
        caches: tuple[KVCache, ...],
        layout: KVCacheLayout,
        rows: Rows,
        *,
        sizes: PassSizes,
        graph_sizes: GraphSizes,
        in_flight: int,
        drafts: bool = False,
    ) -> Passes:
        """Return the passes of a model over its ``caches``."""
        if isinstance(rows, DeviceRows):
            assert self._workspace is not None
            return DevicePasses(
                model,
                caches,
                layout,
                rows,
                accelerator=self._accelerator,
                workspace=self._workspace,
                sizes=sizes,
                graph_sizes=graph_sizes,
                in_flight=in_flight,
            )
        return CpuPasses(
            model,
            caches,
            layout,
            rows,
            accelerator=self._accelerator,
            sizes=sizes,
            graph_sizes=graph_sizes,
            deterministic=self._parts.deterministic and not drafts,
            drafts=drafts,
        )

    def _stage(self, columns: StepColumns, wanted: LogitsRows, draws: Draws, transfer: HostToDeviceBatch) -> StagedPass:
        """Stage the pass of a batch."""
        slots = self._rows.adapter_slot
        adapted = None if self._parts.adapters is None else group_tokens(slots[columns.token_rows])
        return self._passes.stage(columns, wanted, draws, transfer, adapted=adapted)

    def _copy_blocks(self, batch: Batch) -> list[TimedCopy]:
        """Copy swapped blocks, and adapters into their slots, which steps before may still have used."""
        copies = self._swapper.apply(batch)
        if self._parts.adapters is not None:
            self._parts.adapters.apply(batch)
        return copies

    def capture_graphs(self, captured: Callable[[], None] = lambda: None) -> None:
        """Capture steps after every kernel has run once, and call ``captured`` after each; others run without."""

    def close(self) -> None:
        """Wait for all work; the caches and weights are released with the object."""
        self._passes.close()
        self._accelerator.close()


class ModelRunner(StepRunner):
    """The runner of a rank that samples. The caches of the ``draft`` are the last ones."""

    def __init__(self, parts: RunnerParts, *, vocab_size: int, draft: DraftParts | None = None) -> None:
        super().__init__(parts, draft)
        self._sampler = Sampler(
            max_rows=parts.max_rows, most_draws=parts.most_draws, vocab_size=vocab_size, device=parts.device
        )
        self.drafter = None if draft is None else self._make_drafter(draft)
        self._captured = 0
        self.gpu_seconds = 0.0
        """The seconds that finished steps took on the device, from the model's first launch to the sampling."""

    def _make_drafter(self, draft: DraftParts) -> DraftModel:
        parts, layout = self._parts, self._parts.layout
        (group,) = layout.groups
        own = replace(layout, groups=(replace(group, layers=tuple(range(draft.layers))),))
        room = pass_tokens(parts.max_tokens)
        rows = self._make_rows(own, max_tokens=room)
        passes = self._make_passes(
            draft.model,
            parts.caches[-draft.layers :],
            own,
            rows,
            sizes=PassSizes(rows=parts.max_rows, tokens=room, logits=parts.max_rows, draws=parts.max_rows),
            graph_sizes=draft_graph_sizes(parts.graph_sizes),
            in_flight=draft.max_tokens + 2,
            drafts=True,
        )
        return DraftModel(
            layout,
            passes,
            rows,
            accelerator=self._accelerator,
            sampler=self._sampler,
            max_rows=parts.max_rows,
            max_tokens=parts.max_tokens,
            max_model_len=parts.max_model_len,
            max_drafts=draft.max_tokens,
        )

    @torch.inference_mode()
    def execute(self, batch: Batch) -> "Step":
        accelerator, drafter = self._accelerator, self.drafter
        try:
            began = time.perf_counter()
            accelerator.begin(batch.num_tokens)
            step = self._prepare(batch)
            step.prepare_seconds = time.perf_counter() - began
            step.copies = self._copy_blocks(batch)
            step.started = step.drafted = accelerator.mark()
            if drafter is not None:
                step.proposed = drafter.propose(batch, self._rows.tables[0], step.staged.token_ids)
                step.drafted = accelerator.mark()
            step.logits = self._passes.run(step.staged)
            step.ran = accelerator.mark()
        except Exception as error:
            raise_fault(error, _running(batch), when_full=FULL_IN_STEP)
            raise
        before, self._captured = self._captured, self._count_captured()
        step.is_first = self._captured > before
        return step

    @torch.inference_mode()
    def capture_graphs(self, captured: Callable[[], None] = lambda: None) -> None:
        with device_faults("capturing CUDA graphs", when_full=_FULL_IN_CAPTURE):
            self._passes.capture(captured)
            if self.drafter is not None:
                self.drafter.passes.capture(captured)
        self._captured = self._count_captured()

    def close(self) -> None:
        if self.drafter is not None:
            self.drafter.passes.close()
        super().close()

    def _count_captured(self) -> int:
        """Return the number of steps of the model and of the drafter that were captured."""
        return self._passes.captured + (0 if self.drafter is None else self.drafter.passes.captured)

    def _prepare(self, batch: Batch) -> "Step":
        """Compute and upload everything that a step needs from the host."""
        rows, drafter = self._rows, self.drafter
        transfer = HostToDeviceBatch(self._accelerator)
        rows.stage(batch, transfer)
        if drafter is not None:
            drafter.stage(batch, rows.tables[0], transfer)
        columns = step_columns(batch, rows.tables, self._parts.layout.block_size)
        wanted, draws = logits_rows(batch, columns.ends), draws_of(batch, columns)
        staged = self._stage(columns, wanted, draws, transfer)
        plan = self._sampler.stage(batch, draws.rows, transfer)
        prompts = stage_prompt_report(batch, wanted.reported, transfer) if batch.prompt_logprobs else None
        if transfer.items:
            transfer.send()
            rows.apply()
            self._sampler.apply()
            if drafter is not None:
                drafter.apply()
        return Step(runner=self, batch=batch, wanted=wanted, staged=staged, plan=plan, prompts=prompts)

    @torch.inference_mode()
    def sample(self, step: "Step", masks: TokenMasks | None) -> None:
        """Issue the sampling of the step whose forward pass was issued last, and the download of its tokens."""
        accelerator, staged, logits = self._accelerator, step.staged, step.logits
        assert logits is not None, "a step is sampled once"
        step.logits = None
        try:
            if step.prompts is not None:
                step.prompt_report = step.prompts.launch(logits).download(accelerator)
            if step.plan.count:
                # Other lines are in between if prompts report.
                lines = logits if staged.drawn_lines is None else logits.index_select(0, staged.drawn_lines)
                drawn, report = self._sampler.draw(lines, staged, step.plan, masks)
                if not step.batch.num_drafts:
                    # After drafts the next step waits for this one, because only then its lengths are known.
                    self._rows.remember(staged.drawn_rows, drawn)
                step.sampled = accelerator.download(drawn)
                step.report = None if report is None else report.download(accelerator)
            step.done = accelerator.mark()
        except Exception as error:
            raise_fault(error, _running(step.batch), when_full=FULL_IN_STEP)
            raise


@dataclass(kw_only=True)  # without slots, fields that most steps leave alone cost nothing
class Step:
    """A step: the ``ForwardPass`` when it is issued, and the ``PendingOutput`` when its sampling is."""

    runner: ModelRunner
    batch: Batch
    wanted: LogitsRows
    staged: StagedPass
    plan: DrawPlan
    prompts: PromptReport | None
    prepare_seconds: float = field(default=0.0, init=False)
    copies: list[TimedCopy] = field(init=False)
    # The marks before the passes of a draft model, after them, after the model and after the sampling.
    started: Mark = field(init=False)
    drafted: Mark = field(init=False)
    ran: Mark = field(init=False)
    done: Mark = field(init=False)
    proposed: Proposed | None = field(default=None, init=False)
    """The drafts of a draft model."""
    logits: Tensor | None = field(default=None, init=False)  # [R, V] until they are sampled from
    is_first: bool = field(default=False, init=False)
    # Copies in host memory, complete when ``done`` is reached.
    sampled: Tensor | None = field(default=None, init=False)  # [K] int64
    report: PendingReport | None = field(default=None, init=False)
    prompt_report: PendingReport | None = field(default=None, init=False)

    @property
    def token_ids(self) -> list[int]:
        """The inputs of the step; this waits for the drafts of a draft model."""
        return self.batch.token_ids if self.proposed is None else self.proposed.inputs_of(self.batch).tolist()

    def sample(self, masks: TokenMasks | None = None) -> "Step":
        """Issue the sampling and the download of the tokens."""
        self.runner.sample(self, masks)
        return self

    def wait(self) -> RunnerOutput:
        """Wait for the tokens, and return them."""
        started, drafted, ran, done = self.started, self.drafted, self.ran, self.done
        try:
            done.wait()
            swap_seconds = sum([copy.wait() for copy in self.copies]) if self.copies else 0.0
            draft_seconds = 0.0 if drafted is started else drafted.seconds_since(started)
            run_seconds, sample_seconds = ran.seconds_since(drafted), done.seconds_since(ran)
        except Exception as error:
            raise_fault(error, _running(self.batch), when_full=FULL_IN_STEP)
            raise
        token_ids, counts, logprobs = self._kept()
        runner, prompts = self.runner, self.prompt_report
        runner.gpu_seconds += draft_seconds + run_seconds + sample_seconds
        if runner.drafter is not None:
            runner.drafter.note_sampled(self.batch, token_ids, counts)
        return RunnerOutput(
            token_ids=token_ids,
            counts=counts,
            logprobs=logprobs,
            prompt_logprobs=[] if prompts is None else by_prompt(self.batch.prompt_logprobs, prompts.read()),
            prepare_seconds=self.prepare_seconds,
            run_seconds=run_seconds,
            sample_seconds=sample_seconds,
            swap_seconds=swap_seconds,
            draft_seconds=draft_seconds,
            is_first=self.is_first,
        )

    def _kept(self) -> tuple[list[int], list[int] | None, list[TokenLogprobs | None] | None]:
        """Return the tokens, the number of each sequence's, and their logprobs, as in ``RunnerOutput``.

        A sequence with drafts has those up to the first that is not the draft.
        """
        plan, wanted = self.plan, self.wanted
        logprobs = None if plan.reported is None else spread(self.report, plan.reported.places.array, plan.count)
        if self.sampled is None:
            return [], None, logprobs
        if not self.batch.num_drafts:
            return self.sampled.tolist(), None, logprobs
        sampled, inputs = self.sampled.numpy(), np.asarray(self.token_ids, dtype=np.int64)
        found = verified(self.batch, sampled, inputs, wanted.rows[wanted.sampled])
        if logprobs is not None:
            logprobs = [logprobs[place] for place in found.kept.tolist()]
        return sampled[found.kept].tolist(), found.counts.tolist(), logprobs


class StageRunner(StepRunner):
    """The runner of a rank that does not sample: it runs its part of the model, and passes the result on.

    Tokens come with each batch, so that nothing is read back.
    """

    @torch.inference_mode()
    def execute(self, batch: Batch) -> "IssuedStage":
        """Issue this rank's part of the model."""
        assert not batch.feedback_tokens, "a step in stages has known tokens"
        with device_faults(_running(batch), when_full=FULL_IN_STEP):
            self._accelerator.begin(batch.num_tokens)
            transfer = HostToDeviceBatch(self._accelerator)
            self._rows.stage(batch, transfer)
            columns = step_columns(batch, self._rows.tables, self._parts.layout.block_size)
            wanted, draws = logits_rows(batch, columns.ends), draws_of(batch, columns)
            staged = self._stage(columns, wanted, draws, transfer)
            transfer.send()
            self._rows.apply()
            self._copy_blocks(batch)
            self._passes.run(staged)
            return IssuedStage(batch=batch, done=self._accelerator.mark())


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedStage:
    """A step of this stage: the ``ForwardPass`` and the ``PendingOutput`` of a step without tokens."""

    batch: Batch
    done: Mark

    @property
    def token_ids(self) -> list[int]:
        return self.batch.token_ids

    def sample(self, masks: TokenMasks | None = None) -> "IssuedStage":
        return self

    def wait(self) -> RunnerOutput:
        """Wait until the stage is done, which a measurement of memory does."""
        with device_faults(_running(self.batch), when_full=FULL_IN_STEP):
            self.done.wait()
        return RunnerOutput(token_ids=[])


def _running(batch: Batch) -> str:
    return f"running a step of {batch.num_tokens} tokens"
