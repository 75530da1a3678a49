"""Deferral of long prompts: within a step's bound on time, short prompts that wait go before those that do not fit."""

from quire_engine.core.admission import AdmissionControl
from quire_engine.core.kv_manager import KVManager
from quire_engine.core.plan import Plan
from quire_engine.core.sequence import Sequence
from quire_engine.core.stall_bound import StallBound


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
