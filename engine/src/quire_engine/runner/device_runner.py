"""The runner on a GPU: a ``core.ports.Runner`` that runs the model on one batch after another.

``execute`` issues a step and returns while it runs: the next step may be issued before this one is waited for, and uses
the tokens that this one samples without a read by the host. The host waits only in ``PendingStep.wait``, for the
sampled tokens. A step: write the inputs into pinned memory, upload them with the other changes, copy swapped blocks,
run the model (a captured graph, unless the batch is too large for one), sample, download the tokens.

With Triton's interpreter the same runner works on CPU tensors: see ``device.accelerator``.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Batch, TokenMasks
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.model.family import CapturableLM, CausalLM
from quire_engine.model.layers import ModelInputs
from quire_engine.runner.adapter_store import RunnerAdapters
from quire_engine.runner.device.accelerator import Accelerator, Mark, make_accelerator
from quire_engine.runner.device.faults import FULL_IN_STEP, device_faults
from quire_engine.runner.device.graphs import GraphKey, GraphSizes, GraphStore
from quire_engine.runner.device.inputs import (
    DeviceRows,
    QueryLens,
    captured_lens,
    model_inputs,
    of_all_tokens,
    padded_sizes,
    restart_attention,
    sizes_of,
    write_adapters,
    write_inputs,
    write_padding,
)
from quire_engine.runner.device.pending import GpuClock, PendingStep
from quire_engine.runner.device.reports import PromptReport, stage_prompt_report
from quire_engine.runner.device.sampler import DeviceDraw, DeviceSampler, DrawPlan
from quire_engine.runner.device.staging import HostToDeviceBatch, InputSizes, StepInputs, StepStaging
from quire_engine.runner.device.swap import DeviceSwapper, TimedCopy
from quire_engine.runner.inputs import step_columns, table_blocks
from quire_engine.runner.logprobs import logits_rows
from quire_kernels.kv_cache import KVCache
from quire_kernels.lora import group_tokens
from quire_kernels.paged_attention.plan import allocate_workspace, fixed_split_tokens

_FULL_IN_CAPTURE = (
    "lower --gpu-memory-utilization, so that the KV cache leaves more, or have fewer graphs by"
    " --cudagraph-capture-sizes, or none by --enforce-eager"
)


class DeviceRunner:
    """The runner of a GPU.

    ``caches`` have one block more than the layout says, for padding. ``capture_graphs`` captures those of
    ``graph_sizes`` that a step can have; ``model`` must then be native. ``num_heads`` are the query heads of the
    widest layer.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        caches: tuple[KVCache, ...],
        swap_space: tuple[KVCache, ...] = (),
        layout: KVCacheLayout,
        vocab_size: int,
        num_heads: int,
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
        device: torch.device,
        graph_sizes: GraphSizes = GraphSizes(),  # noqa: B008  (frozen)
        deterministic: bool = False,
        accelerator: Accelerator | None = None,
        adapters: RunnerAdapters | None = None,
    ) -> None:
        for group in layout.groups:
            assert all(caches[layer].num_blocks > group.num_blocks for layer in group.layers), "no spare block"
        self._accelerator = make_accelerator(device) if accelerator is None else accelerator
        self._model = model
        self._adapters = adapters
        self._adapter_slots = 0 if adapters is None else adapters.pool.num_slots
        self._caches = caches
        self._layout = layout
        self._vocab_size = vocab_size
        max_blocks = table_blocks(layout, max_model_len)
        self._rows = DeviceRows(
            layout=layout, max_rows=max_rows, max_blocks=max_blocks, max_tokens=max_tokens, device=device
        )
        self._staging = StepStaging(
            self._accelerator,
            groups=len(layout.groups),
            largest=InputSizes(
                tokens=max_tokens,
                sequences=max_rows,
                logits=max(max_tokens, max_rows),
                draws=max_rows,
                adapter_slots=self._adapter_slots,
            ),
        )
        self._sampler = DeviceSampler(max_rows=max_rows, vocab_size=vocab_size, device=device)
        self._swapper = DeviceSwapper(self._accelerator, layout, caches, swap_space)
        self._workspace = allocate_workspace(
            max_tokens=max(max_tokens, max_rows),
            heads=num_heads,
            head_dim=max(cache.head_dim for cache in caches),
            device=caches[0].keys.device,
            split_tokens=fixed_split_tokens(max_model_len) if deterministic else None,
        )
        self._max_rows = max_rows
        self._graphs = GraphStore(self._accelerator, graph_sizes.within(sequences=max_rows, tokens=max_tokens))
        self._captured_inputs: dict[GraphKey, StepInputs[Tensor]] = {}
        self._hidden: Tensor | None = None  # [rows, H], written by captured steps
        self._clock = GpuClock()

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
            self._graphs.capture(self._captured_work, captured)

    def close(self) -> None:
        self._graphs.close()
        self._captured_inputs.clear()
        self._hidden = None
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
        logits = self._run(issued)
        return IssuedForward(
            runner=self,
            batch=batch,
            issued=issued,
            logits=logits,
            copies=copies,
            started=started,
            ran=self._accelerator.mark(),
            prepare_seconds=prepared - began,
        )

    @torch.inference_mode()
    def sample(self, forward: "IssuedForward", masks: TokenMasks | None) -> PendingStep:
        """Issue the sampling of the step whose forward pass was issued last."""
        with device_faults(f"running a step of {forward.batch.num_tokens} tokens", when_full=FULL_IN_STEP):
            return self._sample(forward, masks)

    def _sample(self, forward: "IssuedForward", masks: TokenMasks | None) -> PendingStep:
        issued = forward.issued
        prompts = None
        if issued.prompts is not None:
            prompts = issued.prompts.launch(forward.logits).download(self._accelerator)
        drawn = self._draw(issued, forward.logits, masks)
        report = drawn.report if drawn is not None else None
        return PendingStep(
            batch=forward.batch,
            plan=issued.draw,
            token_ids=None if drawn is None else self._accelerator.download(drawn.token_ids),
            report=None if report is None else report.download(self._accelerator),
            prompts=prompts,
            copies=forward.copies,
            clock=self._clock,
            started=forward.started,
            ran=forward.ran,
            done=self._accelerator.mark(),
            prepare_seconds=forward.prepare_seconds,
        )

    def _prepare(self, batch: Batch) -> "_Issued":
        """Compute and upload everything that a step needs from the host."""
        transfer = HostToDeviceBatch(self._accelerator)
        self._rows.stage(batch, transfer)
        columns = step_columns(batch, self._rows.host.tables, self._layout.block_size)
        wanted = logits_rows(batch)
        graph = self._graphs.key_for(sequences=len(columns.rows), tokens=batch.num_tokens)
        if graph is not None and not graph.is_mixed:
            wanted = of_all_tokens(wanted, batch.num_tokens)
        if len(wanted.rows) > self._max_rows:
            graph = None  # Many positions of prompts are reported.
        adapted = group_tokens(self._rows.slot_of_row[columns.token_rows]) if self._adapter_slots else None
        if graph is not None:
            sizes = padded_sizes(graph, max_rows=self._max_rows, adapter_slots=self._adapter_slots)
        else:
            sizes = sizes_of(columns, wanted, adapter_slots=0 if adapted is None else self._adapter_slots)
        samples = np.asarray(batch.samples, dtype=np.bool_)
        target = self._staging.begin(sizes)
        write_inputs(target, columns, wanted, samples, self._rows)
        if sizes.adapter_slots:
            write_adapters(target, adapted)
        self._staging.upload(sizes)
        draw = self._sampler.stage(batch, columns.rows[samples], transfer)
        prompts = stage_prompt_report(batch, wanted.reported, transfer)
        transfer.send()
        self._rows.apply()
        self._sampler.apply()
        inputs = self._captured_inputs[graph] if graph is not None else self._staging.on_device(sizes)
        return _Issued(
            inputs=inputs,
            graph=graph,
            num_logits=len(wanted.rows),
            query_lens=QueryLens.of(columns.scheduled),
            draw=draw,
            all_drawn=np.array_equal(wanted.sampled, np.arange(draw.count)),
            prompts=prompts,
        )

    def _run(self, issued: "_Issued") -> Tensor:
        """Return logits [R, V]."""
        if issued.graph is not None:
            assert self._hidden is not None and isinstance(self._model, CapturableLM)
            self._graphs.replay(issued.graph)
            # The LM head is outside of graphs: it has exactly the rows of the batch, and its result is not copied.
            hidden = self._hidden[: issued.num_logits]
            return self._model.logits(hidden) if issued.num_logits else hidden.new_empty((0, self._vocab_size))
        prepared = self._prepared(issued.inputs, issued.query_lens)
        self._rows.fill_in(issued.inputs)
        return self._model(prepared, self._caches)

    def _prepared(self, inputs: StepInputs[Tensor], query_lens: QueryLens) -> ModelInputs:
        """Return the model's inputs with the content that ``inputs`` will have."""
        tables = self._rows.block_tables(len(inputs.rows))
        return model_inputs(inputs, tables, self._layout, self._workspace, query_lens)

    def _draw(self, issued: "_Issued", logits: Tensor, masks: TokenMasks | None) -> DeviceDraw | None:
        count = issued.draw.count
        if not count:
            return None
        inputs = issued.inputs
        # Nearly always the first lines; other lines are in between if prompts report, or compute one token.
        drawn_from = logits[:count] if issued.all_drawn else logits.index_select(0, inputs.drawn_lines[:count])
        drawn = self._sampler.draw(drawn_from, inputs, issued.draw, masks)
        self._rows.remember(inputs.drawn_rows[:count], drawn.token_ids)
        return drawn

    def _captured_work(self, key: GraphKey) -> Callable[[], None]:
        sizes = padded_sizes(key, max_rows=self._max_rows, adapter_slots=self._adapter_slots)
        # During the capture only padding is computed, without an adapter; the graph has the launches for adapters.
        target = self._staging.begin(sizes)
        write_padding(target, self._rows, tokens=0, sequences=0, logits=0)
        if sizes.adapter_slots:
            write_adapters(target, None)
        self._staging.upload(sizes)
        inputs = self._staging.on_device(sizes)
        self._captured_inputs[key] = inputs
        model, caches = self._model, self._caches
        assert isinstance(model, CapturableLM), "only native models are captured"
        prepared = self._prepared(inputs, captured_lens(key))
        if self._hidden is None:
            self._rows.fill_in(inputs)
            made = model.hidden_states(prepared, caches)
            self._hidden = made.new_empty((self._max_rows, made.shape[1]))
        hidden = self._hidden[: len(inputs.logits_rows)]

        def run() -> None:
            self._rows.fill_in(inputs)
            restart_attention(prepared)
            hidden.copy_(model.hidden_states(prepared, caches))

        return run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Issued:
    """A step whose inputs are being uploaded."""

    inputs: StepInputs[Tensor]
    graph: GraphKey | None
    """The captured graph to replay; None runs launch by launch."""
    num_logits: int  # R
    query_lens: QueryLens
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
    copies: list[TimedCopy]
    started: Mark
    """The mark before the model; ``ran`` is after it."""
    ran: Mark
    prepare_seconds: float

    @property
    def token_ids(self) -> list[int]:
        return self.batch.token_ids

    def sample(self, masks: TokenMasks | None = None) -> PendingStep:
        """Issue the sampling and the download of the tokens."""
        return self.runner.sample(self, masks)
