"""The passes of one model on the device: their inputs, and their captured graphs.

A step is a pass of the target; a draft model has further ones in the same step. ``stage`` writes and
uploads the inputs of a pass, ``run`` replays the graph that it fits into, or launches it kernel by kernel.

Legend: T tokens, R wanted rows of logits, C rows of hidden states, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.model.family import CapturableLM, CausalLM
from quire_engine.model.layers import ModelInputs
from quire_engine.runner.device.accelerator import Accelerator
from quire_engine.runner.device.graphs import GraphKey, GraphSizes, GraphStore
from quire_engine.runner.device.inputs import (
    DeviceRows,
    QueryLens,
    captured_lens,
    model_inputs,
    padded_sizes,
    restart_attention,
    sizes_of,
    write_adapters,
    write_inputs,
    write_padding,
)
from quire_engine.runner.device.staging import HostToDeviceBatch, InputSizes, Item, StepInputs, StepStaging
from quire_engine.runner.inputs import StepColumns
from quire_engine.runner.logprobs import LogitsRows
from quire_engine.runner.verification import Draws
from quire_kernels.kv_cache import KVCache
from quire_kernels.lora import TokenGroups
from quire_kernels.paged_attention.plan import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSizes:
    """The largest pass of a model."""

    rows: int
    tokens: int
    logits: int
    """The tokens that have logits in a captured pass."""
    draws: int
    adapter_slots: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPass:
    """A pass whose inputs are being uploaded."""

    inputs: StepInputs[Tensor]
    graph: GraphKey | None
    """The captured graph to replay; None runs launch by launch."""
    num_hidden: int
    """C, the number of tokens that have hidden states."""
    lines: Item | None
    """[R] int64, the rows of hidden states that have logits; None if these are all of them."""
    query_lens: QueryLens


class DevicePasses:
    """The passes of a model over its ``caches``; ``rows`` are the sources of their inputs."""

    def __init__(
        self,
        model: CausalLM,
        caches: tuple[KVCache, ...],
        layout: KVCacheLayout,
        rows: DeviceRows,
        *,
        accelerator: Accelerator,
        workspace: Workspace,
        sizes: PassSizes,
        graph_sizes: GraphSizes,
        in_flight: int = 2,
    ) -> None:
        """Create them; the host prepares up to ``in_flight`` passes before it waits for the device."""
        self._model, self._caches, self._layout, self._rows = model, caches, layout, rows
        self._workspace = workspace
        self._sizes = sizes
        self._staging = StepStaging(
            accelerator,
            groups=len(layout.groups),
            largest=InputSizes(
                tokens=sizes.tokens,
                sequences=sizes.rows,
                logits=max(sizes.tokens, sizes.rows),
                draws=sizes.draws,
                adapter_slots=sizes.adapter_slots,
            ),
            buffers=in_flight,
        )
        self._graphs = GraphStore(accelerator, graph_sizes.within(sequences=sizes.rows, tokens=sizes.tokens))
        self._captured_inputs: dict[GraphKey, StepInputs[Tensor]] = {}
        self._hidden: Tensor | None = None  # [C, H] of the most rows, written by captured passes

    def capture_graphs(self, captured: Callable[[], None] = lambda: None) -> None:
        """Capture the graphs, and call ``captured`` after each."""
        self._graphs.capture(self._captured_work, captured)

    def close(self) -> None:
        self._graphs.close()
        self._captured_inputs.clear()
        self._hidden = None

    def stage(
        self,
        columns: StepColumns,
        wanted: LogitsRows,
        draws: Draws,
        transfer: HostToDeviceBatch,
        *,
        adapted: TokenGroups | None = None,
    ) -> StagedPass:
        """Write and upload the inputs of a pass; it may run once ``transfer`` is sent."""
        tokens = len(columns.token_ids)
        graph = self._graphs.key_for(sequences=len(columns.rows), tokens=tokens)
        padded = None if graph is None else self._padded(graph)
        if padded is not None and len(wanted.rows) > padded.logits:
            graph = padded = None  # Many positions of prompts are reported.
        # With as many rows of hidden states as tokens, a model returns those of all tokens in order.
        every = padded is not None and padded.logits == padded.tokens
        computed = np.arange(tokens) if every else wanted.rows
        if padded is not None:
            sizes = padded
        else:
            slots = 0 if adapted is None else self._sizes.adapter_slots
            sizes = sizes_of(columns, logits=len(computed), draws=len(draws.rows), adapter_slots=slots)
        target = self._staging.begin(sizes)
        write_inputs(target, columns, computed, wanted.sampled, draws, self._rows)
        if sizes.adapter_slots:
            write_adapters(target, adapted)
        self._staging.upload(sizes)
        return StagedPass(
            inputs=self._captured_inputs[graph] if graph is not None else self._staging.on_device(sizes),
            graph=graph,
            num_hidden=len(computed),
            lines=transfer.add(wanted.rows) if len(computed) != len(wanted.rows) else None,
            query_lens=QueryLens.of(columns.scheduled),
        )

    def run(self, staged: StagedPass) -> Tensor:
        """Issue a pass; return the logits [R, V], which are valid until the model's next one."""
        model = self._model
        if not isinstance(model, CapturableLM):
            prepared = self._prepared(staged.inputs, staged.query_lens)
            self._rows.fill_in(staged.inputs)
            return model(prepared, self._caches)
        hidden = self._hidden_states(model, staged)
        # The LM head is outside of graphs: it has exactly the wanted rows, and its result is not copied.
        wanted = hidden if staged.lines is None else hidden.index_select(0, staged.lines.on_device)
        return model.logits(wanted)

    def _hidden_states(self, model: CapturableLM, staged: StagedPass) -> Tensor:
        if staged.graph is not None:
            assert self._hidden is not None
            self._graphs.replay(staged.graph)
            return self._hidden[: staged.num_hidden]
        prepared = self._prepared(staged.inputs, staged.query_lens)
        self._rows.fill_in(staged.inputs)
        return model.hidden_states(prepared, self._caches)

    def _padded(self, key: GraphKey) -> InputSizes:
        sizes = self._sizes
        return padded_sizes(
            key,
            max_rows=sizes.rows,
            most_logits=sizes.logits,
            most_draws=sizes.draws,
            adapter_slots=sizes.adapter_slots,
        )

    def _prepared(self, inputs: StepInputs[Tensor], query_lens: QueryLens) -> ModelInputs:
        """Return the model's inputs with the content that ``inputs`` will have."""
        tables = self._rows.block_tables(len(inputs.rows))
        return model_inputs(inputs, tables, self._layout, self._workspace, query_lens)

    def _captured_work(self, key: GraphKey) -> Callable[[], None]:
        sizes = self._padded(key)
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
            # The first graph is the largest, but decode graphs may have more rows than mixed ones have logits.
            most = max(sizes.logits, self._sizes.logits)
            self._hidden = made.new_empty((most, made.shape[1]))
        hidden = self._hidden[: len(inputs.logits_rows)]

        def run() -> None:
            self._rows.fill_in(inputs)
            restart_attention(prepared)
            hidden.copy_(model.hidden_states(prepared, caches))

        return run
