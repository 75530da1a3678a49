"""The reconcile of one LLMDeployment: observe → parse → target → desired → plan → apply → status.

It stands between the work queue, which calls ``reconcile(key)`` whenever something about the key changed, and
``ports.Cluster``. The domain decides, and this module defines the order. ``executor`` applies the plan, ``reporting``
writes the status. It is level-triggered: every pass starts from the observed state, so a pass may stop between any two
writes and start again in this process or another.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from quire_common.contract.adapters_file import AdapterEntry
from quire_common.served_names import Claim, NameScope
from quire_operator.domain.autoscaling.history import ScalingRecord
from quire_operator.domain.autoscaling.schedules import recorded_bounds
from quire_operator.domain.canary.record import SECTION as ROLLOUT
from quire_operator.domain.canary.record import read as read_record
from quire_operator.domain.cluster_state.observed import (
    LEADER_WORKER_SET,
    Child,
    Key,
    Ref,
    Resource,
    own_deployment,
)
from quire_operator.domain.cluster_state.other_autoscalers import following_replicas
from quire_operator.domain.convergence.plan import plan
from quire_operator.domain.convergence.plan_events import name_conflicts
from quire_operator.domain.convergence.target import Target, target
from quire_operator.domain.convergence.victims import deletion_costs
from quire_operator.domain.manifests.cluster_features import ClusterFeatures
from quire_operator.domain.manifests.desired import all_problems, child_refs, desired
from quire_operator.domain.manifests.objects import Manifests
from quire_operator.domain.manifests.pod_template import Images
from quire_operator.domain.manifests.served_names import wanted_claim
from quire_operator.domain.resource import Invalid, Spec
from quire_operator.domain.status.cache_check import cache_refusal
from quire_operator.domain.status.conditions import BlockingCondition, MetricsProblem, last_metrics_problem
from quire_operator.domain.status.download import Download
from quire_operator.domain.status.groups import UNSETTLED_SECONDS, is_settled, missing_kind
from quire_operator.domain.status.model_status import Resolution, model_section, stored_resolution, with_revision
from quire_operator.domain.status.scaling_status import kept_replicas, scaling_record, scaling_sections
from quire_operator.ports import (
    Clock,
    Cluster,
    ClusterError,
    Conflict,
    Forbidden,
    NotFound,
    NotLeading,
    QuotaExceeded,
    Refused,
    ScalingNotDone,
    Throttled,
    Unavailable,
)
from quire_operator.reconcile.canaries import Canaries
from quire_operator.reconcile.capacity_check import CHECK_AGAIN_SECONDS, CapacityCheck, Finding
from quire_operator.reconcile.departures import Departures
from quire_operator.reconcile.executor import Executor
from quire_operator.reconcile.groups import Groups
from quire_operator.reconcile.image_volumes import images_for
from quire_operator.reconcile.model_revisions import ModelRevisions
from quire_operator.reconcile.reporting import Reporter
from quire_operator.reconcile.rollout_slots import ASK_AGAIN_SECONDS, RolloutSlots
from quire_operator.reconcile.served_name_claims import ServedNameClaims
from quire_operator.reconcile.state import REFUSED_SECONDS, Persist, ReconcileResult, ReconcileState, soonest
from quire_operator.reconcile.store import Store
from quire_operator.reconcile.tracks import Basis, Chosen, TrackRenderer

logger = logging.getLogger(__name__)

CONFLICT_SECONDS = 30.0
"""The interval at which a taken name is checked: the object that has it is not watched."""
_PASSING_SECONDS = 2.0
_GONE_SECONDS = 5.0
_THROTTLED_SECONDS, _NOT_LEADING_SECONDS = 1.0, 1.0
_PERSIST_SECONDS = 10.0
_MAX_CONFLICTS = 5


def retry_after(error: Exception) -> float | None:
    """Return the seconds until a pass that failed with this error is retried; None leaves it to the backoff."""
    match error:
        case Conflict():
            return 0.1
        case Throttled(after_seconds=seconds):
            return _THROTTLED_SECONDS if seconds is None else seconds
        case NotFound():
            return _GONE_SECONDS
        case NotLeading():
            return _NOT_LEADING_SECONDS
        case _:
            return None


class Reconciler:
    """The reconciler of all LLMDeployments. Only passes write: decisions of the autoscaler wait for the next pass."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        store: Store,
        clock: Clock,
        images: Images,
        enqueue: Callable[[Key], None],
        cluster_domain: str = "cluster.local",
        features: Callable[[], ClusterFeatures] = ClusterFeatures,
        capacity: CapacityCheck | None = None,
        revisions: ModelRevisions | None = None,
        max_concurrent_rollouts: int = 0,
        download: Callable[[Key], Download | None] = lambda key: None,
        canaries: Canaries | None = None,
        adapters: Callable[[Key], Sequence[AdapterEntry]] = lambda key: (),
        adapter_claims: Callable[[str], Sequence[Claim]] = lambda name: (),
    ) -> None:
        """``adapters`` returns what the replicas of an LLMDeployment are to serve; it may raise ``ClusterError``."""
        self._cluster, self._store, self._images, self._enqueue = cluster, store, images, enqueue
        self._download, self._adapters = download, adapters
        self._tracks = TrackRenderer(
            cluster=cluster,
            store=store,
            clock=clock,
            canaries=canaries,
            features=features,
            requested_name=self.requested_name,
        )
        self._reporter = Reporter(
            cluster=cluster, store=store, clock=clock, cluster_domain=cluster_domain, download=download
        )
        self._executor = Executor(cluster=cluster, store=store, clock=clock, record_events=self._reporter.record_events)
        self._clock = clock
        self._features, self._capacity = features, capacity
        self._groups = Groups(cluster)
        self._claims = ServedNameClaims(store, enqueue, adapter_claims)
        self._departures = Departures(cluster=cluster, store=store, enqueue=enqueue, features=features)
        self._slots = RolloutSlots(store, limit=max_concurrent_rollouts)
        self._revisions = revisions or ModelRevisions(None)
        self._states: dict[Key, ReconcileState] = {}

    def forget(self) -> None:
        """Forget the reconcile states, because another process may have written since."""
        self._states.clear()
        self._claims.forget()

    async def persist(self, key: Key, record: ScalingRecord) -> None:
        """Have the next pass write this record, and return afterwards. Raises ``ScalingNotDone``."""
        resource = self._store.resource(key)
        if resource is None:
            raise ScalingNotDone(f"{key} is gone")
        waiting = Persist(record=record, done=asyncio.get_running_loop().create_future())
        self._state_of(resource).persist = waiting
        self._enqueue(key)
        try:
            async with asyncio.timeout(_PERSIST_SECONDS):
                await waiting.done
        except TimeoutError:
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

    def served_name_conflict(self, key: Key) -> str | None:
        """Return why requests for its served name go to another LLMDeployment; None if they come to this one."""
        return self._claims.conflict(self._store.claim(key), self._features().served_names)

    def requested_name(self, key: Key) -> str | None:
        """Return the model name with which gateways send requests here; None if they send none."""
        claim, scope = self._store.claim(key), self._features().served_names or NameScope.CLUSTER
        return None if claim is None or self.served_name_conflict(key) is not None else claim.requested_as(scope)

    async def reconcile(self, key: Key) -> float | None:
        """Run one pass. Return the seconds until the next one is due, or None. Raises ``ClusterError`` for a retry."""
        self._claims.check(key)
        resource = self._store.resource(key)
        if resource is None or resource.deleting:
            gone = self._states.pop(key, None)
            if gone is not None:
                gone.give_up_persisting(f"{key} is gone")
            await self._departures.depart(key)  # the garbage collector deletes the children
            return None
        state = self._state_of(resource)
        try:
            again = await self._pass(resource, state)
            self._claims.check(key)
        except Conflict as error:
            state.give_up_persisting(str(error))
            state.conflicts += 1
            await self._read_again(key, state)
            raise
        except ClusterError as error:
            state.give_up_persisting(str(error))
            raise
        state.conflicts = 0
        return again

    async def _read_again(self, key: Key, state: ReconcileState) -> None:
        """Read the resource again: the watch is late or broken, and the retry must not wait for it."""
        if (latest := await self._cluster.read_resource(key)) is not None:
            self._store.put_resource(latest)
        if state.conflicts > _MAX_CONFLICTS:
            raise Unavailable(f"{key}: {state.conflicts} conflicts in a row")

    async def _pass(self, resource: Resource, state: ReconcileState) -> float | None:
        spec = Spec.parse(resource.body)
        if isinstance(spec, Invalid):
            state.give_up_persisting("the spec is invalid")
            result = ReconcileResult(blocking=BlockingCondition.invalid(all_problems(spec, self._images)))
            return await self._report(resource, state, None, result)
        result = await self._converge(resource, state, spec)
        wait = await self._report(self._latest(resource), state, spec, result)
        wait = soonest(self._until_read_again(resource, spec, result), wait)
        return soonest(self._next_change(self._latest(resource), spec), soonest(result.again_seconds, wait))

    def _until_read_again(self, resource: Resource, spec: Spec, result: ReconcileResult) -> float | None:
        """Return in how many seconds a LeaderWorkerSet has to be read again; None if its groups are as requested."""
        if not spec.parallelism.is_group or result.blocking is not None:
            return None
        live = own_deployment(resource, self._store.children(resource.key))
        return UNSETTLED_SECONDS if live is None or not is_settled(live) else None

    def _next_change(self, resource: Resource, spec: Spec) -> float | None:
        """Return in how many seconds a schedule may change the bounds."""
        if spec.autoscaling is None:
            return None
        now = self._clock.now()
        change = recorded_bounds(spec.autoscaling, scaling_record(resource.status), now).next_change
        return None if change is None else change - now

    async def _converge(self, resource: Resource, state: ReconcileState, spec: Spec) -> ReconcileResult:
        key, features = resource.key, self._features()
        children = await self._children(key, spec, features)
        goal = _goal(resource, state, spec, children, now=self._clock.now())
        if spec.only_recommends:
            children, state.other_autoscaler = following_replicas(children), None
        await self._persist(resource, state, spec, goal)
        resolution = await self._resolve(self._latest(resource), state, spec)
        spec = with_revision(spec, resolution)

        def rendered(images: Images, spec: Spec = spec, replicas: int = goal.replicas) -> Manifests | Invalid:
            return desired(
                spec,
                replicas,
                uid=resource.uid,
                images=images,
                created=resource.created,
                features=features,
                adapters=() if spec.engine.adapters is None else self._adapters(key),
            )

        try:
            images = await images_for(self._cluster, self._images, resource, spec, children, rendered)
            manifests = rendered(images)
        except (Refused, QuotaExceeded, Forbidden) as error:
            rejected = BlockingCondition(
                reason="InvalidSpec" if isinstance(error, Refused) else type(error).__name__,
                message=f"the API server rejected a dry run of the Deployment with an image volume: {error}",
                is_passing=isinstance(error, QuotaExceeded),
            )
            return ReconcileResult(blocking=rejected, target=goal.replicas, again_seconds=REFUSED_SECONDS)
        if isinstance(manifests, Invalid):
            return ReconcileResult(blocking=BlockingCondition.invalid(manifests.problems), target=goal.replicas)

        chosen = await self._choose(
            self._latest(resource),
            state,
            Basis(spec=spec, manifests=manifests, images=images, rendered=rendered),
            children,
            goal,
            "" if resolution is None else resolution.revision or "",
        )
        if isinstance(chosen, ReconcileResult):
            return chosen
        goal, children, manifests, tracked = chosen.goal, chosen.children, chosen.manifests, chosen.tracked
        result = await self._apply(resource, state, tracked.main, goal, manifests, children)
        if tracked.window is not None:
            wait = max(0.0, tracked.window - self._clock.now())
            result = replace(result, again_seconds=soonest(wait, result.again_seconds))
        return replace(result, target=goal.replicas, tracked=tracked)

    async def _apply(
        self,
        resource: Resource,
        state: ReconcileState,
        spec: Spec,
        goal: Target,
        manifests: Manifests,
        children: Mapping[Ref, Child],
    ) -> ReconcileResult:
        key = resource.key
        refused, unshared = cache_refusal(resource, spec)
        refused = refused or missing_kind(spec, self._features())
        if refused is not None:
            return ReconcileResult(blocking=refused)
        found = await self._fits(resource, spec, children)
        if found.blocking is not None:
            return ReconcileResult(blocking=found.blocking, again_seconds=CHECK_AGAIN_SECONDS)
        unprepared = await self._groups.prepare(resource, state, manifests, self._store.all_pods(key))
        if unprepared is not None:
            return ReconcileResult(blocking=unprepared, again_seconds=REFUSED_SECONDS)
        live = own_deployment(resource, children)
        with self._slots.slot(
            resource, spec, live, template_digest=manifests.template_digest, now=self._clock.now()
        ) as queued:
            applied = manifests if queued is None else manifests.held()
            todo = plan(applied, children, state.applied, name=key.name, uid=resource.uid)
            await self._mark_victims(key, state, goal.replicas)
            result = await self._executor.apply(resource, state, todo)
        if queued is not None and not spec.paused:
            wait = ASK_AGAIN_SECONDS if queued.until is None else max(0.0, queued.until - self._clock.now())
            result = replace(result, again_seconds=soonest(wait, result.again_seconds))
        if todo.conflicts:
            blocking, beside = name_conflicts(todo.conflicts)
            again = _PASSING_SECONDS if any(c.passing for c in todo.conflicts) else CONFLICT_SECONDS
            result = replace(
                result,
                blocking=blocking or result.blocking,
                nonblocking=beside or result.nonblocking,
                again_seconds=again if blocking else soonest(again, result.again_seconds),
            )
        nonblocking = result.nonblocking or found.nonblocking or unshared
        return replace(result, additions=todo.additions, nonblocking=nonblocking, queued=queued)

    async def _choose(
        self,
        resource: Resource,
        state: ReconcileState,
        basis: Basis,
        children: Mapping[Ref, Child],
        goal: Target,
        model_revision: str,
    ) -> Chosen | ReconcileResult:
        """Return the spec and the manifests to apply, which strategy Canary changes; persist how far it got."""
        tracked = self._tracks.decide(resource, basis, children, replicas=goal.replicas, model_revision=model_revision)
        if isinstance(tracked, BlockingCondition):
            return ReconcileResult(blocking=tracked, target=goal.replicas)
        if tracked.record is not None and tracked.record != read_record(resource.status):
            # Before it is applied, so that a successor goes on from it. Figures alone can wait.
            wanted = {**resource.status, ROLLOUT: tracked.section}
            await self._reporter.write_status(resource, state, basis.spec, wanted)
        goal = tracked.held_up(goal, own_deployment(resource, children))
        manifests = self._tracks.render(resource, basis, tracked, replicas=goal.replicas)
        if isinstance(manifests, Invalid):
            blocking = BlockingCondition.invalid(manifests.problems)
            return ReconcileResult(blocking=blocking, target=goal.replicas, tracked=tracked)
        others = await self._tracks.unwatched(resource.key, tracked, children)
        return Chosen(tracked=tracked, manifests=manifests, goal=goal, children={**children, **others})

    async def _fits(self, resource: Resource, spec: Spec, children: Mapping[Ref, Child]) -> Finding:
        if self._capacity is None:
            return Finding()
        return await self._capacity.check(resource, spec, own_deployment(resource, children))

    async def _children(self, key: Key, spec: Spec, features: ClusterFeatures) -> Mapping[Ref, Child]:
        """Return the stored children and those that no watch shows.

        No watch shows objects without our label, objects of other owners, those just created, and LeaderWorkerSets.
        """
        children = dict(self._store.children(key))
        for ref in child_refs(spec, features):
            known = children.get(ref)
            if known is not None and ref.kind != LEADER_WORKER_SET:
                continue
            try:
                child = await self._cluster.read_child(key, ref)
            except Forbidden:
                continue  # it may not be created either, which the executor reports
            if child is not None:
                children[ref] = child
            if ref.kind == LEADER_WORKER_SET:
                # Optional kinds are listed at long intervals, and pods show that this one has changed.
                self._remember(key, known, child)
                if child is None:
                    children.pop(ref, None)
        return children

    def _remember(self, key: Key, known: Child | None, child: Child | None) -> None:
        """Store a child that was read, or that it is gone."""
        if child is not None and child.owner is not None and child.owner.name == key.name:
            self._store.put_child(key, child)
        elif child is None and known is not None:
            self._store.drop_child(key, known.ref, known.uid)

    async def _persist(self, resource: Resource, state: ReconcileState, spec: Spec, goal: Target) -> None:
        """Write the decision before it is applied, so that a successor applies the same after a crash."""
        if spec.autoscaling is None:
            state.give_up_persisting("it has a fixed number of replicas")
            return
        handed_in = state.persist
        if handed_in is not None:
            record = handed_in.record
        elif goal.persist is not None:
            record = replace(scaling_record(resource.status) or ScalingRecord(), desired_replicas=goal.persist)
        else:
            return
        wanted = {**resource.status, **scaling_sections(record, spec, now=self._clock.now())}
        await self._reporter.write_status(resource, state, spec, wanted)
        if handed_in is not None and state.persist is handed_in:
            state.persist = None
            handed_in.settle(None)

    async def _resolve(self, resource: Resource, state: ReconcileState, spec: Spec) -> Resolution | None:
        """Return the resolution of a moving model source.

        It is stored before pods get it, so that a crash changes nothing.
        """
        resolution = await self._revisions.resolution(resource, spec)
        if resolution is not None and resolution != stored_resolution(resource, spec):
            key = resource.key
            section = model_section(resolution, spec, self._store.pods(key), self._download(key))
            await self._reporter.write_status(resource, state, spec, {**resource.status, "model": section})
        return resolution

    async def _mark_victims(self, key: Key, state: ReconcileState, replicas: int) -> None:
        pods = [pod for pod in self._store.pods(key) if not pod.group]  # LeaderWorkerSets ignore the cost
        if state.victims and replicas < sum(not pod.deleting for pod in pods):
            try:
                await self._cluster.set_deletion_costs(key, deletion_costs(pods, state.victims))
            except (Refused, Forbidden) as error:  # Kubernetes then chooses the pods; scaling down matters more
                logger.warning("%s: could not set pod-deletion-cost of %s: %s", key, ", ".join(state.victims), error)
        state.victims = ()

    async def _report(
        self, resource: Resource, state: ReconcileState, spec: Spec | None, result: ReconcileResult
    ) -> float | None:
        state.claim = wanted_claim(resource, known=state.claim, now=self._clock.now())
        rival = self._claims.conflict(state.claim, self._features().served_names)
        return await self._reporter.report(resource, state, spec, result, rival=rival)

    def _latest(self, resource: Resource) -> Resource:
        """Return the resource after a status write of this pass, if there was one: same generation, newer version."""
        latest = self._store.resource(resource.key)
        same = latest is not None and (latest.uid, latest.generation) == (resource.uid, resource.generation)
        return latest if latest is not None and same else resource

    def _state_of(self, resource: Resource) -> ReconcileState:
        state = self._states.get(resource.key)
        if state is None or state.uid != resource.uid:
            state = ReconcileState(uid=resource.uid, metrics_problem=last_metrics_problem(resource.status))
            self._states[resource.key] = state
        return state


def _goal(
    resource: Resource, state: ReconcileState, spec: Spec, children: Mapping[Ref, Child], *, now: float
) -> Target:
    record = scaling_record(resource.status)
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
