"""Sequence admission: whether the first waiting sequence may run now.

It needs a row, blocks for all tokens that it has to compute, and a share of the step. No sequence overtakes it.
``Scheduler`` admits the sequence that ``next`` returns; nothing here changes a sequence, a block or a row.
"""

from dataclasses import dataclass

from quire_engine.core.kv_manager import KVManager, Placement
from quire_engine.core.plan import Plan
from quire_engine.core.policy import Policy
from quire_engine.core.rows import Rows
from quire_engine.core.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A sequence that left the queue, its placement, and the number of its tokens that this step may compute."""

    sequence: Sequence
    placement: Placement
    budget: int


class AdmissionControl:
    def __init__(self, *, waiting: Policy, kv: KVManager, rows: Rows) -> None:
        self._waiting = waiting
        self._kv = kv
        self._rows = rows
        self._begun: list[Sequence] = []  # running with a part of the prompt, at the last check
        self._blocked: Sequence | None = None  # the first in the queue, if it did not fit
        self._blocked_free: list[int] = []

    def begin_step(self) -> None:
        """Forget sequences whose prompt is complete or that no longer run."""
        if self._begun:
            before, self._begun = self._begun, [sequence for sequence in self._begun if _prefills(sequence)]
            if len(self._begun) < len(before):
                self._blocked = None  # the blocks kept for them may be more than they took

    def next(self, plan: Plan, *, alone: bool, short: bool = False) -> Admitted | None:
        """Remove and return the first sequence of the queue; return None if it has to wait or the queue is empty.

        ``alone`` means that no sequence runs. With ``short`` it is admitted only if the step computes the rest of its
        prompt in the share of short prompts.
        """
        admitted = self._find(plan, alone=alone, short=short)
        if admitted is not None:
            self._waiting.pop()
        return admitted

    def short_waits(self, plan: Plan) -> bool:
        """Return whether the first in the queue may go before prompts that fill the step."""
        self.begin_step()
        return self._find(plan, alone=False, short=True) is not None

    def _find(self, plan: Plan, *, alone: bool, short: bool) -> Admitted | None:
        if plan.budget < 1 or not self._rows.any_free:
            return None
        sequence = self._waiting.first()
        if sequence is None or self.is_blocked(sequence) or sequence.num_pending:
            return None  # its last sampled token is pending since it was displaced in this step
        if not short and not plan.takes_prompts and sequence.swap_tables is None:
            return None
        placement = self._kv.place(sequence, alone=alone, begun=self._begun)
        if placement is None:
            self._blocked, self._blocked_free = sequence, self._kv.num_free()
            return None
        if short and not plan.is_short(sequence, placement.position):
            return None
        budget = plan.budget_for(sequence, placement.position, short=short)
        if budget < 1:
            return None
        return Admitted(sequence=sequence, placement=placement, budget=budget)

    def entered(self, sequence: Sequence) -> None:
        """Record an admitted sequence; its missing prompt blocks are reserved."""
        if _prefills(sequence):
            self._begun.append(sequence)

    def is_blocked(self, sequence: Sequence) -> bool:
        """Return whether the sequence did not fit before and no group has more free blocks since.

        This avoids a prefix look-up in each step.
        """
        if sequence is not self._blocked:
            return False
        return all(now <= before for now, before in zip(self._kv.num_free(), self._blocked_free, strict=True))

    def forget_blocked(self) -> None:
        """Forget the blocked sequence after the content of the cache changed."""
        self._blocked = None


def _prefills(sequence: Sequence) -> bool:
    return sequence.row is not None and sequence.num_computed < sequence.num_prefill
