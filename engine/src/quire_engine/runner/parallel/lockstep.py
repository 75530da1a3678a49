"""Rank 0's runner on GPUs: all ranks run and sample each step, so that every GPU has the tokens for the next one.

The logits have the same bits on all ranks, and sampling depends on them, the seed and the position only. So no token is
sent between GPUs, and a step may begin before the host knows the tokens of the one before.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_engine.core.batch import Batch, TokenMasks
from quire_engine.core.ports import ForwardPass, PendingOutput, Runner

if TYPE_CHECKING:
    from quire_engine.runner.parallel.group import RankGroup


class LockstepRunner:
    """A ``core.ports.Runner`` that lets the other ranks run and sample each batch too."""

    def __init__(self, runner: Runner, group: "RankGroup") -> None:
        self._runner = runner
        self._group = group

    def execute(self, batch: Batch) -> "LockstepForward":
        self._group.send(batch)
        return LockstepForward(self._runner.execute(batch), self._group)

    def close(self) -> None:
        self._group.close()
        self._runner.close()


@dataclass(frozen=True, slots=True)
class LockstepForward:
    """A ``core.ports.ForwardPass`` of all ranks."""

    forward: ForwardPass
    group: "RankGroup"

    @property
    def token_ids(self) -> list[int]:
        return self.forward.token_ids

    def sample(self, masks: TokenMasks | None = None) -> PendingOutput:
        """Let all ranks sample."""
        self.group.sample(masks)
        return self.forward.sample(masks)
