"""The tokens of each row for a draft model, and which of their keys and values it has stored.

A draft model's layers share blocks with the target's, but it does not compute all tokens that the target computes: it
skips prompts while drafts do not pay, and tokens of sequences without drafts. A block remembers how many of its first
tokens have keys and values of the draft model, so that a sequence that finds the block as a prefix knows it too.

What is missing is computed when the sequence gets drafts, but at most the most recent tokens. The layers then attend
from there on: blocks before it are left out of the block table.

Legend: B scheduled sequences, T tokens, R rows of a pass, S block size, M blocks per sequence.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from quire_engine.core.batch import Batch
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.runner.inputs import StepColumns

MOST_MISSED = 64
"""The tokens that are computed at once of those that a row misses: older ones are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftColumns:
    """The columns of a batch for drafts, [B] int64 each."""

    rows: np.ndarray
    computed: np.ndarray
    scheduled: np.ndarray
    drafts: np.ndarray
    begins: np.ndarray
    """The place of each sequence's first token among all of the batch."""

    @property
    def known_ends(self) -> np.ndarray:
        """The number of tokens of each sequence that are known after the step's own, without drafts."""
        return self.computed + self.scheduled - self.drafts

    def for_draft_model(self, batch: Batch) -> np.ndarray:
        """Return [B] bool, the sequences that a draft model computes first: those with drafts, and prompts."""
        drafted = self.drafts > 0
        chosen: np.ndarray = drafted | (self.scheduled > 1) if batch.prepares_drafts else drafted
        return chosen


