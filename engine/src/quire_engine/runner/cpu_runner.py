"""The part that all runners on a CPU have in common, and the runner of a rank that does not sample."""

from dataclasses import dataclass

import numpy as np
import torch

from quire_engine.core.batch import Batch
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.model.family import CausalLM
from quire_engine.model.layers import ModelInputs
from quire_engine.runner.adapter_store import RunnerAdapters
from quire_engine.runner.inputs import RowState, build, table_blocks
from quire_engine.runner.kv_cache import allocate_swap_space
from quire_engine.runner.logprobs import logits_rows
from quire_engine.runner.swap import Swapper
from quire_engine.runner.threads import ThreadChooser
from quire_kernels.kv_cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuParts:
    """The things that a runner on a CPU is made of."""

    model: CausalLM
    caches: tuple[KVCache, ...]
    layout: KVCacheLayout
    max_rows: int
    max_model_len: int
    threads: ThreadChooser
    deterministic: bool = False
    """True if attention does not depend on how a sequence is divided into steps."""
    adapters: RunnerAdapters | None = None


class CpuRunner:
    """The state of a runner, and the changes that every batch makes to it."""

    def __init__(self, parts: CpuParts) -> None:
        self._parts, layout = parts, parts.layout
        self._swapper = Swapper(layout, parts.caches, allocate_swap_space(layout, parts.caches))
        max_blocks = table_blocks(layout, parts.max_model_len)
        self._rows = RowState(max_rows=parts.max_rows, max_blocks=max_blocks, groups=len(layout.groups))

    def _apply(self, batch: Batch) -> None:
        """Apply a batch whose blocks were swapped, before the model runs."""
        if self._parts.adapters is not None:
            self._parts.adapters.apply(batch)
        self._rows.apply(batch)
        self._parts.threads.prepare(batch.num_tokens)

    def _inputs(self, batch: Batch, rows: np.ndarray) -> ModelInputs:
        """Return the inputs of a batch that was applied; see ``build``."""
        return build(batch, self._rows, self._parts.layout, rows, deterministic=self._parts.deterministic)

    def close(self) -> None:
        """Release the threads; the caches and weights are released with the object."""
        self._parts.threads.close()


class StageRunner(CpuRunner):
    """The runner of a rank that does not sample: it runs its part of the model, and passes the result on."""

    @torch.inference_mode()
    def execute(self, batch: Batch) -> None:
        """Run this rank's part of the model."""
        self._swapper.apply(batch)
        self._apply(batch)
        self._parts.model(self._inputs(batch, logits_rows(batch).rows), self._parts.caches)
