"""The conversion of a batch of the core into the columns of a forward pass.

``Rows`` is the persistent part: each row's block tables, adapter and last sampled token, updated by the changes in a
batch. ``step_columns`` is the pure part: it visits no single sequence, so a step's cost hardly grows with its
sequences. The passes of a device make its inputs from them.

Legend: T tokens, B scheduled sequences, N rows, S block size, M blocks per sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Batch
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.runner.staging import HostToDeviceBatch


def table_blocks(layout: KVCacheLayout, max_model_len: int) -> int:
    """Return the blocks of a row's table: one more than the longest sequence has.

    A step may run ahead of the stop that ends a sequence.
    """
    return -(-max_model_len // layout.block_size) + 1


class Rows:
    """The state of each row between steps. ``stage`` the changes of a batch and, after the transfer, ``apply`` them.

    ``tables[g][row]`` is the row's block table in KV cache group g. One row more than the scheduler knows is spare.
    """

    def __init__(self, layout: KVCacheLayout, *, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.tables = tuple(np.zeros((max_rows, max_blocks), dtype=np.int32) for _ in layout.groups)
        self.adapter_slot = np.full(max_rows, -1, dtype=np.int32)
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)

    def stage(self, batch: Batch, transfer: HostToDeviceBatch, firsts: np.ndarray | None = None) -> None:
        """Stage the changes of a batch.

        firsts  [N] int64, the blocks with which the tables of rows begin; None if they begin with the first ones
        """
        for admission in batch.admitted:
            self.adapter_slot[admission.row] = admission.adapter_slot
        for group, updates in enumerate(batch.block_updates):
            if updates.rows:
                positions = (
                    updates.positions if firsts is None else np.subtract(updates.positions, firsts[updates.rows])
                )
                self.tables[group][updates.rows, positions] = updates.blocks

    def apply(self) -> None:
        """Apply what was staged on the device."""

    def rewrite(self, rows: np.ndarray, blocks: np.ndarray, transfer: HostToDeviceBatch) -> None:
        """Replace the first block tables of ``rows`` [R] by ``blocks`` [R, M]; this sends the transfer."""
        self.tables[0][rows] = blocks

    def remember(self, rows: Tensor, drawn: Tensor) -> None:
        """Store the tokens [K] sampled for rows [K], which the next step may need."""
        self.last_tokens.index_copy_(0, rows, drawn)


@dataclass(slots=True, kw_only=True)
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
    more: int = 0
    """The tokens of each sequence that later passes with the same inputs compute."""


def step_columns(batch: Batch, tables: Sequence[np.ndarray], block_size: int) -> StepColumns:
    """Return the columns of a batch; ``tables`` [rows, M] per group already include it."""
    rows = np.asarray(batch.rows, dtype=np.int64)  # [B]
    computed = np.asarray(batch.num_computed, dtype=np.int64)  # [B]
    scheduled = np.asarray(batch.num_scheduled, dtype=np.int64)  # [B]
    ends = scheduled.cumsum()  # [B]
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
        slots=tuple([table[token_rows, places].astype(np.int64) * block_size + offsets for table in tables]),
    )
