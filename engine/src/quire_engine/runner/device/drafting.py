"""The rows, the passes and the guesses of a draft model or a draft head on the device.

The host knows all lengths before the passes of a step, because the scheduler decides how many drafts each sequence has.
So it issues the passes one after another and waits for none: each reads the guesses of the one before on the device,
and the last one is followed by the target's pass over all of them.

Legend: N rows, B sequences with drafts, D their drafts, R rows of a pass, M blocks per sequence.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Batch
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.model.family import CausalLM
from quire_engine.runner.device.accelerator import Accelerator, Mark
from quire_engine.runner.device.graphs import GraphSizes
from quire_engine.runner.device.inputs import DeviceRows
from quire_engine.runner.device.passes import DevicePasses, PassResult, PassSizes, StagedPass
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


class DeviceDrafter(Protocol):
    """The device runner's source of drafts.

    ``stage`` a batch and, after the transfer, ``apply`` it; then ``propose``, run the target, and ``observe`` it.
    """

    def stage(self, batch: Batch, table: np.ndarray, transfer: HostToDeviceBatch) -> None:
        """Stage the changes of a batch; ``table`` [rows, M] are the host's block tables, which include it."""
        ...

    def apply(self) -> None: ...

    def propose(self, batch: Batch, table: np.ndarray, token_ids: Tensor) -> Proposed | None:
        """Issue the passes of a step, and write the drafts into ``token_ids`` [T], the target's inputs."""
        ...

    @property
    def reads_hidden(self) -> bool:
        """Return whether ``observe`` needs the target's hidden states."""
        ...

    def wants_all(self, batch: Batch) -> bool:
        """Return whether it needs those of all tokens of the staged batch, not only of those with logits."""
        ...

    def observe(self, batch: Batch, table: np.ndarray, hidden: Tensor, places: np.ndarray) -> None:
        """Take the target's hidden states [C, H] of the tokens at ``places`` [C] in the batch."""
        ...

    def note_sampled(self, batch: Batch, token_ids: list[int], counts: list[int] | None = None) -> None:
        """Note the sampled tokens of a step; see ``RunnerOutput.counts``. The next step may have been staged before."""
        ...

    def capture_graphs(self, captured: Callable[[], None]) -> None:
        """Capture the graphs of the passes, and call ``captured`` after each."""
        ...

    def close(self) -> None: ...


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


class Drafting:
    """The passes of a draft model or head, and the guesses of a step. ``rows`` know what is computed."""

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
        self.rows = DraftedRows(layout, max_rows=max_rows, max_model_len=max_model_len)
        self.room = pass_tokens(max_tokens)
        self.accelerator, self._sampler = accelerator, sampler
        self._device_rows = ShiftedRows(
            layout=own,
            max_rows=max_rows,
            max_blocks=table_blocks(layout, max_model_len),
            max_tokens=self.room,
            device=accelerator.device,
        )
        self._passes = DevicePasses(
            model,
            caches,
            own,
            self._device_rows,
            accelerator=accelerator,
            workspace=workspace,
            sizes=PassSizes(rows=max_rows, tokens=self.room, logits=max_rows, draws=max_rows),
            graph_sizes=draft_graph_sizes(graph_sizes),
            in_flight=max_drafts + 2,
        )
        self.note_sampled = self.rows.note_sampled
        self._guesses = torch.zeros((max_drafts, max_rows + 1), dtype=torch.int64, device=accelerator.device)

    def stage(self, batch: Batch, table: np.ndarray, transfer: HostToDeviceBatch) -> DraftColumns | None:
        """Stage a batch; return its columns, or None if there is nothing to do for it: see ``DraftedRows.skip``."""
        columns = None if self.rows.skip(batch) else self.rows.begin(batch, table)
        self._device_rows.stage_shifted(batch, self.rows.firsts, transfer)
        return columns

    def apply(self) -> None:
        self._device_rows.apply()

    def starts(self, table: np.ndarray, rows: np.ndarray, ends: np.ndarray, lowest: np.ndarray) -> np.ndarray:
        """See ``DraftedRows.starts``; this also updates the block tables of rows that attend from elsewhere."""
        before = self.rows.firsts[rows]
        starts = self.rows.starts(table, rows, ends, lowest)
        moved = rows[self.rows.firsts[rows] != before]
        if len(moved):
            columns = self.rows.firsts[moved][:, None] + np.arange(table.shape[1])
            blocks = table[moved[:, None], np.minimum(columns, table.shape[1] - 1)]
            self._device_rows.rewrite(moved, blocks, HostToDeviceBatch(self.accelerator))
        return starts

    def portions(self, starts: np.ndarray, ends: np.ndarray) -> Iterator[slice]:
        """Yield portions of rows whose tokens fit into a pass."""
        return portions(ends - starts, self.room)

    def run(
        self,
        table: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        *,
        token_ids: np.ndarray | None,
        guessing: np.ndarray,
        positions: np.ndarray,
    ) -> PassResult:
        """Issue a pass over tokens ``starts`` to ``ends`` of some rows, and the guesses of those ``guessing``.

        token_ids  [T] int64; None reads the guesses of the pass before, one for each row
        guessing   [R] bool
        positions  int64, of the guessed tokens in their sequences
        """
        wanted = np.cumsum(ends - starts)[guessing] - 1
        transfer = HostToDeviceBatch(self.accelerator)
        staged: StagedPass = self._passes.stage(
            self.rows.columns(table, rows, starts, ends, token_ids),
            LogitsRows(rows=wanted, sampled=np.arange(len(wanted)), reported=np.zeros(0, dtype=np.int64)),
            Draws(rows=rows[guessing], positions=positions),
            transfer,
        )
        transfer.send()
        result = self._passes.run(staged)
        if len(wanted):
            guessed = self._sampler.guess(result.logits, staged.inputs, rows[guessing])
            self._device_rows.remember(staged.inputs.drawn_rows[: len(wanted)], guessed)
        return result

    def keep_guesses(self, number: int) -> None:
        """Keep the guesses that all passes for draft ``number`` made."""
        self._guesses[number].copy_(self._device_rows.last_tokens)

    def fill_in(self, token_ids: Tensor, *, rows: np.ndarray, drafts: np.ndarray, places: np.ndarray) -> Proposed:
        """Write the kept guesses into the target's inputs ``token_ids`` [T].

        rows, drafts  [B] int64, the rows and their numbers of drafts
        places        [B] int64, of the first draft of each among the inputs
        """
        owners, numbers = positions_of(np.zeros_like(drafts), drafts)
        transfer = HostToDeviceBatch(self.accelerator)
        sources = transfer.add(numbers * self._guesses.shape[1] + rows[owners])
        targets = transfer.add(places[owners] + numbers)
        transfer.send()
        guessed = self._guesses.view(-1).index_select(0, sources.on_device)
        token_ids.index_copy_(0, targets.on_device, guessed)
        return Proposed(
            places=places[owners] + numbers,
            token_ids=self.accelerator.download(guessed),
            arrived=self.accelerator.mark(),
        )

    def capture_graphs(self, captured: Callable[[], None]) -> None:
        """See ``DeviceDrafter``."""
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
