"""One LLMDeployment brought to what its spec asks: observe → parse → target → desired → plan → apply → status.

Between the work queue, which calls ``reconcile(key)`` whenever anything about the key changed, and ``ports.Cluster``.
The decisions are the domain's; here is only their order. Level-triggered: every pass starts from what is there, so that
it may be cut off between any two writes and begun again by this process or another.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from quire_operator.capacity_check import LOOK_AGAIN_SECONDS, CapacityCheck, Finding
from quire_operator.domain.conditions import Blocker, MetricsProblem, View, problem_told
from quire_operator.domain.desired import Manifest, all_problems, child_refs, desired
from quire_operator.domain.history import ScalingRecord
from quire_operator.domain.model_volume import wants_image_volume
from quire_operator.domain.observed import Child, Key, Ref, Resource, own_deployment
from quire_operator.domain.ownership import ForeignField
from quire_operator.domain.plan import Action, Applied, Create, Delete, Plan, RemoveFields, Update, plan
from quire_operator.domain.plan_news import listed, name_conflicts, refused, removed, repaired
from quire_operator.domain.pod_template import Images
from quire_operator.domain.repairs import STATUS
from quire_operator.domain.rival_scalers import REPLICAS, Contest, following_replicas
from quire_operator.domain.scaling_status import scaling_record, scaling_sections
from quire_operator.domain.spec import AutoscalingMode, Invalid, Spec
from quire_operator.domain.status import Event, events, status
from quire_operator.domain.surroundings import ASIDE_KINDS, OPTIONAL_KINDS, Surroundings
from quire_operator.domain.target import Target, target
from quire_operator.domain.victims import deletion_costs
from quire_operator.memory import Memory, Persist
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
from quire_operator.rivals import Rivals
from quire_operator.store import Store

logger = logging.getLogger(__name__)

CONFLICT_SECONDS = 30.0
"""How often a name that is taken is looked at: the object that has it is not watched."""
_PASSING_SECONDS = 2.0
_QUOTA_SECONDS, _FORBIDDEN_SECONDS, _GONE_SECONDS, _KIND_GONE_SECONDS = 30.0, 60.0, 5.0, 30.0
_THROTTLED_SECONDS, _NOT_LEADING_SECONDS = 1.0, 1.0
_PERSIST_SECONDS = 10.0
_MAX_CONFLICTS = 5


def retry_after(error: Exception) -> float | None:
    """After how many seconds a pass that ended with this error is tried again; None leaves it to the backoff."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What one pass came to."""

    blocker: Blocker | None = None
    aside: Blocker | None = None
    """The same of what replicas serve without."""
    target: int | None = None
    additions: tuple[ForeignField, ...] = ()
    again_seconds: float | None = None


