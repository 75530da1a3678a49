"""The decisions of the autoscaler between the tick that hands them in and the pass that applies them.

Only passes write, so that a successor finds each decision in the status before it is applied.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from quire_operator.api import Spec
from quire_operator.autoscaling.history import ScalingNotDone, ScalingRecord
from quire_operator.autoscaling.schedules import recorded_bounds
from quire_operator.deployment.conditions import MetricsProblem
from quire_operator.deployment.plan import Target, deletion_costs, target
from quire_operator.deployment.report import Reporter
from quire_operator.deployment.state import Persist, ReconcileState, ReconcileStates
from quire_operator.deployment.status import kept_replicas, scaling_record, scaling_sections
from quire_operator.deployment.store import Cluster
from quire_operator.kube.errors import Forbidden, Refused
from quire_operator.kube.objects import Child, Key, Ref, Resource, own_deployment

logger = logging.getLogger(__name__)

_PERSIST_SECONDS = 10.0


class PendingScaling:
    """The decisions that wait for the next pass of their LLMDeployment."""

    def __init__(self, cluster: Cluster, *, states: ReconcileStates, reporter: Reporter) -> None:
        self._kube, self._store, self._clock = cluster.kube, cluster.store, cluster.clock
        self._enqueue = cluster.enqueue
        self._states, self._reporter = states, reporter

    async def persist(self, key: Key, record: ScalingRecord) -> None:
        """Have the next pass write this record, and return afterwards. Raises ``ScalingNotDone``."""
        resource = self._store.resource(key)
        if resource is None:
            raise ScalingNotDone(f"{key} is gone")
        waiting = Persist(record=record, done=asyncio.get_running_loop().create_future())
        self._states.of(resource).persist = waiting
        self._enqueue(key)
        try:
            async with asyncio.timeout(_PERSIST_SECONDS):
                await waiting.done
        except TimeoutError:
            state = self._states.get(key)
            if state is not None and state.persist is waiting:
                state.persist = None  # the next tick decides again, and a late pass must not write this record
            raise ScalingNotDone(f"the status was not written within {_PERSIST_SECONDS:g} s") from None

    def scale(self, key: Key, *, replicas: int, victims: Sequence[str]) -> None:
        """Have the next pass scale to ``replicas``; ``victims`` are the pods to remove, in this order."""
        if (state := self._states.get(key)) is not None:
            state.decided, state.victims = replicas, tuple(victims)
            self._enqueue(key)

    def note_metrics(self, key: Key, problem: MetricsProblem | None) -> None:
        """Report why the autoscaler holds; None if its metrics are complete."""
        state = self._states.get(key)
        if state is not None and state.metrics_problem != problem:
            state.metrics_problem = problem
            self._enqueue(key)

    def target(self, resource: Resource, state: ReconcileState, spec: Spec, children: Mapping[Ref, Child]) -> Target:
        record, now = scaling_record(resource.status), self._clock()
        goal = target(
            spec,
            decided=state.decided,
            record=record,
            deployment=own_deployment(resource, children),
            kept=kept_replicas(resource.status, spec),
            now=now,
        )
        if spec.autoscaling is None or spec.only_recommends:
            state.decided, state.victims = None, ()
        elif state.decided is None:
            # From here on only ``scale`` changes it: what ``persist`` writes is applied when ``scale`` is called.
            state.decided = goal.replicas
        else:
            # A minimum that applied for a while leaves its replicas to the autoscaler, which removes them step by step.
            state.decided = recorded_bounds(spec.autoscaling, record, now).clamp(state.decided)
        return goal

    async def write(
        self, resource: Resource, state: ReconcileState, spec: Spec, goal: Target, sections: Mapping[str, object]
    ) -> None:
        """Write the decision and the other ``sections`` of the status before they are applied, as one write."""
        handed_in, record, now = state.persist, None, self._clock()
        if spec.autoscaling is None:
            state.give_up_persisting("it has a fixed number of replicas")
        elif handed_in is not None:
            record = _within_bounds(handed_in.record, spec, now=now)
        elif goal.persist is not None:
            record = replace(scaling_record(resource.status) or ScalingRecord(), desired_replicas=goal.persist)
        decided = {} if record is None else scaling_sections(record, spec, now=now)
        if decided or sections:
            await self._reporter.write_status(resource, state, spec, {**resource.status, **decided, **sections})
        if handed_in is not None and state.persist is handed_in:
            state.persist = None
            handed_in.settle(None)

    async def mark_victims(self, key: Key, state: ReconcileState, replicas: int) -> None:
        """Have Kubernetes remove the chosen pods first when it scales down to ``replicas``."""
        pods = [pod for pod in self._store.pods(key) if not pod.group]  # LeaderWorkerSets ignore the cost
        if state.victims and replicas < sum(not pod.deleting for pod in pods):
            try:
                await self._kube.set_deletion_costs(key, deletion_costs(pods, state.victims))
            except (Refused, Forbidden) as error:  # Kubernetes then chooses the pods; scaling down matters more
                logger.warning("%s: could not set pod-deletion-cost of %s: %s", key, ", ".join(state.victims), error)
        state.victims = ()


def _within_bounds(record: ScalingRecord, spec: Spec, *, now: float) -> ScalingRecord:
    """Return a record that was handed in, with a number of replicas that the spec of this pass allows.

    The autoscaler may have decided by an earlier spec, and the record outlives this one.
    """
    if spec.autoscaling is None or spec.only_recommends or record.desired_replicas is None:
        return record
    bounds = recorded_bounds(spec.autoscaling, record, now)
    return replace(record, desired_replicas=bounds.clamp(record.desired_replicas))
