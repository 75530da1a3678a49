"""Whether the first in the queue may run now: a row, blocks for all it has to compute, and a share of the step.

Nobody overtakes it. ``Scheduler`` lets in whom ``next`` names; nothing here changes a sequence, a block or a row.
"""

from dataclasses import dataclass

from quire_engine.core.kv_manager import KVManager, Placement
from quire_engine.core.plan import Plan
from quire_engine.core.policy import Policy
from quire_engine.core.rows import Rows
from quire_engine.core.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Who left the queue, where it goes on, and how many tokens this step may compute of it."""

    sequence: Sequence
    placement: Placement
    budget: int


class AdmissionControl:
    def __init__(self, *, waiting: Policy, kv: KVManager, rows: Rows) -> None:
        self._waiting = waiting
        self._kv = kv
        self._rows = rows
        self._begun: list[Sequence] = []  # running with a part of the prompt, when this was last looked at
        self._blocked: Sequence | None = None  # the first in the queue, when it did not fit
        self._blocked_free: list[int] = []

    def begin_step(self) -> None:
        """Forget those that have their whole prompt by now, or run no more."""
        if self._begun:
            before, self._begun = self._begun, [sequence for sequence in self._begun if _prefills(sequence)]
            if len(self._begun) < len(before):
                self._blocked = None  # what was kept for them may be more than they took

    def next(self, plan: Plan, *, alone: bool, short: bool = False) -> Admitted | None:
        """Take the first sequence from the queue; return None if it has to wait, or if the queue is empty.

        ``alone`` means that no sequence runs. With ``short`` it may only go if the step computes the rest of its prompt
        in the share of short ones.
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
            return None  # its last draw is under way where it was displaced in this very step
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
        """It runs, with its first chunk planned: what it still lacks is kept for it."""
        if _prefills(sequence):
            self._begun.append(sequence)

    def is_blocked(self, sequence: Sequence) -> bool:
        """Whether it did not fit before and no group has more free since; saves looking up its prefix each step."""
        if sequence is not self._blocked:
            return False
        return all(now <= before for now, before in zip(self._kv.num_free(), self._blocked_free, strict=True))

    def look_anew(self) -> None:
        """What can be found in the cache has changed."""
        self._blocked = None


def _prefills(sequence: Sequence) -> bool:
    return sequence.row is not None and sequence.num_computed < sequence.num_prefill
