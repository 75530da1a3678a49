"""From a batch of the core to the tensors of one forward pass.

``RowState`` is the persistent half: each row's block tables and last drawn token, changed by what a batch says is new.
``build`` is the pure half: no sequence is visited one by one, so a step's cost hardly grows with its sequences.

Legend: T tokens, B scheduled sequences, S block size, M blocks per sequence, R rows of logits.
"""

import numpy as np
import torch

from quire_engine.core.batch import Batch
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.model.layers import GroupInputs, ModelInputs
from quire_kernels.paged_attention import plan_attention


class RowState:
    """What the runner remembers of each row between steps. ``tables[g][row]`` is the row's block table in group g."""

    def __init__(self, *, max_rows: int, max_blocks: int, groups: int) -> None:
        self.tables = tuple(np.zeros((max_rows, max_blocks), dtype=np.int32) for _ in range(groups))
        self.last_token = np.zeros(max_rows, dtype=np.int64)

    def apply(self, batch: Batch) -> None:
        for table, updates in zip(self.tables, batch.block_updates, strict=True):
            if updates.rows:
                table[updates.rows, updates.positions] = updates.blocks


def build(batch: Batch, state: RowState, layout: KVCacheLayout, logits_rows: np.ndarray) -> ModelInputs:
    """The step's inputs; ``state`` has taken in the batch already.

    logits_rows  [R] int64, the tokens that have logits: places in ``batch.token_ids``, rising
    """
    rows = np.asarray(batch.rows, dtype=np.int64)  # [B]
    computed = np.asarray(batch.num_computed, dtype=np.int64)  # [B]
    scheduled = np.asarray(batch.num_scheduled, dtype=np.int64)  # [B]
    token_ids = np.asarray(batch.token_ids, dtype=np.int64)  # [T]
    ends = np.cumsum(scheduled)  # [B]
    owner = np.repeat(np.arange(len(rows)), scheduled)  # [T] place of its sequence in the batch
    positions = np.arange(len(token_ids)) + (computed - ends + scheduled)[owner]  # [T]
    if batch.feedback_tokens:
        places = np.asarray(batch.feedback_tokens, dtype=np.int64)
        token_ids[places] = state.last_token[rows[owner[places]]]
    contexts = computed + scheduled  # [B]
    groups = tuple(
        _group_inputs(table, group, layout.block_size, rows, owner, positions, scheduled, contexts)
        for table, group in zip(state.tables, layout.groups, strict=True)
    )
    return ModelInputs(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        groups=groups,
        logits_rows=torch.from_numpy(logits_rows),
    )


def _group_inputs(
    table: np.ndarray,
    group: KVCacheGroup,
    block_size: int,
    rows: np.ndarray,
    owner: np.ndarray,
    positions: np.ndarray,
    scheduled: np.ndarray,
    contexts: np.ndarray,
) -> GroupInputs:
    blocks = table[rows[owner], positions // block_size].astype(np.int64)  # [T]
    width = -(-int(contexts.max()) // block_size)
    plan = plan_attention(
        block_tables=torch.from_numpy(np.ascontiguousarray(table[rows, :width])),  # [B, M]
        query_lens=scheduled,
        context_lens=contexts,
        block_size=block_size,
        window=group.window,
    )
    return GroupInputs(slots=torch.from_numpy(blocks * block_size + positions % block_size), plan=plan)
