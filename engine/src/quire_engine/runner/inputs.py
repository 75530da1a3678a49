"""The conversion of a batch of the core into the columns of a forward pass, and on a CPU into its tensors.

``BlockTables`` and ``RowState`` are the persistent part: each row's block tables and last sampled token, updated by the
changes in a batch. ``step_columns`` is the pure part, which ``runner.device`` shares: it visits no single sequence, so
a step's cost hardly grows with its sequences. ``build`` creates a CPU's inputs from them.

Legend: T tokens, B scheduled sequences, S block size, M blocks per sequence, R rows of logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire_engine.core.batch import Batch
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.model.layers import GroupInputs, ModelInputs
from quire_kernels.lora import group_tokens
from quire_kernels.paged_attention import plan_attention


class BlockTables:
    """The block tables of all rows: ``tables[g][row]`` is the row's block table in KV cache group g."""

    def __init__(self, *, max_rows: int, max_blocks: int, groups: int) -> None:
        self.tables = tuple(np.zeros((max_rows, max_blocks), dtype=np.int32) for _ in range(groups))

    def apply(self, batch: Batch) -> None:
        for table, updates in zip(self.tables, batch.block_updates, strict=True):
            if updates.rows:
                table[updates.rows, updates.positions] = updates.blocks


def table_blocks(layout: KVCacheLayout, max_model_len: int) -> int:
    """Return the blocks of a row's table: one more than the longest sequence has.

    A step may run ahead of the stop that ends a sequence.
    """
    return -(-max_model_len // layout.block_size) + 1


class RowState(BlockTables):
    """The state of each row that a runner on a CPU keeps between steps."""

    def __init__(self, *, max_rows: int, max_blocks: int, groups: int) -> None:
        super().__init__(max_rows=max_rows, max_blocks=max_blocks, groups=groups)
        self.last_token = np.zeros(max_rows, dtype=np.int64)
        self.adapter_slot = np.full(max_rows, -1, dtype=np.int32)

    def apply(self, batch: Batch) -> None:
        super().apply(batch)
        for admission in batch.admitted:
            self.adapter_slot[admission.row] = admission.adapter_slot


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumns:
    """A batch as arrays."""

    rows: np.ndarray  # [B] int64
    scheduled: np.ndarray  # [B] int64
    contexts: np.ndarray  # [B] int64, tokens of the sequence after the step
    ends: np.ndarray  # [B] int64, the end of the sequence's tokens among all
    token_ids: np.ndarray  # [T] int64, 0 where a token is not known yet
    token_rows: np.ndarray  # [T] int64, the row of each token
    positions: np.ndarray  # [T] int64
    feedback: np.ndarray  # [F] int64, places in ``token_ids`` of unknown tokens
    slots: tuple[np.ndarray, ...]  # [T] int64 each, one per KV cache group


def step_columns(batch: Batch, tables: Sequence[np.ndarray], block_size: int) -> StepColumns:
    """Return the columns of a batch; ``tables`` [rows, M] per group already include it."""
    rows = np.asarray(batch.rows, dtype=np.int64)  # [B]
    computed = np.asarray(batch.num_computed, dtype=np.int64)  # [B]
    scheduled = np.asarray(batch.num_scheduled, dtype=np.int64)  # [B]
    ends = np.cumsum(scheduled)  # [B]
    if len(rows) == batch.num_tokens:  # all decode, the common step
        token_rows, positions = rows, computed
    else:
        owner = np.repeat(np.arange(len(rows)), scheduled)  # [T] place of its sequence in the batch
        token_rows = rows[owner]
        positions = np.arange(batch.num_tokens) + (computed - ends + scheduled)[owner]
    places, offsets = np.divmod(positions, block_size)  # [T], [T]
    return StepColumns(
        rows=rows,
        scheduled=scheduled,
        contexts=computed + scheduled,
        ends=ends,
        token_ids=np.asarray(batch.token_ids, dtype=np.int64),
        token_rows=token_rows,
        positions=positions,
        feedback=np.asarray(batch.feedback_tokens, dtype=np.int64),
        slots=tuple(table[token_rows, places].astype(np.int64) * block_size + offsets for table in tables),
    )


def build(
    batch: Batch, state: RowState, layout: KVCacheLayout, logits_rows: np.ndarray, *, deterministic: bool = False
) -> ModelInputs:
    """Return the step's inputs; ``state`` already includes the batch.

    logits_rows  [R] int64, the tokens that have logits: places in ``batch.token_ids``, ascending
    """
    columns = step_columns(batch, state.tables, layout.block_size)
    if len(columns.feedback):
        columns.token_ids[columns.feedback] = state.last_token[columns.token_rows[columns.feedback]]
    return ModelInputs(
        token_ids=torch.from_numpy(columns.token_ids),
        positions=torch.from_numpy(columns.positions),
        groups=tuple(
            _group_inputs(table, group, layout.block_size, columns, slots, deterministic)
            for table, group, slots in zip(state.tables, layout.groups, columns.slots, strict=True)
        ),
        logits_rows=torch.from_numpy(logits_rows),
        adapters=group_tokens(state.adapter_slot[columns.token_rows]),
    )


def blank_inputs(layout: KVCacheLayout, tokens: int, *, deterministic: bool = False) -> ModelInputs:
    """Return inputs of as many sequences as tokens, all in slot 0, for what depends on nothing but their number."""
    ones, zeros = np.ones(tokens, dtype=np.int64), torch.zeros(tokens, dtype=torch.int64)
    return ModelInputs(
        token_ids=zeros,
        positions=zeros,
        groups=tuple(
            GroupInputs(
                slots=zeros,
                plan=plan_attention(
                    block_tables=torch.zeros((tokens, 1), dtype=torch.int32),
                    query_lens=ones,
                    context_lens=ones,
                    block_size=layout.block_size,
                    window=group.window,
                    chunked=group.chunked,
                    deterministic=deterministic,
                ),
            )
            for group in layout.groups
        ),
        logits_rows=torch.arange(tokens),
    )


def _group_inputs(
    table: np.ndarray,
    group: KVCacheGroup,
    block_size: int,
    columns: StepColumns,
    slots: np.ndarray,
    deterministic: bool,
) -> GroupInputs:
    width = -(-int(columns.contexts.max()) // block_size)
    plan = plan_attention(
        block_tables=torch.from_numpy(np.ascontiguousarray(table[columns.rows, :width])),  # [B, M]
        query_lens=columns.scheduled,
        context_lens=columns.contexts,
        block_size=block_size,
        window=group.window,
        chunked=group.chunked,
        deterministic=deterministic,
    )
    return GroupInputs(slots=torch.from_numpy(slots), plan=plan)
