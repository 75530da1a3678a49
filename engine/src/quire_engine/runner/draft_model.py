"""A draft model: a second, smaller model that proposes the tokens which the target verifies in the same step.

Its layers are further layers of the target's KV cache group: they share block tables, slots, prefix cache and swap
space, so that the scheduler knows only one model. A step lets it compute the prompts of the target's batch, unless
drafts do not pay, and one token per pass for each draft. It computes the recent tokens that it misses of a sequence
when that gets drafts. What it computes decides only which tokens are proposed: stale keys and values cost acceptance,
never correctness.

The host knows all lengths before the passes of a step, because the scheduler decides how many drafts each sequence has.
So it issues the passes one after another and waits for none: each reads the guesses of the one before on the device,
and the last one is followed by the target's pass over all of them.

Legend: N rows, B sequences with drafts, D their drafts, R rows of a pass, M blocks per sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Batch
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.runner.accelerator import Accelerator, Mark
from quire_engine.runner.captured import GraphSizes
from quire_engine.runner.drafted_rows import MOST_MISSED, DraftColumns, DraftedRows, positions_of
from quire_engine.runner.inputs import Rows, StepColumns
from quire_engine.runner.logprobs import LogitsRows
from quire_engine.runner.passes import Passes, StagedPass
from quire_engine.runner.sampler import Sampler
from quire_engine.runner.staging import HostToDeviceBatch
from quire_engine.runner.verification import Draws

_MOST_CAPTURED_TOKENS = 256
"""Larger first passes have prompts in them, for which the device needs longer than the host."""


def pass_tokens(max_tokens: int) -> int:
    """Return the tokens of the largest pass: a step's, and those that a row of it missed."""
    return max_tokens + MOST_MISSED


