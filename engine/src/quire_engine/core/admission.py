"""Sequence admission: whether the first waiting sequence may run now.

It needs a row, blocks for all tokens that it has to compute, and a share of the step. No sequence overtakes it.
``Scheduler`` admits the sequence that ``next`` returns; nothing here changes a sequence, a block or a row.
"""

from dataclasses import dataclass

from quire_engine.core.adapter_slots import AdapterSlots
from quire_engine.core.kv_manager import KVManager, Placement
from quire_engine.core.plan import Plan
from quire_engine.core.policy import Policy
from quire_engine.core.sequence import Sequence
from quire_engine.core.stall_bound import StallBound


class Rows:
    """The free rows, those returned since the previous step, and the slots for adapters."""

    def __init__(self, count: int, slots: AdapterSlots) -> None:
        self._count = count
        self._slots = slots
        self._free = list(range(count - 1, -1, -1))
        self._released: list[int] = []

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def assign(self, sequence: Sequence) -> None:
        """Give a row to a sequence, and a slot to its adapter; both must be free."""
        sequence.row = self._free.pop()
        sequence.adapter_slot = self._slots.acquire(sequence.request.adapter)

    def take_back(self, sequence: Sequence) -> None:
        """Take the row of a sequence that no longer runs, and leave its slot.

        It may be assigned again in the same step, because the runner releases before it admits.
        """
        assert sequence.row is not None
        self._released.append(sequence.row)
        self._free.append(sequence.row)
        sequence.row = None
        self._slots.release(sequence.request.adapter)

    def take_released(self) -> list[int]:
        """Return and clear the released rows, for the next batch."""
        released, self._released = self._released, []
        return released

    def check_integrity(self, held: list[int]) -> None:
        assert sorted([*held, *self._free]) == list(range(self._count)), "rows are lost or held twice"


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


class PromptDeferral:
    """The chunks of running prompts. Without a ``stall_bound`` none is deferred."""

    def __init__(self, *, stall_bound: StallBound | None, kv: KVManager, admission: AdmissionControl) -> None:
        self._stall_bound = stall_bound
        self._kv = kv
        self._admission = admission

    def bound_step(self, plan: Plan, running: list[Sequence]) -> None:
        """Set the bound on the time of a step of the running sequences."""
        bound = self._stall_bound
        if bound is None:
            return
        decoding = any(sequence.decodes for sequence in running)
        seconds = bound.max_seconds if decoding else bound.alone_seconds
        if seconds is not None:
            plan.bound, plan.bound_seconds = bound, seconds

    def chunk(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        """Return how many tokens of a running prompt to compute now; 0 defers it, or omits it from this step."""
        count = plan.chunk(sequence, min(budget, self._kv.max_chunk))
        if plan.bound is None:
            return count
        fits = count == sequence.num_tokens - sequence.num_computed
        if plan.deferred or (not fits and self._short_waits(plan, budget)):
            plan.deferred.append(sequence)
            return 0
        return count

    def _short_waits(self, plan: Plan, budget: int) -> bool:
        """Return whether prompts that do not fit completely into this step let a short waiting one go first."""
        if plan.short_waits is None:
            plan.budget = budget
            plan.short_waits = self._admission.short_waits(plan)
        return plan.short_waits

    def serve_deferred(self, plan: Plan) -> None:
        """Give the deferred prompts the rest of the step. This preempts no other sequence of the plan."""
        for sequence in plan.deferred:
            if sequence.row is None:
                continue  # preempted by one that was served
            count = plan.chunk(sequence, min(plan.budget, self._kv.max_chunk))
            if count >= 1 and self._kv.extend(sequence, sequence.num_computed + count):
                plan.add_chunk(sequence, count)
