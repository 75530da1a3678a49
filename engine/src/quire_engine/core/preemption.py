"""Which running sequence gives up its blocks when there are none left, and how it comes back.

Recompute: its blocks are released at once; admitted anew, it computes prompt and output so far like one long prompt
(most of which its own prefix still holds, if nobody took those blocks meanwhile). The sequence keeps its order, so it
is the first to be admitted again.
"""

from dataclasses import dataclass
from typing import Literal

from quire_engine.core.sequence import Sequence

PreemptionMode = Literal["auto", "recompute", "swap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    kind: Literal["recompute"]
    reason: Literal["no_free_blocks"]

    @property
    def label(self) -> str:
        """As metrics name it."""
        return f"{self.kind}:{self.reason}"


def take_victim(running: list[Sequence]) -> tuple[Sequence, Preemption]:
    """Take the last in order, that is the lowest priority and of those the last to arrive, out of ``running``."""
    return running.pop(), Preemption(kind="recompute", reason="no_free_blocks")
