"""The runner of a rank that does not sample: it runs its part of the model, and passes the result on."""

import torch

from quire_engine.core.batch import Batch
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.model.family import CausalLM
from quire_engine.runner.inputs import RowState, build, table_blocks
from quire_engine.runner.logprobs import logits_rows
from quire_engine.runner.swap import Swapper
from quire_engine.runner.threads import ThreadChooser
from quire_kernels.kv_cache import KVCache


class StageRunner:
    """The part of ``ModelRunner`` that a rank without sampling needs."""

    def __init__(
        self,
        *,
        model: CausalLM,
        caches: tuple[KVCache, ...],
        swap_space: tuple[KVCache, ...],
        layout: KVCacheLayout,
        max_rows: int,
        max_model_len: int,
        threads: ThreadChooser,
        deterministic: bool,
    ) -> None:
        self._model = model
        self._caches = caches
        self._swapper = Swapper(layout, caches, swap_space)
        self._layout = layout
        self._threads = threads
        self._deterministic = deterministic
        max_blocks = table_blocks(layout, max_model_len)
        self._rows = RowState(max_rows=max_rows, max_blocks=max_blocks, groups=len(layout.groups))

    @torch.inference_mode()
    def execute(self, batch: Batch) -> None:
        """Run this rank's part of the model."""
        self._swapper.apply(batch)
        self._rows.apply(batch)
        self._threads.prepare(batch.num_tokens)
        rows = logits_rows(batch).rows
        inputs = build(batch, self._rows, self._layout, rows, deterministic=self._deterministic)
        self._model(inputs, self._caches)

    def close(self) -> None:
        """Release the threads."""
        self._threads.close()