def draft_graph_sizes(sizes: GraphSizes) -> GraphSizes:
    """Return the sizes to capture of a draft model's passes, given the target's."""
    return replace(sizes, mixed=tuple(size for size in sizes.mixed if size <= _MOST_CAPTURED_TOKENS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """The drafts of a step. They are in the target's inputs on the device; the host gets a copy."""

    places: np.ndarray  # [D] int64, in ``Batch.token_ids``
    token_ids: Tensor  # [D] int64, in host memory, complete when ``arrived`` is reached
    arrived: Mark

    def inputs_of(self, batch: Batch) -> np.ndarray:
        """Wait for the drafts, and return the step's input tokens [T] int64 with them."""
        self.arrived.wait()
        token_ids = np.asarray(batch.token_ids, dtype=np.int64)
        token_ids[self.places] = self.token_ids.numpy()
        return token_ids


class DraftModel:
    """The runner's source of drafts.

    ``stage`` a batch and, after the transfer, ``apply`` it; then ``propose``, and run the target.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        passes: Passes,
        device_rows: Rows,
        *,
        accelerator: Accelerator,
        sampler: Sampler,
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
        max_drafts: int,
    ) -> None:
        """Create it. The block tables of ``device_rows`` begin with the first block that is attended to."""
        self._rows = DraftedRows(layout, max_rows=max_rows, max_model_len=max_model_len)
        self._room = pass_tokens(max_tokens)
        self._accelerator, self._sampler = accelerator, sampler
        self._device_rows, self.passes = device_rows, passes
        self.note_sampled = self._rows.note_sampled
        self._guesses = torch.zeros((max_drafts, max_rows + 1), dtype=torch.int64, device=accelerator.device)
        self._columns: DraftColumns | None = None
        """The columns of the staged batch; None if there is nothing to do for it: see ``DraftedRows.skip``."""

    def stage(self, batch: Batch, table: np.ndarray, transfer: HostToDeviceBatch) -> None:
        """Stage the changes of a batch; ``table`` [rows, M] are the host's block tables, which include it."""
        self._columns = None if self._rows.skip(batch) else self._rows.begin(batch, table)
        self._device_rows.stage(batch, transfer, self._rows.firsts)

    def apply(self) -> None:
        self._device_rows.apply()

    def propose(self, batch: Batch, table: np.ndarray, token_ids: Tensor) -> Proposed | None:
        """Issue the passes of a step, and write the drafts into ``token_ids`` [T], the target's inputs.

        This also computes the batch's prompts.
        """
        columns = self._columns
        if columns is None or not (chosen := columns.for_draft_model(batch)).any():
            return None
        rows, ends, guessing = columns.rows[chosen], columns.known_ends[chosen], columns.drafts[chosen] > 0
        lowest = np.where(guessing, ends, columns.computed[chosen]) - MOST_MISSED
        starts = self._starts(table, rows, ends, lowest)
        for part in portions(ends - starts, self._room):
            tokens = self._rows.tokens(rows[part], starts[part], ends[part])
            self._run(table, rows[part], starts[part], ends[part], token_ids=tokens, guessing=guessing[part])
        self._rows.store(table, rows, starts, ends)
        return self._guess_on(table, columns, token_ids) if guessing.any() else None

    def _guess_on(self, table: np.ndarray, columns: DraftColumns, token_ids: Tensor) -> Proposed:
        """Issue the passes after the first one, of a token each."""
        still = np.flatnonzero(columns.drafts)
        rows, ends, drafts = columns.rows[still], columns.known_ends[still], columns.drafts[still]
        self._keep_guesses(0)
        number, most = 1, int(drafts.max())
        while number < most:
            going_on = drafts > number
            own, starts = rows[going_on], ends[going_on] + number - 1
            count = self._run_on(table, own, starts, number, most=int(drafts[going_on].min()) - number)
            self._rows.store(table, own, starts, starts + count)
            number += count
        places = columns.begins[still] + columns.scheduled[still] - drafts
        return self._fill_in(token_ids, rows=rows, drafts=drafts, places=places)

    def _starts(self, table: np.ndarray, rows: np.ndarray, ends: np.ndarray, lowest: np.ndarray) -> np.ndarray:
        """See ``DraftedRows.starts``; this also updates the block tables of rows that attend from elsewhere."""
        before = self._rows.firsts[rows]
        starts = self._rows.starts(table, rows, ends, lowest)
        moved = rows[self._rows.firsts[rows] != before]
        if len(moved):
            columns = self._rows.firsts[moved][:, None] + np.arange(table.shape[1])
            blocks = table[moved[:, None], np.minimum(columns, table.shape[1] - 1)]
            self._device_rows.rewrite(moved, blocks, HostToDeviceBatch(self._accelerator))
        return starts

    def _run(
        self,
        table: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        *,
        token_ids: np.ndarray,
        guessing: np.ndarray,
    ) -> None:
        """Issue a pass over tokens ``starts`` to ``ends`` of some rows, and the guesses of those ``guessing``.

        token_ids  [T] int64
        guessing   [R] bool
        """
        wanted = np.cumsum(ends - starts)[guessing] - 1
        columns = self._rows.columns(table, rows, starts, ends, token_ids)
        self._guess(self._stage(columns, wanted, rows[guessing], ends[guessing]), rows[guessing])

    def _run_on(self, table: np.ndarray, rows: np.ndarray, starts: np.ndarray, number: int, *, most: int) -> int:
        """Issue the passes for drafts from ``number`` on, at least 1 and at most ``most``; return how many they are.

        Each computes a token of every row, the guess of the pass before.
        """
        columns = self._rows.columns(table, rows, starts, starts + 1, None, more=most - 1)
        staged = self._stage(columns, np.arange(len(rows)), rows, starts + 1)
        count = min(most, self.passes.at_once(staged)) if self._sampler.is_greedy(rows) else 0
        if not count:
            self._guess(staged, rows)
            self._keep_guesses(number)
            return 1
        slots = self._rows.slots(table, rows, starts + np.arange(count)[:, None])
        guessed = self.passes.guess(staged, slots)  # [P, R]
        self._guesses[number : number + count].index_copy_(1, staged.drawn_rows, guessed)
        self._device_rows.remember(staged.drawn_rows, guessed[-1])
        return count

    def _stage(self, columns: StepColumns, wanted: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> StagedPass:
        """Stage a pass that guesses tokens of ``rows`` at ``positions``, from the logits at ``wanted``."""
        transfer = HostToDeviceBatch(self._accelerator)
        staged = self.passes.stage(
            columns,
            LogitsRows(rows=wanted, sampled=np.arange(len(wanted)), reported=np.zeros(0, dtype=np.int64)),
            Draws(rows=rows, positions=positions),
            transfer,
        )
        transfer.send()
        return staged

    def _guess(self, staged: StagedPass, rows: np.ndarray) -> None:
        """Issue a pass, and remember the guesses for ``rows``."""
        logits = self.passes.run(staged)
        if len(rows):
            self._device_rows.remember(staged.drawn_rows, self._sampler.guess(logits, staged, rows))

    def _keep_guesses(self, number: int) -> None:
        """Keep the guesses that all passes for draft ``number`` made."""
        self._guesses[number].copy_(self._device_rows.last_tokens)

    def _fill_in(self, token_ids: Tensor, *, rows: np.ndarray, drafts: np.ndarray, places: np.ndarray) -> Proposed:
        """Write the kept guesses into the target's inputs ``token_ids`` [T].

        rows, drafts  [B] int64, the rows and their numbers of drafts
        places        [B] int64, of the first draft of each among the inputs
        """
        owners, numbers = positions_of(np.zeros_like(drafts), drafts)
        transfer = HostToDeviceBatch(self._accelerator)
        sources = transfer.add(numbers * self._guesses.shape[1] + rows[owners])
        targets = transfer.add(places[owners] + numbers)
        transfer.send()
        guessed = self._guesses.view(-1).index_select(0, sources.on_device)
        token_ids.index_copy_(0, targets.on_device, guessed)
        return Proposed(
            places=places[owners] + numbers,
            token_ids=self._accelerator.download(guessed),
            arrived=self._accelerator.mark(),
        )


def portions(counts: np.ndarray, room: int) -> Iterator[slice]:
    """Yield slices of ``counts``, each of which sums to at most ``room``; none of them is larger."""
    begin = total = 0
    for place, count in enumerate(counts.tolist()):
        if total + count > room:
            yield slice(begin, place)
            begin, total = place, 0
        total += count
    if total:
        yield slice(begin, len(counts))
