"""The passes of one model on a GPU: staged in pinned memory, captured as graphs or launched kernel by kernel.

The device has the sources of a step's inputs: block tables and last sampled tokens by row, kept from step to step. The
host keeps block tables as well, to compute slots; it sends only what is new in a batch. One additional row is for
padding: it names the spare block, which the scheduler does not know. A decode batch is padded with sequences of a
single token there, so that kernels process only sequences; a mixed batch with sequences without a token, and with
tokens there that no sequence has, for which attention returns zeros.

Legend: T tokens, B sequences, N rows, M blocks per sequence, K sampled tokens, R wanted rows of logits, C rows of
hidden states, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Batch
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.model.family import CapturableLM, CausalLM
from quire_engine.model.layers import GroupInputs, ModelInputs
from quire_engine.runner.accelerator import Accelerator
from quire_engine.runner.captured import GraphKey, GraphSizes, GraphStore
from quire_engine.runner.inputs import Rows, StepColumns
from quire_engine.runner.logprobs import LogitsRows
from quire_engine.runner.passes import PassSizes, StagedPass
from quire_engine.runner.staging import HostToDeviceBatch, InputSizes, Item, StepInputs, StepStaging
from quire_engine.runner.verification import Draws
from quire_kernels.kv_cache import KVCache
from quire_kernels.lora import TokenGroups
from quire_kernels.paged_attention.plan import DevicePlan, Workspace, longest_short
from quire_kernels.paged_attention.schedule import MAX_SHORT_QUERIES


class DeviceRows(Rows):
    """Rows that the device has, too."""

    def __init__(
        self, layout: KVCacheLayout, *, max_rows: int, max_blocks: int, max_tokens: int, device: torch.device
    ) -> None:
        super().__init__(layout, max_rows=max_rows, max_blocks=max_blocks, device=device)
        groups = len(layout.groups)
        self.spare_row = max_rows
        self.spare_slots = [group.num_blocks * layout.block_size for group in layout.groups]
        # Of all rows, the spare one included.
        self.on_device = tuple(
            torch.zeros((max_rows + 1, max_blocks), dtype=torch.int32, device=device) for _ in range(groups)
        )
        for table, group in zip(self.on_device, layout.groups, strict=True):
            table[self.spare_row, 0] = group.num_blocks
        # Of the current step: block tables in its order, and tokens fed back.
        self._gathered = tuple(
            torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device) for _ in range(groups)
        )
        self._fed_back = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._updates: list[tuple[Tensor, Item, Item]] = []

    def stage(self, batch: Batch, transfer: HostToDeviceBatch, firsts: np.ndarray | None = None) -> None:
        super().stage(batch, transfer, firsts)
        for host, table, updates in zip(self.tables, self.on_device, batch.block_updates, strict=True):
            if not updates.rows:
                continue
            rows, positions = np.asarray(updates.rows, dtype=np.int64), np.asarray(updates.positions)
            places = rows * host.shape[1] + (positions if firsts is None else positions - firsts[rows])
            # The current values: if a place was assigned twice, both writes are the same.
            self._updates.append((table, transfer.add(places), transfer.add(host.reshape(-1)[places])))

    def apply(self) -> None:
        for table, places, blocks in self._updates:
            table.view(-1).index_copy_(0, places.on_device, blocks.on_device)
        self._updates = []

    def rewrite(self, rows: np.ndarray, blocks: np.ndarray, transfer: HostToDeviceBatch) -> None:
        super().rewrite(rows, blocks, transfer)
        own, new = transfer.add(rows), transfer.add(blocks)
        transfer.send()
        self.on_device[0].index_copy_(0, own.on_device, new.on_device)

    def fill_in(self, inputs: StepInputs[Tensor]) -> None:
        """Fill in the last sampled tokens and the block tables. This is part of captured graphs."""
        tokens, sequences = len(inputs.token_ids), len(inputs.rows)
        fed_back = self._fed_back[:tokens]
        torch.index_select(self.last_tokens, 0, inputs.token_rows, out=fed_back)
        torch.where(inputs.is_feedback, fed_back, inputs.token_ids, out=inputs.token_ids)
        for table, gathered in zip(self.on_device, self._gathered, strict=True):
            torch.index_select(table, 0, inputs.rows, out=gathered[:sequences])

    def block_tables(self, sequences: int) -> tuple[Tensor, ...]:
        """Return the block tables [B, M] that ``fill_in`` wrote."""
        return tuple(gathered[:sequences] for gathered in self._gathered)


def write_inputs(
    target: StepInputs[np.ndarray],
    columns: StepColumns,
    computed: np.ndarray,
    drawn_lines: np.ndarray,
    draws: Draws,
    rows: DeviceRows,
) -> None:
    """Write a step's inputs, and padding if ``target`` is larger.

    computed     int64, the places of the tokens whose hidden states are computed
    drawn_lines  [K] int64, the lines of logits that are sampled from
    """
    tokens, sequences, drawn = len(columns.token_ids), len(columns.rows), len(drawn_lines)
    target.token_ids[:tokens] = columns.token_ids
    target.positions[:tokens] = columns.positions
    target.token_rows[:tokens] = columns.token_rows
    target.is_feedback[:tokens] = False
    target.is_feedback[columns.feedback] = True
    for slots, own in zip(target.slots, columns.slots, strict=True):
        slots[:tokens] = own
    target.rows[:sequences] = columns.rows
    target.contexts[:sequences] = columns.contexts
    target.query_starts[0] = 0
    target.query_starts[1 : sequences + 1] = columns.ends
    target.logits_rows[: len(computed)] = computed
    target.drawn_lines[:drawn] = drawn_lines
    target.drawn_rows[:drawn] = draws.rows
    target.drawn_positions[:drawn] = draws.positions
    write_padding(target, rows, tokens=tokens, sequences=sequences, logits=len(computed))


def write_adapters(target: StepInputs[np.ndarray], groups: TokenGroups | None) -> None:
    """Write the tokens that have an adapter; blocks that the step does not need are empty."""
    used = 0
    if groups is not None:
        used = groups.blocks.numel()
        target.adapter_order[: len(groups.order)] = groups.order.numpy()
        target.adapter_blocks[:used] = groups.blocks.numpy().reshape(-1)
    target.adapter_blocks[used:] = -1


def write_padding(
    target: StepInputs[np.ndarray], rows: DeviceRows, *, tokens: int, sequences: int, logits: int
) -> None:
    """Write padding after ``tokens`` tokens of ``sequences`` sequences with ``logits`` rows of logits.

    A batch that has room for as many tokens as sequences decodes: its spare sequences have a token each.
    """
    size = len(target.rows)
    target.token_ids[tokens:] = 0
    target.positions[tokens:] = 0
    target.token_rows[tokens:] = rows.spare_row
    target.is_feedback[tokens:] = False
    for slots, spare in zip(target.slots, rows.spare_slots, strict=True):
        slots[tokens:] = spare
    target.rows[sequences:] = rows.spare_row
    decodes = len(target.token_ids) == size and tokens == sequences == logits
    target.contexts[sequences:] = 1 if decodes else 0
    target.query_starts[sequences + 1 :] = np.arange(sequences + 1, size + 1) if decodes else tokens
    if sequences == 0:
        target.query_starts[0] = 0
    target.logits_rows[logits:] = np.arange(logits, size) if decodes else 0


def sizes_of(columns: StepColumns, *, logits: int, draws: int, adapter_slots: int = 0) -> InputSizes:
    return InputSizes(
        tokens=len(columns.token_ids),
        sequences=len(columns.rows),
        logits=logits,
        draws=draws,
        adapter_slots=adapter_slots,
    )


def padded_sizes(
    key: GraphKey, *, max_rows: int, most_logits: int, most_draws: int, adapter_slots: int = 0
) -> InputSizes:
    """Return the sizes of a batch padded to a captured one, in which at most ``most_logits`` tokens have logits."""
    return InputSizes(
        tokens=key.size,
        sequences=max_rows if key.is_mixed else key.size,
        logits=min(key.size, most_logits),
        draws=min(key.size, most_draws),
        adapter_slots=adapter_slots,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLens:
    """The query lengths, as attention's launches need them."""

    longest: int
    shortest: int
    longest_short: int

    @classmethod
    def of(cls, scheduled: np.ndarray) -> "QueryLens":
        """Return the lengths of ``scheduled`` [B]."""
        return cls(longest=int(scheduled.max()), shortest=int(scheduled.min()), longest_short=longest_short(scheduled))


