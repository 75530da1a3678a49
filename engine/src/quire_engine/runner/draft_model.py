"""A draft model on a CPU: a second, smaller model that proposes the tokens which the target verifies in the same step.

Its layers are further layers of the target's KV cache group: they share block tables, slots, prefix cache and swap
space, so that the scheduler knows only one model. A step lets it compute the prompts of the target's batch, unless
drafts do not pay, and one token per pass for each draft. It computes the recent tokens that it misses of a sequence
when that gets drafts.

What it computes decides only which tokens are proposed: stale keys and values cost acceptance, never correctness.
"""

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from quire_engine.core.batch import Batch
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.model.family import CausalLM
from quire_engine.runner.drafted_rows import MOST_MISSED, DraftedRows
from quire_engine.runner.sampler import Sampler
from quire_kernels.kv_cache import KVCache


class Drafter(Protocol):
    """The runner's source of drafts."""

    def propose(self, batch: Batch, table: np.ndarray, sampler: Sampler) -> Batch:
        """Return the batch with drafts in place of the tokens that it leaves open, before the target runs.

        ``table`` [rows, M] are the block tables, which include the batch.
        """
        ...


class DraftModel:
    """A ``Drafter`` that is a model of its own."""

    def __init__(
        self, model: CausalLM, caches: tuple[KVCache, ...], layout: KVCacheLayout, *, max_rows: int, max_model_len: int
    ) -> None:
        self._model, self._caches = model, caches
        self._rows = DraftedRows(layout, max_rows=max_rows, max_model_len=max_model_len)

    def propose(self, batch: Batch, table: np.ndarray, sampler: Sampler) -> Batch:
        """See ``Drafter``; this also computes the batch's prompts."""
        if self._rows.skip(batch):
            return batch
        columns = self._rows.begin(batch, table)
        chosen = columns.for_draft_model(batch)
        if not chosen.any():
            return batch
        rows, ends, guessing = columns.rows[chosen], columns.known_ends[chosen], columns.drafts[chosen] > 0
        # A prompt's own tokens are all computed; of earlier ones, and of a decoding sequence, the most recent.
        lowest = np.where(guessing, ends, columns.computed[chosen]) - MOST_MISSED
        starts = self._rows.starts(table, rows, ends, lowest)
        tokens = self._rows.tokens(rows, starts, ends)
        guessed = self._pass(table, sampler, rows, starts, ends, tokens, guessing)
        self._rows.store(table, rows, starts, ends)
        return self._guess_on(batch, table, sampler, columns.begins + columns.scheduled - columns.drafts, guessed)

    def _guess_on(
        self, batch: Batch, table: np.ndarray, sampler: Sampler, places: np.ndarray, guessed: np.ndarray
    ) -> Batch:
        """Return the batch with all drafts, given the first of each sequence; ``places`` [B] are theirs."""
        rows, drafts = np.asarray(batch.rows, dtype=np.int64), np.asarray(batch.num_drafts, dtype=np.int64)
        if not len(drafts):
            return batch
        token_ids = np.asarray(batch.token_ids, dtype=np.int64)
        scheduled = np.asarray(batch.num_scheduled, dtype=np.int64)
        ends = np.asarray(batch.num_computed, dtype=np.int64) + scheduled - drafts
        still = np.flatnonzero(drafts)
        for number in range(int(drafts.max())):
            token_ids[places[still] + number] = guessed
            self._rows.history[rows[still], ends[still] + number] = guessed
            going_on = drafts[still] > number + 1
            still, guessed = still[going_on], guessed[going_on]
            if not len(still):
                break
            starts = ends[still] + number
            every = np.ones(len(still), dtype=np.bool_)
            tokens = guessed
            guessed = self._pass(table, sampler, rows[still], starts, starts + 1, tokens, every)
            self._rows.store(table, rows[still], starts, starts + 1)
        return replace(batch, token_ids=token_ids.tolist())

    def _pass(
        self,
        table: np.ndarray,
        sampler: Sampler,
        rows: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        token_ids: np.ndarray,
        guessing: np.ndarray,
    ) -> np.ndarray:
        """Compute tokens ``starts`` to ``ends`` of some rows; return the guessed next one of those ``guessing``."""
        wanted = np.cumsum(ends - starts)[guessing] - 1
        inputs = self._rows.inputs(table, rows, starts, ends, token_ids, wanted)
        logits: torch.Tensor = self._model(inputs, self._caches)  # [R, V]
        if not len(wanted):
            return np.zeros(0, dtype=np.int64)
        return sampler.guess(logits, rows[guessing], ends[guessing])
