"""The runner of an engine that pools on a CPU: a ``core.ports.Runner`` that reads hidden states and samples nothing.

``execute`` copies swapped blocks, applies the other changes of the batch, and runs the model; ``sample`` sums what the
batch pools. Each is done when it returns.

Legend: R pooled tokens, H hidden size, V vocabulary.
"""

import time
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Batch, PooledPositions, RunnerOutput, TokenMasks
from quire_engine.model.layers import DecoderStack
from quire_engine.runner.cpu_runner import CpuParts, CpuRunner
from quire_engine.runner.model_runner import FinishedStep


def pooled_rows(batch: Batch) -> np.ndarray:
    """Return the places [R] of all pooled tokens in ``batch.token_ids``, in the order of ``batch.pooled``."""
    begins = np.cumsum(batch.num_scheduled) - batch.num_scheduled
    parts = [
        begins[asked.index] + asked.first - batch.num_computed[asked.index] + np.arange(asked.count)
        for asked in batch.pooled
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


class PoolingRunner(CpuRunner):
    def __init__(self, parts: CpuParts) -> None:
        super().__init__(parts)
        self._model = cast("DecoderStack", parts.model)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> "HiddenStates":
        arrived = time.perf_counter()
        self._swapper.apply(batch)
        began = time.perf_counter()
        self._apply(batch)
        inputs = self._inputs(batch, pooled_rows(batch))
        prepared = time.perf_counter()
        hidden = self._model.hidden_states(inputs, self._parts.caches)  # [R, H]
        return HiddenStates(
            model=self._model,
            batch=batch,
            hidden=hidden,
            prepare_seconds=prepared - began,
            run_seconds=time.perf_counter() - prepared,
            swap_seconds=began - arrived,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStates:
    """The ``ForwardPass`` of an engine that pools: the model has run."""

    model: DecoderStack
    batch: Batch
    hidden: Tensor  # [R, H]
    prepare_seconds: float
    run_seconds: float
    swap_seconds: float

    @property
    def token_ids(self) -> list[int]:
        return self.batch.token_ids

    @torch.inference_mode()
    def sample(self, masks: TokenMasks | None = None) -> FinishedStep:
        """Sum what is pooled. The token of a sequence that ends stands for its end."""
        assert masks is None, "nothing is sampled"
        began = time.perf_counter()
        pooled = read_pooled(self.model, self.hidden, self.batch.pooled)
        return FinishedStep(
            RunnerOutput(
                token_ids=[0] * sum(self.batch.samples),
                pooled=pooled,
                prepare_seconds=self.prepare_seconds,
                run_seconds=self.run_seconds,
                sample_seconds=time.perf_counter() - began,
                swap_seconds=self.swap_seconds,
            )
        )


def read_pooled(model: DecoderStack, hidden: Tensor, pooled: list[PooledPositions]) -> list[bytes]:
    """Return the values of each entry: the sum of its hidden states, or of the logits of its tokens."""
    counts = [asked.count for asked in pooled]
    values = []
    for asked, rows in zip(pooled, hidden.split(counts), strict=True):
        # [count, V] to [count, tokens]
        read = model.logits(rows)[:, list(asked.token_ids)] if asked.token_ids else rows
        values.append(read.sum(dim=0, dtype=torch.float32).numpy().tobytes())
    return values
