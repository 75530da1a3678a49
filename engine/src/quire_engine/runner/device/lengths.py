"""The lengths of rows on the device, where the drafts that a step accepts are known before the host reads them.

A step with tokens fed back from one with drafts is prepared as if all of these were accepted. The device compares what
it sampled with the drafts, and remembers how many of each row were rejected. Before a pass of the next step runs, it
moves the positions, the slots and the contexts of these rows back by as many, and so the positions of the tokens to
sample, which seeds depend on. Everything else of a step is the same, however many drafts were accepted.

Legend: T tokens, B sequences, N rows, F rows whose first token is fed back, Q sequences that sample, K sampled tokens,
D the most drafts of a sequence, M blocks per row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Batch
from quire_engine.runner.device.inputs import DeviceRows
from quire_engine.runner.device.staging import HostToDeviceBatch, InputSizes, Item, StepInputs
from quire_engine.runner.inputs import StepColumns
from quire_engine.runner.logprobs import drafts_of_sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPlan:
    """The part of the lengths in a step."""

    moved: Item | None
    """[F] int64, the rows that may be moved back; None if the step follows no drafts."""
    verified: "_Verified | None"
    """The drafts of the step; None if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verified:
    """The sequences that sample in a step with drafts, [Q] int64 each."""

    rows: Item
    drafts: Item
    lines: Item
    """The first of the K sampled tokens of each."""
    places: Item
    """The place in the inputs of the token after which it is sampled."""
    most: int  # D


class DeviceLengths:
    """The drafts that the most recent step has rejected of each of the target's ``rows``, and the end of its text."""

    def __init__(
        self, rows: DeviceRows, *, max_rows: int, max_drafts: int, block_size: int, device: torch.device
    ) -> None:
        self._rows = rows
        self.last_tokens = rows.last_tokens
        self._block_size = block_size
        self._rejected, self._shifts, self.previous_tokens = (
            torch.zeros(max_rows + 1, dtype=torch.int64, device=device) for _ in range(3)
        )  # [N + 1]; the tokens before the last ones are those after a step with drafts
        self._drafted_step: int | None = None
        """The number of the step that was staged last, if it had drafts."""
        self._numbers = torch.arange(max_drafts, dtype=torch.int64, device=device)

    def stage(self, batch: Batch, columns: StepColumns, transfer: HostToDeviceBatch) -> LengthPlan:
        """Stage what the device needs to know about a step."""
        follows = len(columns.feedback) > 0 and self._drafted_step == batch.step - 1
        moved = columns.token_rows[columns.feedback] if follows else None
        self._drafted_step = batch.step if batch.num_drafts else None
        return LengthPlan(
            moved=None if moved is None else transfer.add(moved),
            verified=_stage_verified(batch, columns, transfer) if batch.num_drafts else None,
        )

    def begin(self, moved: Item) -> None:
        """Find by how much the rows ``moved`` [F] are moved back in the passes of a step."""
        rows = moved.on_device
        self._shifts.zero_()
        self._shifts.index_copy_(0, rows, self._rejected.index_select(0, rows))

    def move_back(
        self,
        inputs: StepInputs[Tensor],
        sizes: InputSizes,
        tables: tuple[Tensor, ...],
        first_tokens: Tensor | None = None,
    ) -> None:
        """Correct the inputs of a pass, which was prepared as if all drafts in flight were accepted.

        sizes         of the pass without padding
        tables        [N + 1, M] int32 per KV cache group
        first_tokens  [T] int64, the position at which the block table of each token's row begins; None for 0
        """
        tokens, sequences, draws = sizes.tokens, sizes.sequences, sizes.draws
        rows = inputs.token_rows[:tokens]
        positions = inputs.positions[:tokens]
        positions.sub_(self._shifts.index_select(0, rows))
        seen = positions if first_tokens is None else positions - first_tokens
        places = torch.div(seen, self._block_size, rounding_mode="floor")
        offsets = seen - places * self._block_size
        for slots, table in zip(inputs.slots, tables, strict=True):
            blocks = table.view(-1).index_select(0, rows * table.shape[1] + places)
            slots[:tokens].copy_(blocks).mul_(self._block_size).add_(offsets)
        contexts = inputs.contexts[:sequences]
        contexts.sub_(self._shifts.index_select(0, inputs.rows[:sequences]))
        if draws:
            drawn = inputs.drawn_positions[:draws]
            drawn.sub_(self._shifts.index_select(0, inputs.drawn_rows[:draws]))

    def verify(self, plan: LengthPlan, sampled: Tensor, token_ids: Tensor) -> None:
        """Compare the drafts of a step with what was sampled, and remember the end of each row's text.

        sampled    [K] int64
        token_ids  [T] int64, the inputs of the step
        """
        found = plan.verified
        assert found is not None
        rows, drafts, lines, places = (item.on_device for item in (found.rows, found.drafts, found.lines, found.places))
        numbers = self._numbers[: found.most]  # [D]
        # A sequence with fewer drafts compares its last one again, which is not counted.
        own = torch.minimum(numbers, (drafts - 1).clamp_(min=0)[:, None])  # [Q, D]
        expected = token_ids.index_select(0, (places[:, None] + 1 + own).clamp_(max=len(token_ids) - 1).view(-1))
        equal = sampled.index_select(0, (lines[:, None] + own).view(-1)) == expected  # [Q D]
        counted = equal.view(own.shape) & (numbers < drafts[:, None])
        accepted = counted.long().cumprod(dim=1).sum(dim=1)  # [Q]
        self._rejected.index_copy_(0, rows, drafts - accepted)
        self.previous_tokens.index_copy_(0, rows, token_ids.index_select(0, places + accepted))
        self._rows.remember(rows, sampled.index_select(0, lines + accepted))


def _stage_verified(batch: Batch, columns: StepColumns, transfer: HostToDeviceBatch) -> _Verified:
    sampled = np.asarray(batch.samples, dtype=np.bool_)
    drafts = drafts_of_sampled(batch)
    return _Verified(
        rows=transfer.add(columns.rows[sampled]),
        drafts=transfer.add(drafts),
        lines=transfer.add(np.cumsum(drafts + 1) - (drafts + 1)),
        places=transfer.add(columns.ends[sampled] - 1 - drafts),
        most=int(drafts.max()),
    )
