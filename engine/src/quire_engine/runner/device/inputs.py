"""The sources of a step's inputs on the device: block tables and last sampled tokens by row, kept from step to step.

The host keeps block tables as well, to compute slots; it sends only what is new in a batch. One additional row is for
padding: it names the spare block, which the scheduler does not know. A decode batch is padded with sequences of a
single token there, so that kernels process only sequences; a mixed batch with sequences without a token, and with
tokens there that no sequence has, for which attention returns zeros.

Legend: T tokens, B sequences, N rows, M blocks per sequence, K sampled tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Batch
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.model.layers import GroupInputs, ModelInputs
from quire_engine.runner.device.graphs import GraphKey
from quire_engine.runner.device.staging import HostToDeviceBatch, InputSizes, Item, StepInputs
from quire_engine.runner.inputs import BlockTables, StepColumns
from quire_engine.runner.verification import Draws
from quire_kernels.lora import TokenGroups
from quire_kernels.paged_attention.plan import DevicePlan, Workspace, longest_short
from quire_kernels.paged_attention.schedule import MAX_SHORT_QUERIES


class DeviceRows:
    """The device's rows. ``stage`` the changes of a batch and, after the transfer, ``apply`` them on the device."""

    def __init__(
        self, *, layout: KVCacheLayout, max_rows: int, max_blocks: int, max_tokens: int, device: torch.device
    ) -> None:
        groups = len(layout.groups)
        self.spare_row = max_rows
        self.slot_of_row = np.full(max_rows, -1, dtype=np.int32)  # on the host, by row
        self.spare_slots = [group.num_blocks * layout.block_size for group in layout.groups]
        self.host = BlockTables(max_rows=max_rows, max_blocks=max_blocks, groups=groups)
        # Of all rows, the spare one included.
        self.tables = tuple(
            torch.zeros((max_rows + 1, max_blocks), dtype=torch.int32, device=device) for _ in range(groups)
        )
        for table, group in zip(self.tables, layout.groups, strict=True):
            table[self.spare_row, 0] = group.num_blocks
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        # Of the current step: block tables in its order, and tokens fed back.
        self._gathered = tuple(
            torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device) for _ in range(groups)
        )
        self._fed_back = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._updates: list[tuple[Tensor, Item, Item]] = []

    def stage(self, batch: Batch, transfer: HostToDeviceBatch) -> None:
        self.host.apply(batch)
        for admission in batch.admitted:
            self.slot_of_row[admission.row] = admission.adapter_slot
        self._updates = []
        for host, table, updates in zip(self.host.tables, self.tables, batch.block_updates, strict=True):
            if not updates.rows:
                continue
            places = np.asarray(updates.rows, dtype=np.int64) * host.shape[1] + np.asarray(updates.positions)
            # The current values: if a place was assigned twice, both writes are the same.
            self._updates.append((table, transfer.add(places), transfer.add(host.reshape(-1)[places])))

    def apply(self) -> None:
        for table, places, blocks in self._updates:
            table.view(-1).index_copy_(0, places.on_device, blocks.on_device)
        self._updates = []

    def fill_in(self, inputs: StepInputs[Tensor]) -> None:
        """Fill in the last sampled tokens and the block tables. This is part of captured graphs."""
        tokens, sequences = len(inputs.token_ids), len(inputs.rows)
        fed_back = self._fed_back[:tokens]
        torch.index_select(self.last_tokens, 0, inputs.token_rows, out=fed_back)
        torch.where(inputs.is_feedback, fed_back, inputs.token_ids, out=inputs.token_ids)
        for table, gathered in zip(self.tables, self._gathered, strict=True):
            torch.index_select(table, 0, inputs.rows, out=gathered[:sequences])

    def remember(self, rows: Tensor, drawn: Tensor) -> None:
        """Store the tokens [K] sampled for rows [K], which the next step may need."""
        self.last_tokens.index_copy_(0, rows, drawn)

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
