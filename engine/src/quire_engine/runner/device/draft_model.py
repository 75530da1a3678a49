"""A draft model on the device: its rows, its passes and its guesses.

The host knows all lengths before the passes of a step, because the scheduler decides how many drafts each sequence has.
So it issues the passes one after another and waits for none: each reads the guesses of the one before on the device,
and the last one is followed by the target's pass over all of them.

Legend: N rows, B sequences with drafts, D their drafts, R rows of a pass, M blocks per sequence.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Batch
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.model.family import CausalLM
from quire_engine.runner.device.accelerator import Accelerator, Mark
from quire_engine.runner.device.graphs import GraphSizes
from quire_engine.runner.device.inputs import DeviceRows
from quire_engine.runner.device.passes import DevicePasses, PassSizes
from quire_engine.runner.device.sampler import DeviceSampler
from quire_engine.runner.device.staging import HostToDeviceBatch
from quire_engine.runner.drafted_rows import MOST_MISSED, DraftColumns, DraftedRows, positions_of
from quire_engine.runner.inputs import table_blocks
from quire_engine.runner.logprobs import LogitsRows
from quire_engine.runner.verification import Draws
from quire_kernels.kv_cache import KVCache
from quire_kernels.paged_attention.plan import Workspace

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


class ShiftedRows(DeviceRows):
    """Rows whose block tables on the device begin with the first block that is attended to."""

    def stage_shifted(self, batch: Batch, firsts: np.ndarray, transfer: HostToDeviceBatch) -> None:
        """Stage the changes of a batch; ``firsts`` [N] are the first blocks of all rows, after its admissions."""
        (updates,) = batch.block_updates
        if updates.rows and firsts[updates.rows].any():
            positions = (np.asarray(updates.positions) - firsts[updates.rows]).tolist()
            batch = replace(batch, block_updates=(replace(updates, positions=positions),))
        self.stage(batch, transfer)

    def rewrite(self, rows: np.ndarray, blocks: np.ndarray, transfer: HostToDeviceBatch) -> None:
        """Replace the block tables of ``rows`` [R] by ``blocks`` [R, M]; this sends the transfer."""
        self.host.tables[0][rows] = blocks
        own, new = transfer.add(rows), transfer.add(blocks)
        transfer.send()
        self.tables[0].index_copy_(0, own.on_device, new.on_device)


class DeviceDraftModel:
    """The device runner's source of drafts; ``runner.draft_model`` does the same on a CPU.

    ``stage`` a batch and, after the transfer, ``apply`` it; then ``propose``, and run the target.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: tuple[KVCache, ...],
        layout: KVCacheLayout,
        *,
        accelerator: Accelerator,
        workspace: Workspace,
        sampler: DeviceSampler,
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
        max_drafts: int,
        graph_sizes: GraphSizes,
    ) -> None:
        (group,) = layout.groups
        own = replace(layout, groups=(replace(group, layers=tuple(range(len(caches)))),))
        self._rows = DraftedRows(layout, max_rows=max_rows, max_model_len=max_model_len)
        self._room = pass_tokens(max_tokens)
        self._accelerator, self._sampler = accelerator, sampler
        self._device_rows = ShiftedRows(
            layout=own,
            max_rows=max_rows,
            max_blocks=table_blocks(layout, max_model_len),
            max_tokens=self._room,
            device=accelerator.device,
        )
        self._passes = DevicePasses(
            model,
            caches,
            own,
            self._device_rows,
            accelerator=accelerator,
            workspace=workspace,
            sizes=PassSizes(rows=max_rows, tokens=self._room, logits=max_rows, draws=max_rows),
            graph_sizes=draft_graph_sizes(graph_sizes),
            in_flight=max_drafts + 2,
        )
        self.note_sampled = self._rows.note_sampled
        self._guesses = torch.zeros((max_drafts, max_rows + 1), dtype=torch.int64, device=accelerator.device)
        self._columns: DraftColumns | None = None
        """The columns of the staged batch; None if there is nothing to do for it: see ``DraftedRows.skip``."""

    def stage(self, batch: Batch, table: np.ndarray, transfer: HostToDeviceBatch) -> None:
        """Stage the changes of a batch; ``table`` [rows, M] are the host's block tables, which include it."""
        self._columns = None if self._rows.skip(batch) else self._rows.begin(batch, table)
        self._device_rows.stage_shifted(batch, self._rows.firsts, transfer)

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
        for number in range(1, int(drafts.max())):
            going_on = drafts > number
            own, starts = rows[going_on], ends[going_on] + number - 1
            self._run(table, own, starts, starts + 1, token_ids=None, guessing=np.ones(len(own), dtype=np.bool_))
            self._rows.store(table, own, starts, starts + 1)
            self._keep_guesses(number)
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
        token_ids: np.ndarray | None,
        guessing: np.ndarray,
    ) -> None:
        """Issue a pass over tokens ``starts`` to ``ends`` of some rows, and the guesses of those ``guessing``.

        token_ids  [T] int64; None reads the guesses of the pass before, one for each row
        guessing   [R] bool
        """
        wanted = np.cumsum(ends - starts)[guessing] - 1
        transfer = HostToDeviceBatch(self._accelerator)
        staged = self._passes.stage(
            self._rows.columns(table, rows, starts, ends, token_ids),
            LogitsRows(rows=wanted, sampled=np.arange(len(wanted)), reported=np.zeros(0, dtype=np.int64)),
            Draws(rows=rows[guessing], positions=ends[guessing]),
            transfer,
        )
        transfer.send()
        logits = self._passes.run(staged)
        if len(wanted):
            guessed = self._sampler.guess(logits, staged.inputs, rows[guessing])
            self._device_rows.remember(staged.inputs.drawn_rows[: len(wanted)], guessed)

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

    def capture_graphs(self, captured: Callable[[], None]) -> None:
        """Capture the graphs of the passes, and call ``captured`` after each."""
        self._passes.capture_graphs(captured)

    def close(self) -> None:
        self._passes.close()


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
