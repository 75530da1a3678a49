"""The reconcile of one LLMDeployment: observe → parse → target → desired → plan → apply → status.

Pure modules decide, and this one defines the order. It is level-triggered: every pass starts from the observed state,
so a pass may stop between any two writes and start again in this process or another.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from quire_common.contract.adapters_file import AdapterEntry
from quire_common.served_names import Claim
from quire_operator.api import HubSource, Invalid, Spec
from quire_operator.autoscaling.schedules import recorded_bounds
from quire_operator.canary.controller import Basis, Canaries, Chosen, TrackRenderer
from quire_operator.canary.progress import SECTION as ROLLOUT
from quire_operator.canary.progress import read as read_record
from quire_operator.canary.tracks import Tracked
from quire_operator.capacity.check import CHECK_AGAIN_SECONDS, CapacityCheck, Finding
from quire_operator.capacity.hub import HubReader
from quire_operator.capacity.judge import is_let_in
from quire_operator.deployment.apply import Executor, prepare_groups
from quire_operator.deployment.conditions import BlockingCondition, cache_refusal
from quire_operator.deployment.desired import POLICY, all_problems, desired
from quire_operator.deployment.download import Download
from quire_operator.deployment.groups import UNSETTLED_SECONDS, is_settled, missing_kind
from quire_operator.deployment.manifests import ClusterFeatures, Manifests
from quire_operator.deployment.observe import observed_children
from quire_operator.deployment.plan import Delete, Target, Update, departure, name_conflicts, plan
from quire_operator.deployment.pod_template import Images
from quire_operator.deployment.repairs import following_replicas
from quire_operator.deployment.report import Reporter
from quire_operator.deployment.rollout_slots import ASK_AGAIN_SECONDS, RolloutSlots
from quire_operator.deployment.scaling import PendingScaling
from quire_operator.deployment.served_names import wanted_claim
from quire_operator.deployment.state import (
    REFUSED_SECONDS,
    ReconcileResult,
    ReconcileState,
    ReconcileStates,
    rejection,
    soonest,
)
from quire_operator.deployment.status import (
    Resolution,
    model_section,
    needs_resolution,
    scaling_record,
    stored_resolution,
    with_revision,
)
from quire_operator.deployment.store import Cluster, ServedNameClaims
from quire_operator.deployment.volumes import image_field, image_problem
from quire_operator.kube.errors import (
    ClusterError,
    Conflict,
    Forbidden,
    NotFound,
    NotLeading,
    QuotaExceeded,
    Refused,
    Throttled,
    Unavailable,
)
from quire_operator.kube.objects import Child, DeploymentState, Key, Ref, Resource, own_deployment

logger = logging.getLogger(__name__)

CONFLICT_SECONDS = 30.0
"""The interval at which a taken name is checked: the object that has it is not watched."""
_PASSING_SECONDS = 2.0
_GONE_SECONDS = 5.0
_THROTTLED_SECONDS, _NOT_LEADING_SECONDS = 1.0, 1.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    images: Images
    cluster_domain: str = "cluster.local"
    max_concurrent_rollouts: int = 0
    """0 means no limit."""
    features: Callable[[], ClusterFeatures] = ClusterFeatures


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The sources of a pass in addition to the cluster; a pass goes on without the answer of one that is absent."""

    capacity: CapacityCheck | None = None
    hub: HubReader | None = None
    canaries: Canaries | None = None
    download: Callable[[Key], Download | None] = lambda key: None
    adapters: Callable[[Key], Sequence[AdapterEntry]] = lambda key: ()
    """Returns what the replicas of an LLMDeployment are to serve. It may raise ``ClusterError``."""
    adapter_claims: Callable[[str], Sequence[Claim]] = lambda name: ()