class DraftedRows:
    """The state of all rows, for a target without windows: its KV cache has one group."""

    def __init__(self, layout: KVCacheLayout, *, max_rows: int, max_model_len: int) -> None:
        assert len(layout.groups) == 1, "draft models are refused for targets with windows"
        self._block_size = layout.block_size
        self.history = np.zeros((max_rows, max_model_len + layout.block_size), dtype=np.int32)
        """The tokens of each row, those of the prompt and of the answer."""
        self.stored = np.zeros(max_rows, dtype=np.int64)
        """The tokens of each row whose keys and values are stored."""
        self.firsts = np.zeros(max_rows, dtype=np.int64)
        """The first block of each row that is attended to."""
        self._is_new = np.zeros(max_rows, dtype=np.bool_)
        """True until ``stored`` was found from the blocks of a row that was admitted."""
        self._filled = np.zeros(layout.groups[0].num_blocks, dtype=np.int32)
        """The first tokens of each block that have keys and values."""
        self._filled_swapped = np.zeros(max(1, layout.groups[0].num_swap_blocks), dtype=np.int32)
        self._noted: deque[tuple[Batch, list[int] | None, list[int] | None]] = deque(maxlen=2 * MOST_MISSED)
        """The most recent steps of which ``history`` has no tokens yet, in the order in which they became known: with
        their sampled tokens and the number of each sequence's, if that is not one, or None for their inputs."""
        self._admitted = np.full(max_rows, -1, dtype=np.int64)
        """The step that admitted the sequence of each row."""
        self._idle = False

    def skip(self, batch: Batch) -> bool:
        """Note a batch that only decodes and has no drafts, while drafts do not pay; return False for other batches.

        This costs next to nothing. A pass after it reads at most the most recent tokens of a row, which are those of as
        many batches. A block that such a batch appends is a new one, so that nothing in it is stored.
        """
        was_idle, self._idle = self._idle, not batch.prepares_drafts and not batch.num_drafts
        if not was_idle or not self._idle:
            return False  # the first idle one may follow rejected drafts
        if batch.admitted or len(batch.token_ids) != len(batch.rows):
            return False
        for blocks in (*batch.swap_out, *batch.swap_in):
            if blocks.sources:
                return False
        if appended := batch.block_updates[0].blocks:
            self._filled[appended] = 0
        self._noted.append((batch, None, None))
        return True

    def note_sampled(self, batch: Batch, token_ids: list[int], counts: list[int] | None = None) -> None:
        """Note what a batch has sampled; a batch after one without drafts may have been issued before.

        This costs next to nothing, as ``skip``.
        """
        self._noted.append((batch, token_ids, counts))

    def _read_notes(self) -> None:
        """Add the noted tokens to ``history``; rows may have another sequence since."""
        for batch, token_ids, counts in self._noted:
            if token_ids is None:
                self.history[batch.rows, batch.num_computed] = batch.token_ids
                continue
            samples = np.asarray(batch.samples)
            rows = np.asarray(batch.rows)[samples]
            ends = np.add(batch.num_computed, batch.num_scheduled)[samples]
            if counts is not None:
                starts = ends - np.asarray(batch.num_drafts)[samples]
                owners, ends = positions_of(starts, starts + counts)
                rows = rows[owners]
            own = self._admitted[rows] <= batch.step
            self.history[rows[own], ends[own]] = np.asarray(token_ids)[own]
        self._noted.clear()

    def begin(self, batch: Batch, table: np.ndarray) -> DraftColumns:
        """Apply a batch, whose target computes its tokens after this; ``table`` [rows, M] includes it already."""
        self._read_notes()
        for copies, sources, targets in (
            (batch.swap_out, self._filled, self._filled_swapped),
            (batch.swap_in, self._filled_swapped, self._filled),
        ):
            for blocks in copies:
                targets[blocks.targets] = sources[blocks.sources]
        for admission in batch.admitted:
            known = [*admission.prompt_token_ids, *admission.output_token_ids]
            self.history[admission.row, : len(known)] = known
            self.stored[admission.row] = self.firsts[admission.row] = 0
            self._is_new[admission.row] = True
            self._admitted[admission.row] = batch.step
        rows = np.asarray(batch.rows, dtype=np.int64)
        computed = np.asarray(batch.num_computed, dtype=np.int64)
        scheduled = np.asarray(batch.num_scheduled, dtype=np.int64)
        columns = DraftColumns(
            rows=rows,
            computed=computed,
            scheduled=scheduled,
            drafts=np.asarray(batch.num_drafts, dtype=np.int64) if batch.num_drafts else np.zeros_like(rows),
            begins=np.cumsum(scheduled) - scheduled,
        )
        self._overwrite(columns, np.asarray(batch.token_ids, dtype=np.int64), table)
        return columns

    def _overwrite(self, columns: DraftColumns, token_ids: np.ndarray, table: np.ndarray) -> None:
        """Note the tokens that the target computes, and forget what their slots held of other tokens.

        A token that is fed back is not known: ``note_sampled`` replaces it before it is read.
        """
        rows, computed, size = columns.rows, columns.computed, self._block_size
        blocks = table[rows, computed // size]
        self._filled[blocks] = np.minimum(self._filled[blocks], computed % size)
        # Rejected drafts of the step before are not part of the text.
        self.stored[rows] = np.minimum(self.stored[rows], computed)
        single = columns.scheduled - columns.drafts == 1
        self.history[rows[single], computed[single]] = token_ids[columns.begins[single]]
        several = np.flatnonzero(columns.scheduled > 1)
        for row, start, count, drafts, begin in zip(
            *(
                column[several].tolist()
                for column in (rows, computed, columns.scheduled, columns.drafts, columns.begins)
            ),
            strict=True,
        ):
            known = count - drafts
            self.history[row, start : start + known] = token_ids[begin : begin + known]
            self._filled[table[row, start // size + 1 : (start + count - 1) // size + 1]] = 0

    def starts(self, table: np.ndarray, rows: np.ndarray, ends: np.ndarray, lowest: np.ndarray) -> np.ndarray:
        """Return the tokens from which a pass up to ``ends`` must compute; all [R] int64.

        ``lowest`` are the first tokens that it may compute. Rows that miss earlier ones attend from there on.
        """
        for row, end in zip(rows[self._is_new[rows]].tolist(), ends[self._is_new[rows]].tolist(), strict=True):
            self.stored[row] = self._found(table[row], end)
        self._is_new[rows] = False
        starts = np.minimum(self.stored[rows], ends - 1)
        late = starts < lowest
        if late.any():
            size = self._block_size
            firsts = -(-lowest // size)
            # Without a whole block the earlier tokens of the last one are attended to, whatever they are.
            firsts = np.where(firsts * size < ends, firsts, lowest // size)
            self.firsts[rows] = np.where(late, firsts, self.firsts[rows])
            starts = np.where(late, np.maximum(lowest, firsts * size), starts)
        return starts

    def _found(self, blocks: np.ndarray, end: int) -> int:
        """Return the number of tokens up to ``end`` of a row that its blocks have keys and values of."""
        filled = self._filled[blocks[: -(-end // self._block_size)]]
        partly = np.flatnonzero(filled < self._block_size)
        if not len(partly):
            return end
        return min(end, int(partly[0]) * self._block_size + int(filled[partly[0]]))

    def store(self, table: np.ndarray, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Note that a pass has stored tokens ``starts`` to ``ends`` of some rows."""
        size = self._block_size
        self.stored[rows] = ends
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
            first, last = start // size, (end - 1) // size
            self._filled[table[row, first:last]] = size
            self._filled[table[row, last]] = end - last * size

    def tokens(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return tokens ``starts`` to ``ends`` of some rows, one row after the other, [T] int64."""
        owners, positions = positions_of(starts, ends)
        found: np.ndarray = self.history[rows[owners], positions].astype(np.int64)
        return found

    def slots(self, table: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the slots of ``positions`` [..., T] of ``rows`` [T], int64."""
        places, offsets = np.divmod(positions, self._block_size)
        found: np.ndarray = table[rows, places].astype(np.int64) * self._block_size + offsets
        return found

    def columns(
        self,
        table: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        token_ids: np.ndarray | None,
        *,
        more: int = 0,
    ) -> StepColumns:
        """Return the columns of a pass over positions ``starts`` to ``ends`` of some rows.

        token_ids  [T] int64; None if all are fed back
        more       see ``StepColumns``
        """
        size = self._block_size
        owners, positions = positions_of(starts, ends)
        unknown = len(owners) if token_ids is None else 0
        return StepColumns(
            rows=rows,
            scheduled=ends - starts,
            contexts=ends - self.firsts[rows] * size,
            ends=np.cumsum(ends - starts),
            token_ids=np.zeros(unknown, dtype=np.int64) if token_ids is None else token_ids,
            token_rows=rows[owners],
            positions=positions,
            feedback=np.arange(unknown),
            slots=(self.slots(table, rows[owners], positions),),
            more=more,
        )


def positions_of(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each token of consecutive spans the place of its span, and its position."""
    counts = ends - starts
    owners = np.repeat(np.arange(len(starts)), counts)
    positions = np.arange(len(owners)) + (starts - np.cumsum(counts) + counts)[owners]
    return owners, positions
