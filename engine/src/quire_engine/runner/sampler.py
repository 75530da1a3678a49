"""The sampling of a batch's next tokens, and the report of their probabilities if requested.

Parameters are columns by row, set when a sequence takes its row. A step whose rows are all greedy and unshaped is one
pass over the logits. Otherwise one kernel launch shapes the rows with edits, one samples all, one counts the sampled
tokens, and one reports probabilities: the cost in Python does not grow with the rows.

Legend: R sampled sequences, V vocabulary, S of them with shaped logits, K with reported probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Admission, TokenLogprobs, TokenMasks
from quire_engine.core.sampling_params import FILTER_NAMES
from quire_engine.runner.device.accelerator import InterpretedAccelerator
from quire_engine.runner.device.staging import HostToDeviceBatch
from quire_engine.runner.logit_shaping import LogitShaping
from quire_engine.runner.logprobs import report
from quire_engine.runner.token_masks import apply_masks
from quire_kernels.sampling import greedy, sample

_SEED_MASK = (1 << 64) - 1
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    token_ids: np.ndarray  # [R] int64
    logprobs: list[TokenLogprobs | None] | None

    def at(self, places: np.ndarray) -> "Drawn":
        """Return those at ``places``; the logprobs are None where none of them has any."""
        logprobs = None if self.logprobs is None else [self.logprobs[place] for place in places.tolist()]
        return Drawn(token_ids=self.token_ids[places], logprobs=logprobs)


NOTHING_DRAWN = Drawn(token_ids=np.zeros(0, dtype=np.int64), logprobs=None)


class Sampler:
    def __init__(self, *, max_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._filters = {name: np.zeros(max_rows, dtype=np.float32) for name in FILTER_NAMES}
        self._temperature = self._filters["temperature"]
        self._top_k = np.zeros(max_rows, dtype=np.int64)
        self._seed = np.zeros(max_rows, dtype=np.uint64)
        self._reported = np.zeros(max_rows, dtype=np.bool_)
        self._num_logprobs = np.zeros(max_rows, dtype=np.int64)
        self._shaping = LogitShaping(max_rows=max_rows, vocab_size=vocab_size, device=_CPU)

    def admit(self, admitted: Sequence[Admission]) -> None:
        for admission in admitted:
            row, params = admission.row, admission.params
            for name, column in self._filters.items():
                column[row] = getattr(params, name)
            self._top_k[row] = self._vocab_size if params.top_k is None else min(params.top_k, self._vocab_size)
            self._seed[row] = admission.seed & _SEED_MASK
            self._reported[row] = params.logprobs is not None
            self._num_logprobs[row] = params.logprobs or 0
        self._change_edits(admitted, np.zeros(0, dtype=np.int64))

    def _change_edits(self, admitted: Sequence[Admission], rows: np.ndarray) -> None:
        """Set the edits of rows that are admitted, and make room for the tokens that ``rows`` sample."""
        transfer = HostToDeviceBatch(InterpretedAccelerator(_CPU))
        self._shaping.stage(admitted, rows, transfer)
        transfer.send()
        self._shaping.apply()

    def release(self, row: int) -> None:
        self._shaping.release(row)
        self._reported[row] = False

    def draw(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, masks: TokenMasks | None = None) -> Drawn:
        """Sample a token for each of ``rows`` [R] from ``logits`` [R, V], which may be changed. ``masks`` apply first.

        A row may occur several times, at several positions, if no edit of its logits depends on earlier tokens.

        positions  [R] int64: of the sampled tokens in their sequences
        """
        shaped = self._shaping.shaped(rows)  # [S]
        reported = np.flatnonzero(self._reported[rows])  # [K]
        # Reported probabilities are the model's own: before masks, biases, penalties and temperature.
        own, lines = logits, reported
        if len(shaped) or masks is not None:
            logits = logits.float()
            if len(reported) and logits is own:
                own, lines = logits[torch.from_numpy(reported)], np.arange(len(reported))
        if masks is not None:
            apply_masks(logits, masks)
        if len(shaped):
            self._change_edits((), rows[shaped])
            places, edited = torch.from_numpy(shaped), torch.from_numpy(rows[shaped])
            self._shaping.shape(logits, places, edited)
        drawn = self._draw(logits, rows, positions)
        if len(shaped):
            self._shaping.count(torch.from_numpy(drawn).index_select(0, places), edited)
        if not len(reported):
            return Drawn(token_ids=drawn, logprobs=None)
        entries: list[TokenLogprobs | None] = [None] * len(rows)
        reports = report(own, lines, drawn[reported], self._num_logprobs[rows[reported]])
        for place, entry in zip(reported.tolist(), reports, strict=True):
            entries[place] = entry
        return Drawn(token_ids=drawn, logprobs=entries)

    def guess(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the token that each of ``rows`` would sample from the logits of a draft model, without its edits."""
        return self._draw(logits, rows, positions)

    def is_greedy(self, rows: np.ndarray) -> bool:
        """Return whether ``guess`` takes the most probable token of each of ``rows``."""
        return not self._temperature[rows].any()

    def _draw(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        if self.is_greedy(rows):
            return greedy(logits).numpy()
        return sample(
            logits.float(),
            **{name: torch.from_numpy(column[rows]) for name, column in self._filters.items()},  # [R] each
            top_k=torch.from_numpy(self._top_k[rows]),
            seeds=torch.from_numpy(self._seed[rows].view(np.int64)),
            positions=torch.from_numpy(positions),
        ).numpy()
