"""The runner of an engine that pools: a ``core.ports.Runner`` that reads hidden states and samples nothing.

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
from quire_engine.runner.inputs import step_columns
from quire_engine.runner.logprobs import LogitsRows
from quire_engine.runner.model_runner import StepRunner
from quire_engine.runner.staging import HostToDeviceBatch
from quire_engine.runner.verification import Draws

_NONE = np.zeros(0, dtype=np.int64)


def pooled_rows(batch: Batch) -> np.ndarray:
    """Return the places [R] of all pooled tokens in ``batch.token_ids``, in the order of ``batch.pooled``."""
    begins = np.cumsum(batch.num_scheduled) - batch.num_scheduled
    parts = [
        begins[asked.index] + asked.first - batch.num_computed[asked.index] + np.arange(asked.count)
        for asked in batch.pooled
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


class PoolingRunner(StepRunner):
    @torch.inference_mode()
    def execute(self, batch: Batch) -> "HiddenStates":
        began = time.perf_counter()
        self._accelerator.begin(batch.num_tokens)
        transfer = HostToDeviceBatch(self._accelerator)
        self._rows.stage(batch, transfer)
        wanted = LogitsRows(rows=pooled_rows(batch), sampled=_NONE, reported=_NONE)
        columns = step_columns(batch, self._rows.tables, self._parts.layout.block_size)
        staged = self._stage(columns, wanted, Draws(rows=_NONE, positions=_NONE), transfer)
        prepared = time.perf_counter()
        self._copy_blocks(batch)
        copied = time.perf_counter()
        hidden = self._passes.hidden_states(staged)  # [R, H]
        return HiddenStates(
            model=cast("DecoderStack", self._parts.model),
            batch=batch,
            hidden=hidden,
            prepare_seconds=prepared - began,
            run_seconds=time.perf_counter() - copied,
            swap_seconds=copied - prepared,
        )


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A ``PendingOutput`` that is done."""

    output: RunnerOutput

    def wait(self) -> RunnerOutput:
        return self.output


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