DECODE = QueryLens(longest=1, shortest=1, longest_short=1)


def captured_lens(key: GraphKey) -> QueryLens:
    """Return bounds of the query lengths of every batch that a graph runs."""
    if not key.is_mixed:
        return DECODE
    return QueryLens(longest=key.size, shortest=1, longest_short=min(key.size, MAX_SHORT_QUERIES))


def model_inputs(
    inputs: StepInputs[Tensor],
    block_tables: tuple[Tensor, ...],
    layout: KVCacheLayout,
    workspace: Workspace,
    query_lens: QueryLens,
) -> ModelInputs:
    """Return inputs over the same memory, whatever its later content."""
    return ModelInputs(
        token_ids=inputs.token_ids,
        positions=inputs.positions,
        groups=tuple(
            GroupInputs(
                slots=slots,
                plan=DevicePlan(
                    block_tables=tables,
                    query_starts=inputs.query_starts,
                    context_lens=inputs.contexts,
                    num_tokens=len(inputs.token_ids),
                    max_query_len=query_lens.longest,
                    min_query_len=query_lens.shortest,
                    max_short_len=query_lens.longest_short,
                    window=group.window,
                    workspace=workspace,
                ),
            )
            for slots, tables, group in zip(inputs.slots, block_tables, layout.groups, strict=True)
        ),
        logits_rows=inputs.logits_rows,
        adapters=_token_groups(inputs),
    )


