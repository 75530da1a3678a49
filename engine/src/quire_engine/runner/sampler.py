"""Draws the next tokens of a batch, and reports their probabilities where asked.

Parameters live in columns by row, set when a sequence takes its row. A step whose rows are all greedy and unshaped is
one pass over the logits; otherwise all rows are drawn by one kernel launch.

Legend: R sampled sequences, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Admission, TokenLogprobs
from quire_engine.runner.logit_shaping import LogitShaper, make_shaper
from quire_kernels.sampling import greedy, sample

_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    token_ids: np.ndarray  # [R] int64
    logprobs: list[TokenLogprobs | None] | None


class Sampler:
    def __init__(self, *, max_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._temperature = np.zeros(max_rows, dtype=np.float32)
        self._top_k = np.zeros(max_rows, dtype=np.int64)
        self._top_p = np.zeros(max_rows, dtype=np.float32)
        self._min_p = np.zeros(max_rows, dtype=np.float32)
        self._seed = np.zeros(max_rows, dtype=np.uint64)
        self._shapers: dict[int, LogitShaper] = {}
        self._logprobs: dict[int, int] = {}

    def admit(self, admission: Admission) -> None:
        row, params = admission.row, admission.params
        self.release(row)
        self._temperature[row] = params.temperature
        self._top_k[row] = self._vocab_size if params.top_k is None else min(params.top_k, self._vocab_size)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = admission.seed & _SEED_MASK
        if (shaper := make_shaper(admission, self._vocab_size)) is not None:
            self._shapers[row] = shaper
        if params.logprobs is not None:
            self._logprobs[row] = params.logprobs

    def release(self, row: int) -> None:
        self._shapers.pop(row, None)
        self._logprobs.pop(row, None)

    def draw(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Drawn:
        """A token for each of ``rows`` [R] from ``logits`` [R, V].

        positions  [R] int64: of the drawn tokens in their sequences
        """
        shaped = self._shapers and [(i, row) for i, row in enumerate(rows.tolist()) if row in self._shapers]
        reported = self._logprobs and [i for i, row in enumerate(rows.tolist()) if row in self._logprobs]
        temperature = self._temperature[rows]  # [R]
        if not shaped and not reported and not temperature.any():
            return Drawn(token_ids=greedy(logits).numpy(), logprobs=None)
        logits = logits.float()
        # Reported probabilities are the model's own: before temperature, biases and penalties.
        reports = logits[reported].log_softmax(dim=-1) if reported else None
        for i, row in shaped or ():
            self._shapers[row].apply(logits[i].numpy())
        drawn = self._draw(logits, rows, temperature, positions)
        for i, row in shaped or ():
            self._shapers[row].observe(int(drawn[i]))
        if reports is None or not reported:
            return Drawn(token_ids=drawn, logprobs=None)
        return Drawn(token_ids=drawn, logprobs=self._report(reports, reported, rows, drawn))

    def _draw(self, logits: Tensor, rows: np.ndarray, temperature: np.ndarray, positions: np.ndarray) -> np.ndarray:
        if not temperature.any():
            return greedy(logits).numpy()
        return sample(
            logits,
            temperature=torch.from_numpy(temperature),
            top_k=torch.from_numpy(self._top_k[rows]),
            top_p=torch.from_numpy(self._top_p[rows]),
            min_p=torch.from_numpy(self._min_p[rows]),
            seeds=torch.from_numpy(self._seed[rows].view(np.int64)),
            positions=torch.from_numpy(positions),
        ).numpy()

    def _report(
        self, logprobs: Tensor, reported: list[int], rows: np.ndarray, drawn: np.ndarray
    ) -> list[TokenLogprobs | None]:
        entries: list[TokenLogprobs | None] = [None] * len(rows)
        for line, i in zip(logprobs, reported, strict=True):
            token = int(drawn[i])
            likeliest = line.topk(min(self._logprobs[int(rows[i])], self._vocab_size))
            entries[i] = TokenLogprobs(
                token_ids=[token, *likeliest.indices.tolist()],
                logprobs=[float(line[token]), *likeliest.values.tolist()],
                rank=int((line > line[token]).sum()) + 1,
            )
        return entries