class Reconciler:
    """The reconciler of all LLMDeployments. Only passes write."""

    def __init__(self, cluster: Cluster, options: Options, sources: Sources = Sources()) -> None:
        self._cluster, self._kube, self._store, self._clock = cluster, cluster.kube, cluster.store, cluster.clock
        self._options, self._features, self._sources = options, options.features, sources
        self._states = ReconcileStates()
        self.served_names = ServedNameClaims(
            cluster.store, cluster.enqueue, lambda: options.features().served_names, sources.adapter_claims
        )
        self._tracks = TrackRenderer(
            cluster,
            canaries=sources.canaries,
            features=options.features,
            requested_name=self.served_names.requested_name,
        )
        self._reporter = Reporter(cluster, cluster_domain=options.cluster_domain, download=sources.download)
        self.scaling = PendingScaling(cluster, states=self._states, reporter=self._reporter)
        self._executor = Executor(cluster, record_events=self._reporter.record_events)
        self._slots = RolloutSlots(cluster.store, limit=options.max_concurrent_rollouts)

    def forget(self) -> None:
        """Forget the reconcile states, because another process may have written since."""
        self._states.clear()
        self.served_names.forget()

    async def reconcile(self, key: Key) -> float | None:
        """Run one pass. Return the seconds until the next one is due, or None. Raises ``ClusterError`` for a retry."""
        self.served_names.check(key)
        resource = self._store.resource(key)
        if resource is None or resource.deleting:
            gone = self._states.pop(key, None)
            if gone is not None:
                gone.give_up_persisting(f"{key} is gone")
            await self._depart(key)  # the garbage collector deletes the children
            return None
        state = self._states.of(resource)
        try:
            again = await self._pass(resource, state)
            self.served_names.check(key)
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

    async def _depart(self, key: Key) -> None:
        """Hand over what a deleted LLMDeployment left behind to its last pods; its absence is read first."""
        if self._left_behind(key) is None:
            return
        latest = await self._kube.read_resource(key)
        if latest is not None and not latest.deleting:
            self._store.put_resource(latest)
            self._cluster.enqueue(key)
            return
        todo = self._left_behind(key)
        if todo is not None:
            logger.info("%s: %s %s: %s", key, type(todo).__name__.lower(), POLICY.ref(key.name), todo.reason)
        if isinstance(todo, Update):
            self._store.put_child(key, await self._kube.update(key, todo.manifest))
        elif todo is not None:
            await self._kube.delete(key, todo.ref, todo.uid)

    def _left_behind(self, key: Key) -> Update | Delete | None:
        return departure(key, self._store.children(key), self._store.all_pods(key), self._features())

    async def _read_again(self, key: Key, state: ReconcileState) -> None:
        """Read the resource again: the watch is late or broken, and the retry must not wait for it."""
        if (latest := await self._kube.read_resource(key)) is not None:
            self._store.put_resource(latest)
        if state.conflicts > _MAX_CONFLICTS:
            raise Unavailable(f"{key}: {state.conflicts} conflicts in a row")

    async def _pass(self, resource: Resource, state: ReconcileState) -> float | None:
        spec = Spec.parse(resource.body)
        if isinstance(spec, Invalid):
            state.give_up_persisting("the spec is invalid")
            result = ReconcileResult(blocking=BlockingCondition.invalid(all_problems(spec, self._options.images)))
            return await self._report(resource, state, None, result)
        result = await self._converge(resource, state, spec)
        if state.is_unread and result.blocking is None:
            # The next pass writes the first status. It follows at once, but after the first passes of others: when many
            # are created together, their pods do not wait for statuses that would soon change.
            return 0.0
        wait = await self._report(self._latest(resource), state, spec, result)
        changes_in = self._next_change(self._latest(resource), spec)
        return soonest(wait, self._until_read_again(resource, spec, result), changes_in, result.again_seconds)

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
        now = self._clock()
        change = recorded_bounds(spec.autoscaling, scaling_record(resource.status), now).next_change
        return None if change is None else change - now

    async def _converge(self, resource: Resource, state: ReconcileState, spec: Spec) -> ReconcileResult:
        key, features = resource.key, self._features()
        # Of a new LLMDeployment, nothing exists yet. If something has the name of a child all the same, its creation
        # fails, and the next pass reads it. A dry run for image volumes comes earlier, so specs with them read first.
        state.passes += 1
        state.is_unread = state.passes == 1 and not resource.status and image_field(spec) is None
        children = await observed_children(self._cluster, key, spec, features, is_unread=state.is_unread)
        goal = self.scaling.target(resource, state, spec, children)
        if spec.only_recommends:
            children, state.other_autoscaler = following_replicas(children), None
        resolution = await self._resolved(resource, spec)
        sections = self._new_resolution(resource, spec, resolution)
        spec = with_revision(spec, resolution)
        chosen = await self._choose(
            resource, spec, children, goal, "" if resolution is None else resolution.revision or ""
        )
        if chosen.tracked is not None:
            sections |= self._new_record(resource, chosen.tracked)
        # Before anything is applied, so that a successor goes on from it after a crash.
        await self.scaling.write(self._latest(resource), state, spec, goal, sections)
        if isinstance(chosen, ReconcileResult):
            return chosen
        result, tracked = await self._apply(resource, state, spec, chosen), chosen.tracked
        return replace(result, target=chosen.goal.replicas, tracked=tracked)

    async def _apply(self, resource: Resource, state: ReconcileState, spec: Spec, chosen: Chosen) -> ReconcileResult:
        """Check and apply what was chosen. ``spec`` is that of the resource."""
        key, main, canary = resource.key, chosen.tracked.main, chosen.tracked.canary
        manifests, children = chosen.manifests, chosen.children
        judged = canary or main
        # A stable spec that is not that of the resource was let in with an earlier generation.
        was_let_in = judged is not spec or is_let_in(resource)
        refused, unshared = cache_refusal(judged, was_let_in=was_let_in)
        refused = refused or missing_kind(judged, self._features())
        if refused is not None:
            return ReconcileResult(blocking=refused)
        there = own_deployment(resource, children, of_canary=canary is not None)
        found = await self._fits(key, judged, there if was_let_in else None)
        if found.blocking is not None:
            return ReconcileResult(blocking=found.blocking, again_seconds=CHECK_AGAIN_SECONDS)
        unprepared = await prepare_groups(self._kube, resource, state, manifests, self._store.all_pods(key))
        if unprepared is not None:
            return ReconcileResult(blocking=unprepared, again_seconds=REFUSED_SECONDS)
        live = own_deployment(resource, children)
        with self._slots.slot(
            resource, main, live, template_digest=manifests.template_digest, now=self._clock()
        ) as queued:
            applied = manifests if queued is None else manifests.held()
            todo = plan(applied, children, state.applied, name=key.name, uid=resource.uid)
            await self.scaling.mark_victims(key, state, chosen.goal.replicas)
            result = await self._executor.apply(resource, state, todo)
        if state.is_unread and state.refused:
            # Perhaps it rejected the change of an object that has the name of a child: the next pass reads it.
            result = result.again_within(_PASSING_SECONDS)
        if queued is not None and not main.paused:
            result = result.again_within(ASK_AGAIN_SECONDS)
        if todo.conflicts:
            blocking, beside = name_conflicts(todo.conflicts)
            again = _PASSING_SECONDS if any(c.passing for c in todo.conflicts) else CONFLICT_SECONDS
            result = replace(
                result.again_within(again),
                blocking=blocking or result.blocking,
                nonblocking=beside or result.nonblocking,
            )
        nonblocking = result.nonblocking or found.nonblocking or unshared
        return replace(result, additions=todo.additions, nonblocking=nonblocking, queued=queued)

    async def _choose(
        self, resource: Resource, spec: Spec, children: Mapping[Ref, Child], goal: Target, model_revision: str
    ) -> Chosen | ReconcileResult:
        """Return the specs and the manifests to apply, or the reason why nothing can be applied."""
        key, features = resource.key, self._features()

        def rendered(images: Images, spec: Spec = spec, replicas: int = goal.replicas) -> Manifests | Invalid:
            return desired(
                spec,
                replicas,
                uid=resource.uid,
                images=images,
                created=resource.created,
                features=features,
                adapters=() if spec.engine.adapters is None else self._sources.adapters(key),
            )

        manifests = rendered(self._options.images)
        if isinstance(manifests, Invalid):
            return ReconcileResult(blocking=BlockingCondition.invalid(manifests.problems), target=goal.replicas)
        if (unmounted := await self._image_refusal(resource, spec, children, manifests)) is not None:
            return ReconcileResult(blocking=unmounted, target=goal.replicas, again_seconds=REFUSED_SECONDS)
        basis = Basis(spec=spec, manifests=manifests, images=self._options.images, rendered=rendered)
        resource = self._latest(resource)
        tracked = self._tracks.decide(resource, basis, children, replicas=goal.replicas, model_revision=model_revision)
        if isinstance(tracked, BlockingCondition):
            return ReconcileResult(blocking=tracked, target=goal.replicas)
        goal = tracked.held_up(goal, own_deployment(resource, children))
        whole = self._tracks.render(resource, basis, tracked, replicas=goal.replicas)
        if isinstance(whole, Invalid):
            blocking = BlockingCondition.invalid(whole.problems)
            return ReconcileResult(blocking=blocking, target=goal.replicas, tracked=tracked)
        others = await self._tracks.unwatched(key, tracked, children)
        return Chosen(tracked=tracked, manifests=whole, goal=goal, children={**children, **others})

    async def _image_refusal(
        self, resource: Resource, spec: Spec, children: Mapping[Ref, Child], manifests: Manifests
    ) -> BlockingCondition | None:
        """Return why no pod can mount the image of a model; None if pods can, or if the spec names no image."""
        field = image_field(spec)
        there = children.get(Ref("Deployment", resource.key.name))
        is_taken = there is not None and (there.owner is None or there.owner.uid != resource.uid)
        if field is None or is_taken:
            return None  # a taken name is reported before anything is applied
        try:
            if await self._kube.takes_image_volumes(resource.key, manifests.trial):
                return None
        except (Refused, QuotaExceeded, Forbidden) as error:
            return rejection("a dry run of the Deployment with an image volume", error)
        return BlockingCondition.invalid([image_problem(field)])

    async def _resolved(self, resource: Resource, spec: Spec) -> Resolution | None:
        """Return the resolution of the model's source; None if pods get the source as it is.

        The hub is asked once for each source. If it does not answer, that delays one pass and the next ones not at all.
        """
        if not needs_resolution(spec):
            return None
        if (stored := stored_resolution(resource, spec)) is not None:
            return stored
        if self._sources.hub is None:
            return None
        assert isinstance(spec.model.source, HubSource)
        revision = await self._sources.hub.commit(spec.model.source)
        return Resolution(source=str(spec.model.source), revision=revision, refresh=resource.refresh_model)

    async def _fits(self, key: Key, spec: Spec, applied: DeploymentState | None) -> Finding:
        capacity = self._sources.capacity
        return Finding() if capacity is None else await capacity.check(key, spec, applied)

    def _new_resolution(self, resource: Resource, spec: Spec, found: Resolution | None) -> dict[str, object]:
        """Return the section of the status with the resolution of a moving model source, if it is new."""
        if found is None or found == stored_resolution(resource, spec):
            return {}
        return {
            "model": model_section(found, spec, self._store.pods(resource.key), self._sources.download(resource.key))
        }

    def _new_record(self, resource: Resource, tracked: Tracked) -> dict[str, object]:
        """Return the section of the status with the progress of a canary, if it is new. Figures alone can wait."""
        is_new = tracked.record is not None and tracked.record != read_record(self._latest(resource).status)
        return {ROLLOUT: tracked.section} if is_new else {}

    async def _report(
        self, resource: Resource, state: ReconcileState, spec: Spec | None, result: ReconcileResult
    ) -> float | None:
        state.claim = wanted_claim(resource, known=state.claim, now=self._clock())
        rival = self.served_names.conflict(state.claim)
        return await self._reporter.report(resource, state, spec, result, rival=rival)

    def _latest(self, resource: Resource) -> Resource:
        """Return the resource after a status write of this pass, if there was one: same generation, newer version."""
        latest = self._store.resource(resource.key)
        if latest is None or (latest.uid, latest.generation) != (resource.uid, resource.generation):
            return resource
        return latest
