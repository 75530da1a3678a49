"""The preemption of running sequences when others need their blocks or rows, the last in order first.

``Scheduler`` decides for which sequence; ``preemption`` decides the kind. The victim returns to the queue, where its
order makes it the first again.
"""

from collections.abc import Callable

from quire_engine.core.admission import Rows
from quire_engine.core.forks import ParkedChildren
from quire_engine.core.kv_manager import KVManager
from quire_engine.core.options import PreemptionMode
from quire_engine.core.plan import Plan
from quire_engine.core.policy import Policy
from quire_engine.core.preemption import Preemption, decide
from quire_engine.core.preemption_cost import MeasuredRates
from quire_engine.core.sequence import Sequence


class Preemptor:
    """A preemptor. ``running`` is the scheduler's own list, in order; ``counted`` is called for every preemption."""

    def __init__(
        self,
        mode: PreemptionMode,
        *,
        running: list[Sequence],
        waiting: Policy,
        parked: ParkedChildren,
        kv: KVManager,
        rows: Rows,
        rates: MeasuredRates,
        counted: Callable[[Preemption], None],
    ) -> None:
        self._mode = mode
        self._running, self._waiting, self._parked = running, waiting, parked
        self._kv, self._rows, self._rates, self._counted = kv, rows, rates, counted

    def make_room(self, sequence: Sequence, end: int, plan: Plan) -> bool:
        """Extend block tables to ``end``, and preempt later sequences for it.

        Return False if the sequence itself was preempted.
        """
        while not self._kv.extend(sequence, end):
            assert len(self._running) > 1 or self._running[-1] is not sequence, "alone it should have been refused"
            victim = self.preempt_last()
            plan.admits = False
            if victim is sequence:
                return False
        return True

    def preempt_last(self) -> Sequence:
        """Preempt and return the last running sequence: release its row and blocks, and put it back into the queue."""
        victim = self._running.pop()
        loss = self._kv.prepare_to_lose(victim)
        preemption = decide(self._mode, room=self._kv.swap_room(loss.blocks_out), costs=self._rates.costs(loss))
        if preemption.kind == "swap":
            self._kv.swap_out(victim, loss.blocks_out)
        else:
            victim.num_lost = victim.num_computed
            victim.num_prefill = max(victim.num_prefill, victim.num_lost)
            self._kv.release(victim)
        self._rows.take_back(victim)
        self._parked.preempted(victim)
        victim.num_preemptions += 1
        self._waiting.push(victim)
        self._counted(preemption)
        return victim
