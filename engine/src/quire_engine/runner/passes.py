"""The passes of one model on a device: what a runner asks of ``cpu_passes`` and of ``device_passes``.

A step is a pass of the target; a draft model has further ones in the same step. ``stage`` makes the inputs of a pass,
``run`` issues it: as a captured step, or launch by launch.

Legend: T tokens, R wanted rows of logits, K sampled tokens, P passes, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from quire_engine.runner.inputs import StepColumns
from quire_engine.runner.logprobs import LogitsRows
from quire_engine.runner.staging import HostToDeviceBatch
from quire_engine.runner.verification import Draws
from quire_kernels.lora import TokenGroups


@dataclass(slots=True, kw_only=True)
class StagedPass:
    """A pass whose inputs are on the device, or will be."""

    token_ids: Tensor  # [T] int64
    drawn_rows: Tensor  # [K] int64
    drawn_positions: Tensor  # [K] int64
    drawn_lines: Tensor | None
    """[K] int64, the lines of logits that are sampled from; None if these are all lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSizes:
    """The largest pass of a model."""

    rows: int
    tokens: int
    logits: int
    """The tokens that have logits in a captured pass."""
    draws: int
    adapter_slots: int = 0


class Passes(Protocol):
    """The passes of a model over its caches."""

    @property
    def captured(self) -> int:
        """The number of steps that were captured so far."""
        ...

    def capture(self, captured: Callable[[], None] = lambda: None) -> None:
        """Capture steps ahead, and call ``captured`` after each."""
        ...

    def stage(
        self,
        columns: StepColumns,
        wanted: LogitsRows,
        draws: Draws,
        transfer: HostToDeviceBatch,
        *,
        adapted: TokenGroups | None = None,
    ) -> StagedPass:
        """Make the inputs of a pass; it may run once ``transfer`` is sent."""
        ...

    def run(self, staged: StagedPass) -> Tensor:
        """Issue a pass; return the logits [R, V], which are valid until the model's next one."""
        ...

    def hidden_states(self, staged: StagedPass) -> Tensor:
        """Issue a pass of a model without logits; return the hidden states [R, H] of the wanted tokens."""
        ...

    def at_once(self, staged: StagedPass) -> int:
        """Return the most passes that ``guess`` runs, the first of which is ``staged``; 0 if it cannot."""
        ...

    def guess(self, staged: StagedPass, slots: np.ndarray) -> Tensor:
        """Return the tokens [P, R] that passes sample greedily, each from those of the one before.

        slots  [P, R] int64, those of each pass
        """
        ...

    def close(self) -> None: ...
