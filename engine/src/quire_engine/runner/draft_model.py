"""A draft model on a CPU: a second, smaller model that proposes the tokens which the target verifies in the same step.

Its layers are further layers of the target's KV cache group: they share block tables, slots, prefix cache and swap
space, so that the scheduler knows only one model. A step lets it compute the same prompt chunks as the target, then one
token per pass for each draft. Sequences without drafts leave it behind, and it catches up when they have some again.

What it computes decides only which tokens are proposed: stale keys and values cost acceptance, never correctness.
"""

from dataclasses import replace

import numpy as np
import torch

from quire_engine.core.batch import Batch
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.model.family import CausalLM
from quire_engine.runner.inputs import RowState, build
from quire_engine.runner.sampler import Sampler
from quire_kernels.kv_cache import KVCache

MOST_MISSED = 64
"""The tokens that a sequence's draft model computes to catch up; older ones stay as they are."""


class DraftModel:
    """The draft model and the tokens that it has computed of each row."""

    def __init__(
        self, model: CausalLM, caches: tuple[KVCache, ...], layout: KVCacheLayout, *, max_rows: int, max_model_len: int
    ) -> None:
        self._model, self._caches, self._layout = model, caches, layout
        self._history = np.zeros((max_rows, max_model_len + layout.block_size), dtype=np.int32)
        """The tokens of each row, those of the prompt and of the answer."""
        self._computed = np.zeros(max_rows, dtype=np.int64)
        """The tokens of each row whose keys and values the draft model has stored."""

    def run(self, batch: Batch, rows: RowState, sampler: Sampler) -> Batch:
        """Compute the prompts of a batch, and return it with drafts in place of the tokens that it leaves open."""
        self._admit(batch)
        computed = np.asarray(batch.num_computed, dtype=np.int64)
        scheduled = np.asarray(batch.num_scheduled, dtype=np.int64)
        numbers = np.asarray(batch.rows, dtype=np.int64)
        drafts = np.asarray(batch.num_drafts or [0] * len(batch.rows), dtype=np.int64)
        token_ids = np.asarray(batch.token_ids, dtype=np.int64)
        begins = np.cumsum(scheduled) - scheduled
        if len(token_ids) == len(numbers):  # the common step without drafts: one token each
            self._history[numbers, computed] = token_ids
        else:
            for row, start, count, begin in zip(numbers, computed, scheduled - drafts, begins, strict=True):
                self._history[row, start : start + count] = token_ids[begin : begin + count]
        # Rejected drafts of the step before are not part of the text.
        self._computed[numbers] = np.minimum(self._computed[numbers], computed)
        drafted = drafts > 0
        prompts = ~drafted & (scheduled > 1)
        first = prompts | drafted
        if not first.any():
            return batch
        ends = computed + scheduled - drafts  # [B] known tokens
        starts = np.where(prompts, computed, np.maximum(self._computed[numbers], ends - MOST_MISSED))
        guessed = self._pass(batch, rows, sampler, numbers[first], starts[first], ends[first], drafted[first])
        self._computed[numbers[first]] = ends[first]
        places = np.flatnonzero(drafted)
        for number in range(int(drafts.max(initial=0))):
            token_ids[begins[places] + scheduled[places] - drafts[places] + number] = guessed
            self._history[numbers[places], ends[places] + number] = guessed
            still = drafts[places] > number + 1
            places, wanted = places[still], numbers[places[still]]
            if not len(places):
                break
            starts = ends[places] + number
            guessed = self._pass(batch, rows, sampler, wanted, starts, starts + 1, np.ones(len(places), dtype=np.bool_))
            self._computed[wanted] = starts + 1
        return replace(batch, token_ids=token_ids.tolist())

    def _admit(self, batch: Batch) -> None:
        by_row = dict(zip(batch.rows, batch.num_computed, strict=True))
        for admission in batch.admitted:
            known = [*admission.prompt_token_ids, *admission.output_token_ids]
            self._history[admission.row, : len(known)] = known
            # Blocks that were found or swapped in hold the draft model's layers too.
            self._computed[admission.row] = by_row.get(admission.row, 0)

    def _pass(
        self,
        batch: Batch,
        rows: RowState,
        sampler: Sampler,
        numbers: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        guessing: np.ndarray,
    ) -> np.ndarray:
        """Compute tokens ``starts`` to ``ends`` of some rows; return the guessed next one of those ``guessing``."""
        counts = ends - starts
        token_ids = [
            token
            for row, start, end in zip(numbers, starts, ends, strict=True)
            for token in self._history[row, start:end].tolist()
        ]
        step = replace(
            batch,
            rows=numbers.tolist(),
            num_computed=starts.tolist(),
            num_scheduled=counts.tolist(),
            token_ids=token_ids,
            samples=guessing.tolist(),
            feedback_tokens=[],
            num_drafts=[],
            prompt_logprobs=[],
        )
        wanted = np.cumsum(counts)[guessing] - 1
        inputs = build(step, rows, self._layout, wanted)
        logits: torch.Tensor = self._model(inputs, self._caches)  # [R, V]
        if not len(wanted):
            return np.zeros(0, dtype=np.int64)
        return sampler.guess(logits, numbers[guessing], ends[guessing])
