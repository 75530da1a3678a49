"""A draft head on a CPU: it proposes tokens from the target's hidden states, one layer instead of a model.

Pair i of a sequence is the hidden state of token i with token i + 1; its keys and values are in slot i of the layers
that the head has in the target's KV cache group. Pairs of prompts are computed after the target's pass over them,
unless drafts do not pay. The hidden states of each sequence's most recent tokens are kept, so that pairs of accepted
drafts, and those missed without drafts, are computed before the next ones.

The last pair of a block depends on the first token after it. A sequence that finds the block as a prefix, and goes on
with another token, has one pair of another text: this costs acceptance, never correctness.

Legend: T tokens, R rows, W kept tokens of a row, H hidden size.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Batch
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.model.eagle import EagleHead
from quire_engine.runner.drafted_rows import MOST_MISSED, DraftColumns, DraftedRows, positions_of
from quire_engine.runner.sampler import Sampler
from quire_engine.runner.threads import ThreadChooser
from quire_kernels.kv_cache import KVCache


def kept_tokens(max_drafts: int) -> int:
    """Return the number of tokens of a row whose hidden states are kept: at least those of one step."""
    return max(MOST_MISSED, max_drafts + 1)


def kept_bytes(*, max_rows: int, max_drafts: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Return the memory in bytes of the hidden states that ``EagleDrafts`` keeps."""
    return max_rows * kept_tokens(max_drafts) * hidden_size * dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenRows:
    """Hidden states that a step computed, as they enter the LM head."""

    states: Tensor  # [N, H]
    places: np.ndarray  # [N] int64, ascending: their tokens' places in the batch


