"""The passes of a model on a CPU: their inputs are arrays of the host, and each is done when it was issued.

Legend: T tokens, B sequences, M blocks per sequence, R wanted rows of logits, P passes, V vocabulary, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.model.family import CausalLM
from quire_engine.model.layers import DecoderStack, GroupInputs, ModelInputs
from quire_engine.model.recordings import passes_at_once
from quire_engine.runner.accelerator import Accelerator, CpuAccelerator
from quire_engine.runner.captured import GraphSizes
from quire_engine.runner.inputs import Rows, StepColumns
from quire_engine.runner.logprobs import LogitsRows
from quire_engine.runner.passes import PassSizes, StagedPass
from quire_engine.runner.staging import HostToDeviceBatch
from quire_engine.runner.verification import Draws
from quire_kernels.kv_cache import KVCache
from quire_kernels.lora import TokenGroups
from quire_kernels.paged_attention import plan_attention

_LOGITS_OF_ALL = 2
"""The most tokens of a draft model's pass for each guess of which all have logits. A sequence whose drafts were all
accepted has two."""


@dataclass(slots=True, kw_only=True)
class CpuPass(StagedPass):
    inputs: ModelInputs
    lines: Tensor | None
    """[R] int64, the lines of the computed logits that are wanted; None if these are all."""


class CpuPasses:
    """See ``passes.Passes``."""

    def __init__(
        self,
        model: CausalLM,
        caches: tuple[KVCache, ...],
        layout: KVCacheLayout,
        rows: Rows,
        *,
        accelerator: Accelerator,
        sizes: PassSizes,
        graph_sizes: GraphSizes,
        deterministic: bool = False,
        drafts: bool = False,
    ) -> None:
        """Create them.

        deterministic  attention does not depend on how a sequence is divided into steps
        drafts         the model drafts: some passes only ``guess``
        """
        self._model, self._caches, self._layout, self._rows = model, caches, layout, rows
        self._recordings = model.recordings if isinstance(model, DecoderStack) else None
        self._threads = accelerator.threads if isinstance(accelerator, CpuAccelerator) else None
        self._last_tokens: np.ndarray = rows.last_tokens.numpy()
        self._deterministic = deterministic
        # A step is recorded whole if all its tokens have logits: a few more take less time than launches of their own.
        self._most_per_line = _LOGITS_OF_ALL if drafts else 1
        self._graph_sizes = graph_sizes.within(
            sequences=sizes.rows if drafts else 0, tokens=self._most_per_line * sizes.draws
        )

    @property
    def captured(self) -> int:
        return 0 if self._recordings is None else self._recordings.made

    def capture(self, captured: Callable[[], None] = lambda: None) -> None:
        """Record the steps of each number of tokens and of threads, and of decoding the passes of ``guess``.

        Other steps are recorded when they first occur, which takes longer.
        """
        model = self._model
        if not isinstance(model, DecoderStack):
            return
        for key in self._graph_sizes.in_order():
            for _ in (None,) if self._threads is None else self._threads.possible(key.size):
                inputs = self._blank_inputs(key.size)
                if key.is_mixed:
                    model.record(inputs, self._caches)
                else:
                    model.record_guesses(inputs, self._caches)
            captured()

    def close(self) -> None:
        pass

    def stage(
        self,
        columns: StepColumns,
        wanted: LogitsRows,
        draws: Draws,
        transfer: HostToDeviceBatch,
        *,
        adapted: TokenGroups | None = None,
    ) -> CpuPass:
        if len(columns.feedback):
            columns.token_ids[columns.feedback] = self._last_tokens[columns.token_rows[columns.feedback]]
        tokens, read = len(columns.token_ids), wanted.rows
        if len(read) < tokens <= self._most_per_line * len(read):
            read = np.arange(tokens)
        token_ids = torch.from_numpy(columns.token_ids)
        return CpuPass(
            token_ids=token_ids,
            drawn_rows=torch.from_numpy(draws.rows),
            drawn_positions=torch.from_numpy(draws.positions),
            drawn_lines=torch.from_numpy(wanted.sampled) if len(wanted.reported) else None,
            lines=torch.from_numpy(wanted.rows) if read is not wanted.rows else None,
            inputs=ModelInputs(
                token_ids=token_ids,
                positions=torch.from_numpy(columns.positions),
                groups=tuple(
                    [
                        self._group_inputs(*group, columns=columns)
                        for group in zip(self._rows.tables, self._layout.groups, columns.slots, strict=True)
                    ]
                ),
                logits_rows=torch.from_numpy(read),
                adapters=adapted,
            ),
        )

    def run(self, staged: StagedPass) -> Tensor:
        assert isinstance(staged, CpuPass)
        logits: Tensor = self._model(staged.inputs, self._caches)
        return logits if staged.lines is None else logits.index_select(0, staged.lines)

    def hidden_states(self, staged: StagedPass) -> Tensor:
        assert isinstance(staged, CpuPass)
        assert isinstance(self._model, DecoderStack), "only native models pool"
        return self._model.hidden_states(staged.inputs, self._caches)

    def at_once(self, staged: StagedPass) -> int:
        assert isinstance(staged, CpuPass)
        model = self._model
        if not isinstance(model, DecoderStack) or not model.records_logits(staged.inputs):
            return 0
        return passes_at_once(staged.inputs)

    def guess(self, staged: StagedPass, slots: np.ndarray) -> Tensor:
        assert isinstance(staged, CpuPass)
        assert isinstance(self._model, DecoderStack), "at_once refuses others"
        return torch.from_numpy(self._model.guess(staged.inputs, slots, self._caches))

    def _group_inputs(
        self, table: np.ndarray, group: KVCacheGroup, slots: np.ndarray, *, columns: StepColumns
    ) -> GroupInputs:
        width = -(-(int(columns.contexts.max()) + columns.more) // self._layout.block_size)
        plan = plan_attention(
            block_tables=torch.from_numpy(np.ascontiguousarray(table[columns.rows, :width])),  # [B, M]
            query_lens=columns.scheduled,
            context_lens=columns.contexts,
            block_size=self._layout.block_size,
            window=group.window,
            chunked=group.chunked,
            deterministic=self._deterministic,
        )
        return GroupInputs(slots=torch.from_numpy(slots), plan=plan)

    def _blank_inputs(self, tokens: int) -> ModelInputs:
        """Return inputs of as many sequences as tokens, all in slot 0, for what depends only on their number."""
        ones, zeros = np.ones(tokens, dtype=np.int64), np.zeros(tokens, dtype=np.int64)
        table = np.zeros((1, 1), dtype=np.int32)
        columns = StepColumns(
            rows=zeros,
            scheduled=ones,
            contexts=ones,
            ends=np.arange(1, tokens + 1),
            token_ids=zeros,
            token_rows=zeros,
            positions=zeros,
            feedback=zeros[:0],
            slots=(),
        )
        return ModelInputs(
            token_ids=torch.from_numpy(zeros),
            positions=torch.from_numpy(zeros),
            groups=tuple(self._group_inputs(table, group, zeros, columns=columns) for group in self._layout.groups),
            logits_rows=torch.arange(tokens),
        )
