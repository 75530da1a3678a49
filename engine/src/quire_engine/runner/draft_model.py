"""A draft model on a CPU: a second, smaller model that proposes the tokens which the target verifies in the same step.

Its layers are further layers of the target's KV cache group: they share block tables, slots, prefix cache and swap
space, so that the scheduler knows only one model. A step lets it compute the prompts of the target's batch, unless
drafts do not pay, and one token per pass for each draft. It computes the recent tokens that it misses of a sequence
when that gets drafts.

What it computes decides only which tokens are proposed: stale keys and values cost acceptance, never correctness.
"""

from dataclasses import replace

import numpy as np
import torch

from quire_engine.core.batch import Batch
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.model.family import CausalLM
from quire_engine.model.layers import MOST_RECORDED_TOKENS, DecoderStack, recorded_steps
from quire_engine.model.recordings import passes_at_once
from quire_engine.runner.drafted_rows import MOST_MISSED, DraftedRows
from quire_engine.runner.inputs import blank_inputs
from quire_engine.runner.sampler import Sampler
from quire_engine.runner.threads import ThreadChooser
from quire_kernels.kv_cache import KVCache

_LOGITS_OF_ALL = 2
"""The most tokens of a pass for each guess of which all have logits. A sequence whose drafts were all accepted has two.
"""


class DraftModel:
    """The runner's source of drafts."""

    def __init__(
        self, model: CausalLM, caches: tuple[KVCache, ...], layout: KVCacheLayout, *, max_rows: int, max_model_len: int
    ) -> None:
        self._model, self._caches, self._max_rows = model, caches, max_rows
        self._rows = DraftedRows(layout, max_rows=max_rows, max_model_len=max_model_len)

    @property
    def recorded(self) -> int:
        """The number of its steps that were recorded; see ``model.recordings``."""
        return recorded_steps(self._model)

    def record(self, layout: KVCacheLayout, threads: ThreadChooser) -> None:
        """Record the passes that can be recorded ahead, so that none takes longer when it first occurs."""
        if not isinstance(self._model, DecoderStack):
            return
        for tokens in range(min(MOST_RECORDED_TOKENS, _LOGITS_OF_ALL * self._max_rows), 0, -1):
            for _ in threads.possible(tokens):
                inputs = blank_inputs(layout, tokens)
                self._model.record(inputs, self._caches)
                if tokens <= self._max_rows:
                    self._model.record_guesses(inputs, self._caches)

    def propose(self, batch: Batch, table: np.ndarray, sampler: Sampler) -> Batch:
        """Return the batch with drafts in place of the tokens that it leaves open, before the target runs.

        This also computes the batch's prompts. ``table`` [rows, M] are the block tables, which include the batch.
        """
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
        still, count, guesses = np.flatnonzero(drafts), 0, guessed[None]  # [P, R]
        while True:
            numbers = np.arange(count, count + len(guesses))[:, None]
            token_ids[places[still] + numbers] = guesses
            self._rows.history[rows[still], ends[still] + numbers] = guesses
            count += len(guesses)
            going_on = drafts[still] > count
            still, guessed = still[going_on], guesses[-1][going_on]
            if not len(still):
                return replace(batch, token_ids=token_ids.tolist())
            starts = ends[still] + count - 1
            most = int(drafts[still].min()) - count
            guesses = self._passes(table, sampler, rows[still], starts, guessed, most)
            self._rows.store(table, rows[still], starts, starts + len(guesses))

    def _passes(
        self,
        table: np.ndarray,
        sampler: Sampler,
        rows: np.ndarray,
        starts: np.ndarray,
        token_ids: np.ndarray,
        most: int,
    ) -> np.ndarray:
        """Compute at least 1 and at most ``most`` tokens of each row; return the guesses [P, R] of all passes.

        token_ids  [R] int64, the tokens at ``starts``
        """
        every = np.arange(len(rows))
        inputs = self._rows.inputs(table, rows, starts, starts + 1, token_ids, every, more=most - 1)
        model = self._model
        if isinstance(model, DecoderStack) and model.records_logits(inputs) and sampler.is_greedy(rows):
            passes = np.arange(min(most, passes_at_once(inputs)))[:, None]
            return model.guess(inputs, self._rows.slots(table, rows, starts + passes), self._caches)
        return sampler.guess(model(inputs, self._caches), rows, starts + 1)[None]

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
        if not len(wanted):
            self._model(self._rows.inputs(table, rows, starts, ends, token_ids, wanted), self._caches)
            return wanted
        # A step is recorded whole if all its tokens have logits: a few more take less time than launches of their own.
        few = len(token_ids) <= _LOGITS_OF_ALL * len(wanted)
        read = np.arange(len(token_ids)) if few else wanted
        inputs = self._rows.inputs(table, rows, starts, ends, token_ids, read)
        logits: torch.Tensor = self._model(inputs, self._caches)  # [R, V]
        if len(read) > len(wanted):
            logits = logits[torch.from_numpy(wanted)]
        return sampler.guess(logits, rows[guessing], ends[guessing])