class KeptRows:
    """The places of the hidden states of the most recent tokens of each row, in a tensor [rows W, H]."""

    def __init__(self, *, max_rows: int, tokens: int) -> None:
        self._tokens = tokens
        self.begins = np.zeros(max_rows, dtype=np.int64)
        """The first token of each row whose state is kept."""
        self.ends = np.zeros(max_rows, dtype=np.int64)

    def begin(self, batch: Batch) -> None:
        """Forget the states of the rows that a batch admits."""
        if not batch.admitted:
            return
        starts_of = dict(zip(batch.rows, batch.num_computed, strict=True))
        for admission in batch.admitted:
            row = admission.row
            self.begins[row] = self.ends[row] = starts_of.get(row, 0)

    def places(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the places of the states of ``positions`` [N] of ``rows`` [N]."""
        found: np.ndarray = rows * self._tokens + positions % self._tokens
        return found

    def keep(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Note states of consecutive tokens of each row; return the [N] int64 places in the arguments to store.

        Rejected drafts are overwritten.
        """
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        ends = np.append(starts[1:], len(rows))
        own, first, end = rows[starts], positions[starts], positions[ends - 1] + 1
        follows = (self.ends[own] >= first) & (self.begins[own] <= first)
        self.begins[own] = np.maximum(np.where(follows, self.begins[own], first), end - self._tokens)
        self.ends[own] = end
        return np.flatnonzero(np.repeat(end, ends - starts) - self._tokens <= positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPairs:
    """The pairs of a step's prompts that a head computes; [R] and [T] int64 each."""

    rows: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    older: np.ndarray
    """[T] the places of kept states; -1 for those that the step computed."""
    newer: np.ndarray
    """[T] the places in the batch of the others; -1 for the kept ones."""


def computed_tokens(batch: Batch, columns: DraftColumns | None, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and the positions of the tokens at ``places`` [N] in a batch, both [N] int64.

    Without ``columns``, each sequence of the batch has one token.
    """
    if columns is None:
        return np.asarray(batch.rows, dtype=np.int64)[places], np.asarray(batch.num_computed, dtype=np.int64)[places]
    owners = np.repeat(np.arange(len(columns.rows)), columns.scheduled)[places]
    return columns.rows[owners], columns.computed[owners] + places - columns.begins[owners]


class StartsOf(Protocol):
    """``DraftedRows.starts``."""

    def __call__(self, table: np.ndarray, rows: np.ndarray, ends: np.ndarray, lowest: np.ndarray) -> np.ndarray: ...


def is_prompt(columns: DraftColumns) -> np.ndarray:
    """Return [B] bool, the sequences of a batch whose pairs are computed after the target's pass."""
    found: np.ndarray = (columns.scheduled > 1) & (columns.drafts == 0)
    return found


def prompt_pairs(
    batch: Batch, columns: DraftColumns, table: np.ndarray, kept: KeptRows, starts_of: StartsOf
) -> PromptPairs:
    """Return the pairs of a batch's prompts, of which there is at least one."""
    prompts = np.flatnonzero(is_prompt(columns))
    rows, computed = columns.rows[prompts], columns.computed[prompts]
    # The token after the last one is not known if it is sampled now.
    samples = np.asarray(batch.samples, dtype=np.int64)[prompts]
    ends = columns.known_ends[prompts] - samples
    held = np.where(kept.ends[rows] == computed, kept.begins[rows], computed)
    starts = starts_of(table, rows, ends, np.maximum(held, computed - MOST_MISSED))
    owners, positions = positions_of(starts, ends)
    is_older = positions < computed[owners]
    return PromptPairs(
        rows=rows,
        starts=starts,
        ends=ends,
        older=np.where(is_older, kept.places(rows[owners], positions), -1),
        newer=np.where(is_older, -1, columns.begins[prompts][owners] + positions - computed[owners]),
    )


class EagleDrafts:
    """A ``Drafter`` that is a head over the target's hidden states."""

    def __init__(
        self,
        head: EagleHead,
        caches: tuple[KVCache, ...],
        layout: KVCacheLayout,
        *,
        max_rows: int,
        max_model_len: int,
        max_drafts: int,
    ) -> None:
        self._head, self._caches = head, caches
        self._rows = DraftedRows(layout, max_rows=max_rows, max_model_len=max_model_len)
        embedding = head.target.embedding
        tokens = kept_tokens(max_drafts)
        self._kept = KeptRows(max_rows=max_rows, tokens=tokens)
        self._states = torch.zeros((max_rows * tokens, embedding.shape[1]), dtype=embedding.dtype)  # [rows W, H]
        self._columns: DraftColumns | None = None
        """The columns of the last batch; None if it needed nothing before its target ran: see ``DraftedRows.skip``."""

    @property
    def recorded(self) -> int:
        return self._head.recordings.made

    def record(self, layout: KVCacheLayout, threads: ThreadChooser) -> None:
        """See ``Drafter``: a pass of one layer is recorded fast enough when it occurs."""

    def propose(self, batch: Batch, table: np.ndarray, sampler: Sampler) -> Batch:
        """See ``Drafter``; this also computes the pairs of the drafts that were accepted before."""
        self._kept.begin(batch)
        self._columns = columns = None if self._rows.skip(batch) else self._rows.begin(batch, table)
        if columns is None or not len(still := np.flatnonzero(columns.drafts)):
            return batch
        rows, ends, drafts = columns.rows[still], columns.computed[still], columns.drafts[still]
        starts = self._rows.starts(table, rows, ends, self._kept.begins[rows])
        owners, positions = positions_of(starts, ends)
        hidden = self._states.index_select(0, torch.from_numpy(self._kept.places(rows[owners], positions)))
        hidden = self._pass(table, rows, starts, ends, hidden, np.cumsum(ends - starts) - 1)  # [R, H]
        self._rows.store(table, rows, starts, ends)
        token_ids = np.asarray(batch.token_ids, dtype=np.int64)
        places = columns.begins[still] + 1
        for number in range(int(drafts.max())):
            guessed = sampler.guess(self._head.logits(hidden), rows, ends + 1 + number)
            token_ids[places + number] = guessed
            self._rows.history[rows, ends + 1 + number] = guessed
            going_on = drafts > number + 1
            if not going_on.all():
                rows, ends, drafts, places = rows[going_on], ends[going_on], drafts[going_on], places[going_on]
                hidden = hidden[torch.from_numpy(going_on)]
            if len(rows):
                starts = ends + number
                hidden = self._pass(table, rows, starts, starts + 1, hidden, np.arange(len(rows)))
        return replace(batch, token_ids=token_ids.tolist())

    def wants_all(self, batch: Batch) -> bool:
        """Return whether ``observe`` needs the hidden states of all tokens of a batch, not only those with logits."""
        return batch.prepares_drafts and self._columns is not None and bool(is_prompt(self._columns).any())

    def observe(self, batch: Batch, table: np.ndarray, computed: HiddenRows) -> None:
        """Keep the hidden states of a step, and compute the pairs of its prompts if those of all tokens are given."""
        rows, positions = computed_tokens(batch, self._columns, computed.places)
        if self.wants_all(batch):
            self._compute_prompts(batch, table, computed.states)
        if len(rows):
            new = self._kept.keep(rows, positions)
            places = torch.from_numpy(self._kept.places(rows[new], positions[new]))
            states = computed.states if len(new) == len(rows) else computed.states[torch.from_numpy(new)]
            self._states.index_copy_(0, places, states)

    def _compute_prompts(self, batch: Batch, table: np.ndarray, states: Tensor) -> None:
        """Compute the pairs of prompts, given the hidden states [T, H] of all tokens of the batch."""
        columns = self._columns
        assert columns is not None
        pairs = prompt_pairs(batch, columns, table, self._kept, self._rows.starts)
        hidden = states.new_empty((len(pairs.older), states.shape[1]))
        for places, source in ((pairs.older, self._states), (pairs.newer, states)):
            own = np.flatnonzero(places >= 0)
            hidden[torch.from_numpy(own)] = source.index_select(0, torch.from_numpy(places[own]))
        self._pass(table, pairs.rows, pairs.starts, pairs.ends, hidden, np.zeros(0, dtype=np.int64))
        self._rows.store(table, pairs.rows, pairs.starts, pairs.ends)

    def _pass(
        self,
        table: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        hidden: Tensor,
        wanted: np.ndarray,
    ) -> Tensor:
        """Compute pairs ``starts`` to ``ends`` of some rows; return the expected states of the ``wanted`` ones."""
        tokens = self._rows.tokens(rows, starts + 1, ends + 1)
        inputs = self._rows.inputs(table, rows, starts, ends, tokens, wanted)
        return self._head(inputs, hidden, self._caches)
