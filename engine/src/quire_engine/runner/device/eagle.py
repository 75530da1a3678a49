"""A draft head on the device; see ``runner.eagle_drafts``, which does the same on a CPU.

Legend: N rows, R rows of a pass, T tokens of a pass, C tokens with hidden states, W kept tokens of a row, H their size.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Batch
from quire_engine.model.eagle import EagleHead
from quire_engine.model.layers import ModelInputs
from quire_engine.runner.device.accelerator import Accelerator
from quire_engine.runner.device.drafting import Drafting, Proposed
from quire_engine.runner.device.staging import HostToDeviceBatch
from quire_engine.runner.drafted_rows import MOST_MISSED, DraftColumns, positions_of
from quire_engine.runner.eagle_drafts import KeptRows, computed_tokens, is_prompt, kept_tokens, prompt_pairs
from quire_kernels.kv_cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedHead:
    """A head as a model: it reads hidden states at one place, so that its passes can be captured."""

    head: EagleHead
    hidden: Tensor  # [T, H] of the largest pass

    def __call__(self, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> Tensor:
        """Return logits [R, V]."""
        return self.logits(self.hidden_states(inputs, caches))

    def hidden_states(self, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> Tensor:
        """Return the expected hidden states [R, H]."""
        return self.head(inputs, self.hidden[: len(inputs.token_ids)], caches)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, V] of expected hidden states [R, H]."""
        return self.head.logits(hidden)


def place_head(head: EagleHead, tokens: int) -> PlacedHead:
    """Return the head with room for passes of ``tokens`` tokens."""
    embedding = head.target.embedding
    return PlacedHead(head=head, hidden=embedding.new_zeros((tokens, embedding.shape[1])))


