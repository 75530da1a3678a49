"""A draft model on the device; see ``runner.draft_model``, which does the same on a CPU."""

import numpy as np
from torch import Tensor

from quire_engine.core.batch import Batch
from quire_engine.runner.device.drafting import Drafting, Proposed
from quire_engine.runner.device.staging import HostToDeviceBatch
from quire_engine.runner.drafted_rows import MOST_MISSED, DraftColumns


class DeviceDraftModel:
    """A ``DeviceDrafter`` that is a model of its own."""

    reads_hidden = False

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting
        self._rows = drafting.rows
        self._columns: DraftColumns | None = None
        self.apply, self.note_sampled = drafting.apply, drafting.note_sampled
        self.capture_graphs, self.close = drafting.capture_graphs, drafting.close

    def stage(self, batch: Batch, table: np.ndarray, transfer: HostToDeviceBatch) -> None:
        """See ``DeviceDrafter``."""
        self._columns = self._drafting.stage(batch, table, transfer)

    def propose(self, batch: Batch, table: np.ndarray, token_ids: Tensor) -> Proposed | None:
        """See ``DeviceDrafter``; this also computes the batch's prompts."""
        columns, drafting = self._columns, self._drafting
        if columns is None or not (chosen := columns.for_draft_model(batch)).any():
            return None
        rows, ends, guessing = columns.rows[chosen], columns.known_ends[chosen], columns.drafts[chosen] > 0
        lowest = np.where(guessing, ends, columns.computed[chosen]) - MOST_MISSED
        starts = drafting.starts(table, rows, ends, lowest)
        for part in drafting.portions(starts, ends):
            guess, end = guessing[part], ends[part]
            tokens = self._rows.tokens(rows[part], starts[part], end)
            drafting.run(table, rows[part], starts[part], end, token_ids=tokens, guessing=guess, positions=end[guess])
        self._rows.store(table, rows, starts, ends)
        return self._guess_on(table, columns, token_ids) if guessing.any() else None

    def _guess_on(self, table: np.ndarray, columns: DraftColumns, token_ids: Tensor) -> Proposed:
        """Issue the passes after the first one, of a token each."""
        still = np.flatnonzero(columns.drafts)
        rows, ends, drafts = columns.rows[still], columns.known_ends[still], columns.drafts[still]
        self._drafting.keep_guesses(0)
        for number in range(1, int(drafts.max())):
            going_on = drafts > number
            own, starts = rows[going_on], ends[going_on] + number - 1
            every = np.ones(len(own), dtype=np.bool_)
            self._drafting.run(table, own, starts, starts + 1, token_ids=None, guessing=every, positions=starts + 1)
            self._rows.store(table, own, starts, starts + 1)
            self._drafting.keep_guesses(number)
        places = columns.begins[still] + columns.scheduled[still] - drafts
        return self._drafting.fill_in(token_ids, rows=rows, drafts=drafts, places=places)

    def wants_all(self, batch: Batch) -> bool:
        """See ``DeviceDrafter``."""
        return False

    def observe(self, batch: Batch, table: np.ndarray, hidden: Tensor, places: np.ndarray) -> None:
        """See ``DeviceDrafter``: a model of its own reads no hidden states."""