class Reconciler:
    """Only a pass writes: what the autoscaler decides is handed in, and its key enqueued."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        store: Store,
        clock: Clock,
        images: Images,
        enqueue: Callable[[Key], None],
        cluster_domain: str = "cluster.local",
        around: Callable[[], Surroundings] = Surroundings,
        capacity: CapacityCheck | None = None,
    ) -> None:
        self._cluster, self._store, self._clock = cluster, store, clock
        self._images, self._enqueue, self._cluster_domain = images, enqueue, cluster_domain
        self._around, self._rivals, self._capacity = around, Rivals(store, enqueue), capacity
        self._memory: dict[Key, Memory] = {}

    def forget(self) -> None:
        """Another process may have written: nothing that was known of our own writes holds."""
        self._memory.clear()
        self._rivals.forget()

    async def persist(self, key: Key, record: ScalingRecord) -> None:
        """Have the next pass write this record; returns when it has. Raises ``ScalingNotDone``."""
        resource = self._store.resource(key)
        if resource is None:
            raise ScalingNotDone(f"{key} is gone")
        waiting = Persist(record=record, done=asyncio.get_running_loop().create_future())
        self._memory_of(resource).persist = waiting
        self._enqueue(key)
        try:
            async with asyncio.timeout(_PERSIST_SECONDS):
                await waiting.done
        except TimeoutError:
            raise ScalingNotDone(f"the status was not written within {_PERSIST_SECONDS:g} s") from None

    def scale(self, key: Key, *, replicas: int, victims: Sequence[str]) -> None:
        """Have the next pass go to so many replicas; ``victims`` are pods, first to go first."""
        if (memory := self._memory.get(key)) is not None:
            memory.decided, memory.victims = replicas, tuple(victims)
            self._enqueue(key)

    def note_metrics(self, key: Key, problem: MetricsProblem | None) -> None:
        """Why the autoscaler holds; None while it has what it needs."""
        memory = self._memory.get(key)
        if memory is not None and memory.metrics_problem != problem:
            memory.metrics_problem = problem
            self._enqueue(key)

    def served_name_conflict(self, key: Key) -> str | None:
        """Why requests for its served name go to another LLMDeployment; None if they come to this one."""
        return self._rivals.conflict(key) if self._around().unique_served_names else None

    async def reconcile(self, key: Key) -> float | None:
        """One pass. After how many seconds it wants another; raises ``ClusterError`` to be tried again."""
        self._rivals.look(key)
        resource = self._store.resource(key)
        if resource is None or resource.deleting:
            gone = self._memory.pop(key, None)  # the garbage collector does the rest
            if gone is not None:
                gone.give_up_persisting(f"{key} is gone")
            return None
        memory = self._memory_of(resource)
        try:
            again = await self._pass(resource, memory)
        except Conflict as error:
            memory.give_up_persisting(str(error))
            memory.conflicts += 1
            await self._look_again(key, memory)
            raise
        except ClusterError as error:
            memory.give_up_persisting(str(error))
            raise
        memory.conflicts = 0
        return again

    async def _look_again(self, key: Key, memory: Memory) -> None:
        """What is there is not what we know: the watch is late, or dead, and must not be waited for."""
        if (latest := await self._cluster.read_resource(key)) is not None:
            self._store.put_resource(latest)
        if memory.conflicts > _MAX_CONFLICTS:
            raise Unavailable(f"{key}: {memory.conflicts} conflicts in a row")

    async def _pass(self, resource: Resource, memory: Memory) -> float | None:
        spec = Spec.parse(resource.body)
        if isinstance(spec, Invalid):
            memory.give_up_persisting("the spec is invalid")
            outcome = _Outcome(blocker=Blocker.invalid(all_problems(spec, self._images)))
            return await self._report(resource, memory, None, outcome)
        outcome = await self._converge(resource, memory, spec)
        self._rivals.look(resource.key)
        wait = await self._report(self._latest(resource), memory, spec, outcome)
        return _soonest(outcome.again_seconds, wait)

    async def _converge(self, resource: Resource, memory: Memory, spec: Spec) -> _Outcome:
        key, around = resource.key, self._around()
        children = await self._children(key, spec, around)
        goal = _goal(resource, memory, spec, children)
        if _only_recommends(spec):
            children, memory.contest = following_replicas(children), None
        await self._persist(resource, memory, spec, goal)
        images = await self._images_for(key, spec)
        manifests = desired(
            spec, goal.replicas, uid=resource.uid, images=images, created=resource.created, around=around
        )
        if isinstance(manifests, Invalid):
            return _Outcome(blocker=Blocker.invalid(manifests.problems), target=goal.replicas)
        found = await self._fits(resource, spec, children)
        if found.blocker is not None:
            return _Outcome(blocker=found.blocker, target=goal.replicas, again_seconds=LOOK_AGAIN_SECONDS)
        todo = plan(manifests, children, memory.applied, name=key.name, uid=resource.uid)
        await self._mark_victims(key, memory, goal.replicas)
        outcome = await self._carry_out(resource, memory, todo)
        if todo.conflicts:
            blocking, beside = name_conflicts(todo.conflicts)
            again = _PASSING_SECONDS if any(c.passing for c in todo.conflicts) else CONFLICT_SECONDS
            outcome = replace(
                outcome,
                blocker=blocking or outcome.blocker,
                aside=beside or outcome.aside,
                again_seconds=again if blocking else _soonest(again, outcome.again_seconds),
            )
        aside = outcome.aside or found.aside
        return replace(outcome, target=goal.replicas, additions=todo.additions, aside=aside)

    async def _fits(self, resource: Resource, spec: Spec, children: Mapping[Ref, Child]) -> Finding:
        if self._capacity is None:
            return Finding()
        return await self._capacity.look(resource, spec, own_deployment(resource, children))

    async def _images_for(self, key: Key, spec: Spec) -> Images:
        """With what only the cluster knows of them, asked for where a spec needs it."""
        if self._images.image_volumes is not None or not wants_image_volume(spec):
            return self._images
        return replace(self._images, image_volumes=await self._cluster.takes_image_volumes(key))

    async def _children(self, key: Key, spec: Spec, around: Surroundings) -> Mapping[Ref, Child]:
        """Also those that no watch shows: without a label of ours, theirs or ours, or just made."""
        children = dict(self._store.children(key))
        for ref in child_refs(spec, around):
            if ref not in children and (child := await self._cluster.read_child(key, ref)) is not None:
                children[ref] = child
        return children

    async def _persist(self, resource: Resource, memory: Memory, spec: Spec, goal: Target) -> None:
        """Write what was decided before it is acted upon, so that whoever comes after a crash acts upon the same."""
        if spec.autoscaling is None:
            memory.give_up_persisting("it has a fixed number of replicas")
            return
        handed_in = memory.persist
        if handed_in is not None:
            record = handed_in.record
        elif goal.persist is not None:
            record = replace(scaling_record(resource.status) or ScalingRecord(), desired_replicas=goal.persist)
        else:
            return
        await self._write_status(resource, memory, {**resource.status, **scaling_sections(record, spec)})
        if handed_in is not None and memory.persist is handed_in:
            memory.persist = None
            handed_in.settle(None)

    async def _mark_victims(self, key: Key, memory: Memory, replicas: int) -> None:
        pods = self._store.pods(key)
        if memory.victims and replicas < sum(not pod.deleting for pod in pods):
            await self._cluster.set_deletion_costs(key, deletion_costs(pods, memory.victims))
        memory.victims = ()

    async def _carry_out(self, resource: Resource, memory: Memory, todo: Plan) -> _Outcome:
        """All actions, though some are refused; the first refusal, and when to try again."""
        blocker: Blocker | None = None
        aside: Blocker | None = None
        again: float | None = None
        for action in todo.actions:
            if wait := self._wait_to_repair(memory, action):
                again = _soonest(again, wait)
                continue
            try:
                refusal = await self._act(resource, memory, action)
            except QuotaExceeded as error:
                refusal, again = Blocker(reason="QuotaExceeded", message=str(error)), _QUOTA_SECONDS
            except Forbidden as error:
                refusal, again = Blocker(reason="Forbidden", message=str(error)), _FORBIDDEN_SECONDS
            except NotFound:
                if _ref(action).kind not in OPTIONAL_KINDS:
                    raise
                refusal, again = None, _soonest(again, _KIND_GONE_SECONDS)  # its kind went with its CRD
            if _ref(action).kind in ASIDE_KINDS:
                aside = aside or refusal
            else:
                blocker = blocker or refusal
        return _Outcome(blocker=blocker, aside=aside, again_seconds=again)

    async def _act(self, resource: Resource, memory: Memory, action: Action) -> Blocker | None:
        match action:
            case Create(manifest=manifest) | Update(manifest=manifest):
                return await self._apply(resource, memory, manifest, action)
            case RemoveFields(ref=ref, fields=fields):
                self._note(resource.key, action)
                child = await self._cluster.remove_fields(resource.key, action)
                self._store.put_child(resource.key, child)
                await self._tell(resource, [removed(ref, fields)])
                return None
            case Delete(ref=ref, uid=uid):
                self._note(resource.key, action)
                memory.applied.pop(ref, None)
                await self._cluster.delete(resource.key, ref, uid)
                return None
            case _:
                assert_never(action)

    async def _apply(
        self, resource: Resource, memory: Memory, manifest: Manifest, action: Create | Update
    ) -> Blocker | None:
        key, ref, digest = resource.key, manifest.ref, manifest.digest
        known = memory.refused.get(ref)
        if known is not None and known[0] == digest:
            return refused(ref, known[1])
        self._note(key, action)
        try:
            apply = self._cluster.create if isinstance(action, Create) else self._cluster.update
            child = await apply(key, manifest)
        except Refused as error:
            memory.refused[ref] = (digest, str(error))
            return refused(ref, str(error))
        memory.refused.pop(ref, None)
        memory.applied[ref] = Applied(uid=child.uid, digest=digest, fingerprint=child.fingerprint)
        self._store.put_child(key, child)
        if isinstance(action, Update) and action.drift:
            self._note_contest(memory, action.drift)
            await self._tell(resource, [repaired(ref, action.drift)])
        return None

    def _wait_to_repair(self, memory: Memory, action: Action) -> float:
        """How long an action that sets back what others did has to wait; one that needs not is noted as done."""
        ref = _ref(action)
        match action:
            case Update(is_repair=True, drift=drift):
                what = listed(drift)
            case RemoveFields(fields=fields):
                what = listed(fields)
            case Create() if ref in memory.applied:
                what = "somebody deletes it"
            case _:
                return 0.0
        now = self._clock.now()
        wait = memory.repairs.wait_seconds(ref, what, now)
        if not wait:
            memory.repairs.note(ref, what, now)
        return wait

    def _note_contest(self, memory: Memory, drift: Sequence[ForeignField]) -> None:
        manager = next((entry.manager for entry in drift if entry.path == REPLICAS), None)
        if manager is not None:
            memory.contest = Contest.after(memory.contest, manager=manager, now=self._clock.now())

    def _note(self, key: Key, action: Action) -> None:
        logger.info("%s: %s %s: %s", key, type(action).__name__.lower(), _ref(action), action.reason)

    async def _report(self, resource: Resource, memory: Memory, spec: Spec | None, outcome: _Outcome) -> float | None:
        """Say in status what there is and what came of this pass; how long to wait where others write it too."""
        now = self._clock.now()
        view = View(
            spec=spec,
            blocker=outcome.blocker,
            target=outcome.target,
            deployment=own_deployment(resource, self._store.children(resource.key)),
            pods=self._store.pods(resource.key),
            additions=outcome.additions,
            contested=memory.contest.manager if memory.contest is not None and memory.contest.is_on(now) else None,
            metrics_problem=memory.metrics_problem,
            fought_over=memory.repairs.contests(now),
            aside=outcome.aside,
            rival=self.served_name_conflict(resource.key),
        )
        wanted = status(resource, view, cluster_domain=self._cluster_domain, now=now)
        if memory.status is not None and memory.status[0] == wanted and memory.status[1] != resource.status != wanted:
            if wait := memory.repairs.wait_seconds(STATUS, "", now):
                return wait
            memory.repairs.note(STATUS, "", now)
        await self._write_status(resource, memory, wanted)
        return None

    async def _write_status(self, resource: Resource, memory: Memory, wanted: Mapping[str, object]) -> None:
        """The only write of a status; none when it is what it should be, or what the server makes of that."""
        if wanted == resource.status or memory.status == (wanted, resource.status):
            return
        written = await self._cluster.write_status(resource, wanted)
        self._store.put_resource(written)
        memory.status = (wanted, written.status)
        await self._tell(resource, events(resource.status, wanted))

    async def _tell(self, resource: Resource, news: Sequence[Event]) -> None:
        for event in news:
            try:
                await self._cluster.tell(resource, event)
            except NotLeading:
                raise
            except ClusterError as error:
                logger.warning("%s: the event %s could not be posted: %s", resource.key, event.reason, error)

    def _latest(self, resource: Resource) -> Resource:
        """As our own status write left it, if there was one in this pass: same generation, newer version."""
        latest = self._store.resource(resource.key)
        same = latest is not None and (latest.uid, latest.generation) == (resource.uid, resource.generation)
        return latest if latest is not None and same else resource

    def _memory_of(self, resource: Resource) -> Memory:
        memory = self._memory.get(resource.key)
        if memory is None or memory.uid != resource.uid:
            memory = Memory(uid=resource.uid, metrics_problem=problem_told(resource.status))
            self._memory[resource.key] = memory
        return memory


def _only_recommends(spec: Spec) -> bool:
    return spec.autoscaling is not None and spec.autoscaling.mode is AutoscalingMode.RECOMMEND


def _goal(resource: Resource, memory: Memory, spec: Spec, children: Mapping[Ref, Child]) -> Target:
    record = scaling_record(resource.status)
    goal = target(spec, decided=memory.decided, record=record, deployment=own_deployment(resource, children))
    if spec.autoscaling is None or _only_recommends(spec):
        memory.decided, memory.victims = None, ()
    elif memory.decided is None:
        # From here on only ``scale`` changes it: what ``persist`` writes is acted upon when ``scale`` says so.
        memory.decided = goal.replicas
    return goal


def _ref(action: Action) -> Ref:
    return action.manifest.ref if isinstance(action, Create | Update) else action.ref


def _soonest(one: float | None, other: float | None) -> float | None:
    return min((seconds for seconds in (one, other) if seconds is not None), default=None)
