"""The sampling of a batch's next tokens on the device, without reads by the host.

Parameters are columns by row, written when a sequence takes its row. The host knows which rows are greedy, shaped or
reported, so a step uses the cheapest variant that serves all its rows: for greedy rows that is one launch. The cost in
Python does not grow with the rows.

Legend: K sampled tokens, V vocabulary, S of them with shaped logits, Q with reported probabilities, R
rows of logits, M masked ones.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Batch, TokenMasks, mask_bytes
from quire_engine.core.sampling_params import FILTER_NAMES
from quire_engine.runner.logit_shaping import LogitShaping
from quire_engine.runner.logprobs import AskedReport, PendingReport
from quire_engine.runner.passes import StagedPass
from quire_engine.runner.staging import ALIGNMENT, HostToDeviceBatch, Item
from quire_kernels.dispatch import runs_triton
from quire_kernels.sampling import greedy, sample

_FEW = 16
"""A row with less than one allowed token in so many is filled, and gets its allowed logits back."""
_SEED_MASK = (1 << 64) - 1


@dataclass(slots=True, kw_only=True)
class DrawPlan:
    """The way in which the tokens of a step are sampled."""

    count: int  # K
    all_greedy: bool
    shaped: tuple[Item, Item] | None
    """[S] int64 each: places among the sampled tokens, and rows."""
    reported: AskedReport | None


class Sampler:
    """The sampler of the device. ``stage`` admissions and sampled rows, transfer, ``apply``; then ``draw``."""

    def __init__(self, *, max_rows: int, most_draws: int, vocab_size: int, device: torch.device) -> None:
        """Create the sampler. A step samples at most ``most_draws`` tokens, several of a row that has drafts."""
        self._vocab_size = vocab_size
        self._heated = np.zeros(max_rows, dtype=np.bool_)
        self._reported = np.zeros(max_rows, dtype=np.bool_)
        self._num_logprobs = np.zeros(max_rows, dtype=np.int64)
        # The filters, and top k with the seed: by row, and for the sampled rows. Columns start at aligned addresses,
        # whatever the number of rows.
        widths = [-(-count // ALIGNMENT) * ALIGNMENT for count in (max_rows, most_draws)]
        self._shares, self._drawn_shares = (torch.zeros((len(FILTER_NAMES), width), device=device) for width in widths)
        self._numbers, self._drawn_numbers = (
            torch.zeros((2, width), dtype=torch.int64, device=device) for width in widths
        )
        self._shaping = LogitShaping(max_rows=max_rows, vocab_size=vocab_size, device=device)
        self._admitted: tuple[Item, Item, Item] | None = None
        self._takes_16_bits = runs_triton(device.type)

    def stage(self, batch: Batch, drawn_rows: np.ndarray, transfer: HostToDeviceBatch) -> DrawPlan:
        for row in batch.released_rows:
            self._shaping.release(row)
            self._reported[row] = False
        if batch.admitted:
            self._stage_columns(batch, transfer)
            self._shaping.stage(batch.admitted, drawn_rows, transfer)
        shaped = self._shaping.shaped(drawn_rows)  # [S]
        if len(shaped) and not batch.admitted:
            self._shaping.stage((), drawn_rows, transfer)
        reported = self._reported[drawn_rows].nonzero()[0]  # [Q]
        return DrawPlan(
            count=len(drawn_rows),
            all_greedy=self.is_greedy(drawn_rows),
            shaped=(transfer.add(shaped), transfer.add(drawn_rows[shaped])) if len(shaped) else None,
            reported=AskedReport(
                places=transfer.add(reported),
                counts=self._num_logprobs[drawn_rows[reported]],
            )
            if len(reported)
            else None,
        )

    def _stage_columns(self, batch: Batch, transfer: HostToDeviceBatch) -> None:
        rows = np.array([admission.row for admission in batch.admitted], dtype=np.int64)
        params = [admission.params for admission in batch.admitted]
        shares = [[getattr(one, name) for name in FILTER_NAMES] for one in params]
        numbers = np.zeros((2, len(rows)), dtype=np.uint64)
        numbers[0] = [self._vocab_size if one.top_k is None else min(one.top_k, self._vocab_size) for one in params]
        numbers[1] = [admission.seed & _SEED_MASK for admission in batch.admitted]
        self._heated[rows] = [one.temperature > 0.0 for one in params]
        self._reported[rows] = [one.logprobs is not None for one in params]
        self._num_logprobs[rows] = [one.logprobs or 0 for one in params]
        self._admitted = (
            transfer.add(rows),
            transfer.add(np.array(shares, dtype=np.float32).T),
            transfer.add(numbers.view(np.int64)),
        )

    def apply(self) -> None:
        if self._admitted is not None:
            rows, shares, numbers = (item.on_device for item in self._admitted)
            self._shares.index_copy_(1, rows, shares)
            self._numbers.index_copy_(1, rows, numbers)
            self._admitted = None
        self._shaping.apply()

    def draw(
        self, logits: Tensor, staged: StagedPass, plan: DrawPlan, masks: TokenMasks | None = None
    ) -> tuple[Tensor, PendingReport | None]:
        """Sample from ``logits`` [K, V], which may be changed: one token [K] per row in ``staged.drawn_rows``.

        ``masks`` apply first. A row may occur several times if no edit of its logits depends on earlier tokens.
        """
        own = logits
        lines = plan.reported.places.on_device if plan.reported is not None else None  # [Q] of ``own``
        if plan.shaped is not None or masks is not None:
            logits = logits.float()
            if lines is not None and logits is own:
                # Reported probabilities are the model's own: before masks, biases, penalties and temperature.
                own, lines = logits.index_select(0, lines), torch.arange(len(lines), device=logits.device)
        if masks is not None:
            apply_masks(logits, masks)
        if plan.shaped is not None:
            places, rows = (item.on_device for item in plan.shaped)
            self._shaping.shape(logits, places, rows)
        drawn = greedy(logits) if plan.all_greedy else self._sample(logits, staged)
        if plan.shaped is not None:
            self._shaping.count(drawn.index_select(0, places), rows)
        report = None
        if plan.reported is not None and lines is not None:
            report = plan.reported.launch(own, lines, drawn.index_select(0, plan.reported.places.on_device))
        return drawn, report

    def guess(self, logits: Tensor, staged: StagedPass, rows: np.ndarray) -> Tensor:
        """Return the token [K] that each of ``rows`` [K] would sample from the logits of a draft model.

        The rows' edits are left out. The rows in ``staged.drawn_rows`` are the same.
        """
        return greedy(logits) if self.is_greedy(rows) else self._sample(logits, staged)

    def is_greedy(self, rows: np.ndarray) -> bool:
        """Return whether each of ``rows`` takes its most probable token."""
        return not self._heated[rows].any()

    def _sample(self, logits: Tensor, staged: StagedPass) -> Tensor:
        rows = staged.drawn_rows
        count = len(rows)
        shares, numbers = self._drawn_shares[:, :count], self._drawn_numbers[:, :count]
        torch.index_select(self._shares, 1, rows, out=shares)
        torch.index_select(self._numbers, 1, rows, out=numbers)
        top_k, seeds = numbers
        return sample(
            logits if self._takes_16_bits else logits.float(),
            **dict(zip(FILTER_NAMES, shares, strict=True)),
            top_k=top_k,
            seeds=seeds,
            positions=staged.drawn_positions,
        )


def apply_masks(logits: Tensor, masks: TokenMasks) -> None:
    """Set the logits [R, V] of all tokens to -inf that the mask of their row does not allow."""
    if logits.device.type == "cpu":
        _apply_in_place(logits, masks)
        return
    vocab_size = logits.shape[1]
    places = _upload(torch.tensor(masks.places, dtype=torch.int64), logits.device)  # [M]
    packed = torch.frombuffer(bytearray(masks.bits), dtype=torch.uint8).view(len(masks.places), mask_bytes(vocab_size))
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = (_upload(packed, logits.device).unsqueeze(2) >> shifts & 1).bool().flatten(1)[:, :vocab_size]  # [M, V]
    masked = logits.index_select(0, places).masked_fill_(~allowed, float("-inf"))
    logits.index_copy_(0, places, masked)


def _apply_in_place(logits: Tensor, masks: TokenMasks) -> None:
    """Set the logits on a CPU: no row is copied, and a row with few allowed tokens is filled at once.

    One thread does this: the rows are too short for threads to be worth their synchronisation.
    """
    vocab_size = logits.shape[1]
    lines = logits.numpy()
    packed = np.frombuffer(masks.bits, dtype=np.uint8).reshape(len(masks.places), mask_bytes(vocab_size))
    allowed = np.unpackbits(packed, axis=1, count=vocab_size, bitorder="little").view(np.bool_)  # [M, V]
    for place, row in zip(masks.places, allowed, strict=True):
        line = lines[place]
        if np.count_nonzero(row) * _FEW < vocab_size:
            kept = np.flatnonzero(row)
            values = line[kept]
            line.fill(-np.inf)
            line[kept] = values
        else:
            np.copyto(line, -np.inf, where=~row)


def _upload(column: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device; the host does not wait for the copy."""
    return column.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else column
