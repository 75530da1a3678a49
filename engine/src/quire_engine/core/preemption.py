"""The choice between the two kinds of preemption, for a running sequence whose blocks are needed.

The victim is the last in order: the lowest priority, and among equals the last to arrive. It keeps its order, so it is
the first to be admitted again.

Recompute: its blocks are released at once. When it is admitted again, it computes prompt and output so far like one
long prompt; most of it may still be in the prefix cache. Swap: its computed blocks are copied to host memory, and back
into new blocks when it is admitted again, where it continues without recomputation.
"""

from dataclasses import dataclass
from typing import Literal

from quire_engine.core.options import PreemptionMode
from quire_engine.core.preemption_cost import Costs

SwapRoom = Literal["none", "full", "enough"]
Reason = Literal["forced", "cheaper", "swap_space_full", "no_swap_space", "not_measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    kind: Literal["recompute", "swap"]
    reason: Reason

    @property
    def label(self) -> str:
        """The name in metrics."""
        return f"{self.kind}:{self.reason}"


def decide(mode: PreemptionMode, *, room: SwapRoom, costs: Costs | None) -> Preemption:
    """Return the kind of preemption of a victim. ``costs`` is None if they are not measured."""
    if mode == "recompute":
        return _recompute("forced")
    if room == "none":
        return _recompute("no_swap_space")
    if mode == "auto":
        if costs is None:
            return _recompute("not_measured")
        if costs.recompute_seconds <= costs.swap_seconds:
            return _recompute("cheaper")
    if room == "full":
        return _recompute("swap_space_full")
    return Preemption(kind="swap", reason="forced" if mode == "swap" else "cheaper")


def _recompute(reason: Reason) -> Preemption:
    return Preemption(kind="recompute", reason=reason)
