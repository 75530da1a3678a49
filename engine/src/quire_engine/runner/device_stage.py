"""The runner of a stage that does not sample on a GPU: it runs its part of the model and passes the result on.

Like ``device_runner``, it returns while the step runs. Tokens come with each batch, so that nothing is read back.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire_engine.core.batch import Batch, RunnerOutput, TokenMasks
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.model.family import CausalLM
from quire_engine.runner.device.accelerator import Accelerator, Mark, make_accelerator
from quire_engine.runner.device.faults import FULL_IN_STEP, device_faults
from quire_engine.runner.device.graphs import GraphSizes
from quire_engine.runner.device.inputs import DeviceRows
from quire_engine.runner.device.passes import DevicePasses, PassSizes
from quire_engine.runner.device.staging import HostToDeviceBatch
from quire_engine.runner.device.swap import DeviceSwapper
from quire_engine.runner.inputs import step_columns, table_blocks
from quire_engine.runner.logprobs import logits_rows
from quire_engine.runner.verification import draws_of
from quire_kernels.kv_cache import KVCache
from quire_kernels.paged_attention.plan import PromptAttention, allocate_workspace, fixed_split_tokens


class DeviceStage:
    """The part of ``DeviceRunner`` that a rank without sampling needs."""

    def __init__(
        self,
        *,
        model: CausalLM,
        caches: tuple[KVCache, ...],
        swap_space: tuple[KVCache, ...],
        layout: KVCacheLayout,
        num_heads: int,
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
        most_drafts: int,
        in_flight: int,
        device: torch.device,
        deterministic: bool = False,
        accelerator: Accelerator | None = None,
        prompts: PromptAttention | None = None,
    ) -> None:
        """Create it for at most ``in_flight`` steps that are issued and not done."""
        self._accelerator = make_accelerator(device) if accelerator is None else accelerator
        self._layout = layout
        self._rows = DeviceRows(
            layout=layout,
            max_rows=max_rows,
            max_blocks=table_blocks(layout, max_model_len),
            max_tokens=max_tokens,
            device=device,
        )
        self._swapper = DeviceSwapper(self._accelerator, layout, caches, swap_space)
        most_draws = max_rows + most_drafts
        workspace = allocate_workspace(
            max_tokens=max(max_tokens, max_rows),
            heads=num_heads,
            head_dim=max(cache.head_dim for cache in caches),
            device=caches[0].keys.device,
            split_tokens=fixed_split_tokens(max_model_len) if deterministic else None,
            prompts=prompts,
        )
        self._passes = DevicePasses(
            model,
            caches,
            layout,
            self._rows,
            accelerator=self._accelerator,
            workspace=workspace,
            sizes=PassSizes(rows=max_rows, tokens=max_tokens, logits=most_draws, draws=most_draws),
            graph_sizes=GraphSizes(),
            in_flight=in_flight,
        )

    @torch.inference_mode()
    def execute(self, batch: Batch) -> "IssuedStage":
        """Issue this rank's part of the model."""
        assert not batch.feedback_tokens, "a step in stages has known tokens"
        with device_faults(f"running a step of {batch.num_tokens} tokens", when_full=FULL_IN_STEP):
            transfer = HostToDeviceBatch(self._accelerator)
            self._rows.stage(batch, transfer)
            columns = step_columns(batch, self._rows.host.tables, self._layout.block_size)
            staged = self._passes.stage(columns, logits_rows(batch), draws_of(batch), transfer)
            transfer.send()
            self._rows.apply()
            self._swapper.apply(batch)
            self._passes.run(staged)
            return IssuedStage(batch=batch, done=self._accelerator.mark())

    def capture_graphs(self, captured: Callable[[], None] = lambda: None) -> None:
        """Capture nothing: steps of stages run launch by launch."""

    def close(self) -> None:
        self._passes.close()
        self._accelerator.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedStage:
    """A step of this stage: the ``ForwardPass`` and the ``PendingOutput`` of a step without tokens."""

    batch: Batch
    done: Mark

    @property
    def token_ids(self) -> list[int]:
        return self.batch.token_ids

    def sample(self, masks: TokenMasks | None = None) -> "IssuedStage":
        return self

    def wait(self) -> RunnerOutput:
        """Wait until the stage is done, which a measurement of memory does."""
        with device_faults(f"running a step of {self.batch.num_tokens} tokens", when_full=FULL_IN_STEP):
            self.done.wait()
        return RunnerOutput(token_ids=[])
