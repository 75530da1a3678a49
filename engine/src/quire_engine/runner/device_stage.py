"""The runner of a stage that does not sample on a GPU: it runs its part of the model and passes the result on.

Like ``device_runner``, it returns while the step runs. Tokens come with each batch, so that nothing is read back.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire_engine.core.batch import Batch, RunnerOutput, TokenMasks
from quire_engine.runner.device.accelerator import Mark
from quire_engine.runner.device.faults import FULL_IN_STEP, device_faults
from quire_engine.runner.device.graphs import GraphSizes
from quire_engine.runner.device.staging import HostToDeviceBatch
from quire_engine.runner.device_steps import DeviceParts, DeviceSteps
from quire_engine.runner.inputs import step_columns
from quire_engine.runner.logprobs import logits_rows
from quire_engine.runner.verification import draws_of


class DeviceStage(DeviceSteps):
    """The part of ``DeviceRunner`` that a rank without sampling needs."""

    def __init__(self, parts: DeviceParts) -> None:
        super().__init__(parts, room=parts.max_tokens)
        self._passes = self._make_passes(parts.caches, GraphSizes())

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