def restart_attention(inputs: ModelInputs) -> None:
    """Let attention plan again, from the lengths that the step will find. This is part of captured graphs."""
    for group in inputs.groups:
        assert isinstance(group.plan, DevicePlan)
        group.plan.restart()


def _token_groups(inputs: StepInputs[Tensor]) -> TokenGroups | None:
    if not len(inputs.adapter_blocks):
        return None
    return TokenGroups(order=inputs.adapter_order, blocks=inputs.adapter_blocks.view(-1, 3))


@dataclass(slots=True, kw_only=True)
class DevicePass(StagedPass):
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
    """See ``passes.Passes``. ``rows`` are the sources of the inputs."""

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

    @property
    def captured(self) -> int:
        return len(self._captured_inputs)

    def capture(self, captured: Callable[[], None] = lambda: None) -> None:
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
    ) -> DevicePass:
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
        inputs = self._captured_inputs[graph] if graph is not None else self._staging.on_device(sizes)
        drawn = len(draws.rows)
        return DevicePass(
            token_ids=inputs.token_ids,
            drawn_rows=inputs.drawn_rows[:drawn],
            drawn_positions=inputs.drawn_positions[:drawn],
            drawn_lines=inputs.drawn_lines[:drawn] if len(wanted.reported) else None,
            inputs=inputs,
            graph=graph,
            num_hidden=len(computed),
            lines=transfer.add(wanted.rows) if len(computed) != len(wanted.rows) else None,
            query_lens=QueryLens.of(columns.scheduled),
        )

    def run(self, staged: StagedPass) -> Tensor:
        assert isinstance(staged, DevicePass)
        model = self._model
        if not isinstance(model, CapturableLM):
            prepared = self._prepared(staged.inputs, staged.query_lens)
            self._rows.fill_in(staged.inputs)
            return model(prepared, self._caches)
        # The LM head is outside of graphs: it has exactly the wanted rows, and its result is not copied.
        return model.logits(self.hidden_states(staged))

    def hidden_states(self, staged: StagedPass) -> Tensor:
        assert isinstance(staged, DevicePass)
        hidden = self._hidden_states(staged)
        return hidden if staged.lines is None else hidden.index_select(0, staged.lines.on_device)

    def at_once(self, staged: StagedPass) -> int:
        return 0  # each pass is a replay of its own, which the host does not wait for

    def guess(self, staged: StagedPass, slots: np.ndarray) -> Tensor:
        raise NotImplementedError

    def _hidden_states(self, staged: DevicePass) -> Tensor:
        model = self._model
        assert isinstance(model, CapturableLM), "only native models have hidden states"
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
