"""The sampling of a batch's next tokens on the device, like ``runner.sampler`` on a CPU, without reads by the host.

Parameters are columns by row, written when a sequence takes its row. The host knows which rows are greedy, shaped or
reported, so a step uses the cheapest variant that serves all its rows: for greedy rows that is one launch.

Legend: K sampled tokens, V vocabulary, S of them with shaped logits, Q with reported probabilities.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Batch, TokenMasks
from quire_engine.core.sampling_params import FILTER_NAMES
from quire_engine.runner.device.reports import AskedReport, PendingReport
from quire_engine.runner.device.staging import ALIGNMENT, HostToDeviceBatch, Item, StepInputs
from quire_engine.runner.logit_shaping import LogitShaping
from quire_engine.runner.token_masks import apply_masks
from quire_kernels.sampling import greedy, sample

_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawPlan:
    """The way in which the tokens of a step are sampled."""

    count: int  # K
    all_greedy: bool
    shaped: tuple[Item, Item] | None
    """[S] int64 each: places among the sampled tokens, and rows."""
    reported: AskedReport | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDraw:
    token_ids: Tensor  # [K] int64
    report: PendingReport | None


class DeviceSampler:
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

    def stage(self, batch: Batch, drawn_rows: np.ndarray, transfer: HostToDeviceBatch) -> DrawPlan:
        for row in batch.released_rows:
            self._shaping.release(row)
            self._reported[row] = False
        if batch.admitted:
            self._stage_columns(batch, transfer)
        self._shaping.stage(batch.admitted, drawn_rows, transfer)
        shaped = self._shaping.shaped(drawn_rows)  # [S]
        reported = np.flatnonzero(self._reported[drawn_rows])  # [Q]
        return DrawPlan(
            count=len(drawn_rows),
            all_greedy=not self._heated[drawn_rows].any(),
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
        self, logits: Tensor, inputs: StepInputs[Tensor], plan: DrawPlan, masks: TokenMasks | None = None
    ) -> DeviceDraw:
        """Sample from ``logits`` [K, V], which may be changed: one token per row in ``inputs.drawn_rows``.

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
        drawn = greedy(logits) if plan.all_greedy else self._sample(logits, inputs, plan.count)
        if plan.shaped is not None:
            self._shaping.count(drawn.index_select(0, places), rows)
        report = None
        if plan.reported is not None and lines is not None:
            report = plan.reported.launch(own, lines, drawn.index_select(0, plan.reported.places.on_device))
        return DeviceDraw(token_ids=drawn, report=report)

    def guess(self, logits: Tensor, inputs: StepInputs[Tensor], rows: np.ndarray) -> Tensor:
        """Return the token [K] that each of ``rows`` [K] would sample from the logits of a draft model.

        The rows' edits are left out. The rows in ``inputs.drawn_rows`` are the same.
        """
        return self._sample(logits, inputs, len(rows)) if self._heated[rows].any() else greedy(logits)

    def _sample(self, logits: Tensor, inputs: StepInputs[Tensor], count: int) -> Tensor:
        rows = inputs.drawn_rows[:count]
        shares, numbers = self._drawn_shares[:, :count], self._drawn_numbers[:, :count]
        torch.index_select(self._shares, 1, rows, out=shares)
        torch.index_select(self._numbers, 1, rows, out=numbers)
        top_k, seeds = numbers
        return sample(
            logits,
            **dict(zip(FILTER_NAMES, shares, strict=True)),
            top_k=top_k,
            seeds=seeds,
            positions=inputs.drawn_positions[:count],
        )