class DeviceEagle:
    """A ``DeviceDrafter`` that is a head over the target's hidden states."""

    reads_hidden = True

    def __init__(
        self, drafting: Drafting, placed: PlacedHead, accelerator: Accelerator, *, max_rows: int, max_drafts: int
    ) -> None:
        self._drafting, self._accelerator = drafting, accelerator
        self._rows = drafting.rows
        self._input = placed.hidden
        tokens = kept_tokens(max_drafts)
        self._kept = KeptRows(max_rows=max_rows, tokens=tokens)
        self._states = self._input.new_zeros((max_rows * tokens, self._input.shape[1]))  # [N W, H]
        self._columns: DraftColumns | None = None
        self.apply, self.note_sampled = drafting.apply, drafting.note_sampled
        self.capture_graphs, self.close = drafting.capture_graphs, drafting.close

    def stage(self, batch: Batch, table: np.ndarray, transfer: HostToDeviceBatch) -> None:
        """See ``DeviceDrafter``."""
        self._kept.begin(batch)
        self._columns = self._drafting.stage(batch, table, transfer)

    def propose(self, batch: Batch, table: np.ndarray, token_ids: Tensor) -> Proposed | None:
        """See ``DeviceDrafter``; this also computes the pairs of the drafts that were accepted before."""
        columns, drafting = self._columns, self._drafting
        if columns is None or not len(still := np.flatnonzero(columns.drafts)):
            return None
        rows, drafts = columns.rows[still], columns.drafts[still]
        ends = columns.known_ends[still] - 1
        # The steps of a start draft for rows that they admit, of which no state is kept.
        # A pass has room for few missed pairs.
        lowest = np.maximum(np.minimum(self._kept.begins[rows], ends - 1), ends - MOST_MISSED)
        starts = drafting.starts(table, rows, ends, lowest)
        read = [
            self._first_pass(table, rows[part], starts[part], ends[part]) for part in drafting.portions(starts, ends)
        ]
        self._rows.store(table, rows, starts, ends)
        drafting.keep_guesses(0)
        self._guess_on(table, rows, ends, drafts, read[0] if len(read) == 1 else torch.cat(read))
        places = columns.begins[still] + columns.scheduled[still] - drafts
        return drafting.fill_in(token_ids, rows=rows, drafts=drafts, places=places)

    def _first_pass(self, table: np.ndarray, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Tensor:
        """Compute pairs from the kept states; return the expected states [R, H] of each row's next token."""
        owners, positions = positions_of(starts, ends)
        self._load(self._kept.places(rows[owners], positions), self._states)
        return self._run(table, rows, starts, ends, self._rows.tokens(rows, starts + 1, ends + 1)).clone()

    def _guess_on(
        self, table: np.ndarray, rows: np.ndarray, ends: np.ndarray, drafts: np.ndarray, hidden: Tensor
    ) -> None:
        """Issue the passes after the first one, over the head's own ``hidden`` states [R, H]."""
        for number in range(1, int(drafts.max())):
            going_on = drafts > number
            if going_on.all():
                self._input[: len(rows)].copy_(hidden)
            else:
                self._load(np.flatnonzero(going_on), hidden)
                rows, ends, drafts = rows[going_on], ends[going_on], drafts[going_on]
            starts = ends + number - 1
            hidden = self._run(table, rows, starts, starts + 1, None)
            self._drafting.keep_guesses(number)

    def _run(
        self, table: np.ndarray, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, token_ids: np.ndarray | None
    ) -> Tensor:
        """Issue a pass in which every row guesses the token after its last pair; return its states [R, H]."""
        every = np.ones(len(rows), dtype=np.bool_)
        result = self._drafting.run(table, rows, starts, ends, token_ids=token_ids, guessing=every, positions=ends + 1)
        assert result.wanted is not None
        return result.wanted

    def wants_all(self, batch: Batch) -> bool:
        """See ``DeviceDrafter``."""
        # Positions of prompts that are reported have logits too, but are no consecutive tokens up to the last one.
        return bool(batch.prompt_logprobs) or self._prepares(batch)

    def _prepares(self, batch: Batch) -> bool:
        """Return whether the staged batch has prompts that are computed for drafts."""
        return batch.prepares_drafts and self._columns is not None and bool(is_prompt(self._columns).any())

    def observe(self, batch: Batch, table: np.ndarray, hidden: Tensor, places: np.ndarray) -> None:
        """Keep the hidden states of a step, and compute the pairs of its prompts while drafts pay."""
        columns = self._columns
        if columns is not None and self._prepares(batch):
            self._compute_prompts(batch, table, hidden, columns)
        rows, positions = computed_tokens(batch, columns, places)
        if not len(rows):
            return
        new = self._kept.keep(rows, positions)
        transfer = HostToDeviceBatch(self._accelerator)
        sources, targets = transfer.add(new), transfer.add(self._kept.places(rows[new], positions[new]))
        transfer.send()
        self._states.index_copy_(0, targets.on_device, hidden.index_select(0, sources.on_device))

    def _compute_prompts(self, batch: Batch, table: np.ndarray, hidden: Tensor, columns: DraftColumns) -> None:
        """Compute the pairs of prompts, given the hidden states [T, H] of all tokens of the batch."""
        pairs = prompt_pairs(batch, columns, table, self._kept, self._drafting.starts)
        tokens = np.cumsum(pairs.ends - pairs.starts)
        for part in self._drafting.portions(pairs.starts, pairs.ends):
            rows, starts, ends = pairs.rows[part], pairs.starts[part], pairs.ends[part]
            own = slice(int(tokens[part.start] - (ends - starts)[0]), int(tokens[part.stop - 1]))
            self._load(pairs.older[own], self._states)
            self._load(pairs.newer[own], hidden)
            self._drafting.run(
                table,
                rows,
                starts,
                ends,
                token_ids=self._rows.tokens(rows, starts + 1, ends + 1),
                guessing=np.zeros(len(rows), dtype=np.bool_),
                positions=np.zeros(0, dtype=np.int64),
            )
        self._rows.store(table, pairs.rows, pairs.starts, pairs.ends)

    def _load(self, places: np.ndarray, source: Tensor) -> None:
        """Copy the states at ``places`` [T] of ``source`` to the head's input, except those at -1."""
        own = np.flatnonzero(places >= 0)
        if not len(own):
            return
        transfer = HostToDeviceBatch(self._accelerator)
        sources, targets = transfer.add(places[own]), transfer.add(own)
        transfer.send()
        self._input.index_copy_(0, targets.on_device, source.index_select(0, sources.on_device))
