"""The executor applies a plan, action by action, and records what the server has stored.

``reconciler`` calls it once per pass. The plan is decided before; the executor interprets rejections and delays repairs
of fields that other clients keep changing.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import assert_never

from quire_operator.domain.cluster_state.observed import Ref, Resource
from quire_operator.domain.cluster_state.other_autoscalers import REPLICAS, OtherAutoscaler
from quire_operator.domain.cluster_state.ownership import ForeignField
from quire_operator.domain.convergence.plan import Action, Applied, Create, Delete, Plan, RemoveFields, Update
from quire_operator.domain.convergence.plan_events import listed, refused, removed, repaired
from quire_operator.domain.manifests.child_kinds import (
    MONITORING_KINDS,
    NONBLOCKING_KINDS,
    OPTIONAL_KINDS,
    WORKLOAD_KINDS,
)
from quire_operator.domain.status.conditions import BlockingCondition
from quire_operator.domain.status.groups import unanswered_webhook
from quire_operator.domain.status.status import Event
from quire_operator.ports import Clock, Cluster, Forbidden, NotFound, QuotaExceeded, Refused, Unavailable
from quire_operator.reconcile.state import ApiRejection, ReconcileResult, ReconcileState, soonest
from quire_operator.reconcile.store import Store

logger = logging.getLogger(__name__)

_QUOTA_SECONDS, _FORBIDDEN_SECONDS, _KIND_GONE_SECONDS = 30.0, 60.0, 30.0
_WEBHOOK_SECONDS = 10.0


class Executor:
    """An executor of plans. ``record_events`` creates Events."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        store: Store,
        clock: Clock,
        record_events: Callable[[Resource, Sequence[Event]], Awaitable[None]],
    ) -> None:
        self._cluster, self._store, self._clock, self._record_events = cluster, store, clock, record_events

    async def apply(self, resource: Resource, state: ReconcileState, todo: Plan) -> ReconcileResult:
        """Apply all actions, even if some are rejected. Return the first rejection and the time of the next attempt.

        No workload is created before the children that its pods need. The rejection of such a child in a pass that read
        none may hide a foreign object with its name.
        """
        unneeded = (MONITORING_KINDS if state.is_unread else NONBLOCKING_KINDS) | {"PodDisruptionBudget"}
        is_child_missing = False
        blocking: BlockingCondition | None = None
        nonblocking: BlockingCondition | None = None
        again: float | None = None
        for action in todo.actions:
            if is_child_missing and isinstance(action, Create) and _ref(action).kind in WORKLOAD_KINDS:
                continue
            repair = _repair(state, action)
            wait = 0.0 if repair is None else state.repairs.wait_seconds(*repair, self._clock.now())
            if wait:
                again = soonest(again, wait)
                continue
            try:
                refusal = await self._try(resource, state, action, repair)
            except QuotaExceeded as error:
                refusal = BlockingCondition(reason="QuotaExceeded", message=str(error), is_passing=True)
                again = soonest(again, _QUOTA_SECONDS)
            except Forbidden as error:
                refusal = BlockingCondition(reason="Forbidden", message=str(error))
                again = soonest(again, _FORBIDDEN_SECONDS)
            except Unavailable as error:
                if (unanswered := unanswered_webhook(_ref(action), str(error))) is None:
                    raise
                refusal, again = unanswered, soonest(again, _WEBHOOK_SECONDS)
            except NotFound:
                if _ref(action).kind not in OPTIONAL_KINDS:
                    raise
                refusal, again = None, soonest(again, _KIND_GONE_SECONDS)  # its kind was removed with its CRD
            if _ref(action).kind in NONBLOCKING_KINDS or isinstance(action, Delete):
                nonblocking = nonblocking or refusal
            else:
                blocking = blocking or refusal
            if refusal is not None and isinstance(action, Create) and _ref(action).kind not in unneeded:
                is_child_missing = True
            again = soonest(again, self._until_asked_again(state, action))
        self._forget_unwanted(state, todo)
        return ReconcileResult(blocking=blocking, nonblocking=nonblocking, again_seconds=again)

    async def _try(
        self, resource: Resource, state: ReconcileState, action: Action, repair: tuple[Ref, str] | None
    ) -> BlockingCondition | None:
        """Apply one action, unless it was rejected just now: the answer would be the same."""
        place, digest = (_ref(action), type(action)), _digest(action)
        known = state.refused.get(place)
        if known is not None and known.digest == digest and known.wait_seconds(self._clock.now()):
            return refused(action, known.message)
        state.refused.pop(place, None)
        logger.info("%s: %s %s: %s", resource.key, type(action).__name__.lower(), _ref(action), action.reason)
        try:
            await self._act(resource, state, action)
        except Refused as error:
            state.refused[place] = ApiRejection(digest=digest, message=str(error), at=self._clock.now())
            return refused(action, str(error))
        if repair is not None:
            state.repairs.note(*repair, self._clock.now())
        return None

    def _until_asked_again(self, state: ReconcileState, action: Action) -> float | None:
        """Return the seconds until the next attempt; None if the action was not rejected."""
        known = state.refused.get((_ref(action), type(action)))
        return None if known is None else known.wait_seconds(self._clock.now())

    def _forget_unwanted(self, state: ReconcileState, todo: Plan) -> None:
        wanted = {(_ref(action), type(action)) for action in todo.actions}
        state.refused = {place: refusal for place, refusal in state.refused.items() if place in wanted}

    async def _act(self, resource: Resource, state: ReconcileState, action: Action) -> None:
        match action:
            case Create() | Update():
                await self._apply(resource, state, action)
            case RemoveFields(ref=ref, fields=fields):
                child = await self._cluster.remove_fields(resource.key, action)
                self._store.put_child(resource.key, child)
                await self._record_events(resource, [removed(ref, fields)])
            case Delete(ref=ref, uid=uid):
                state.applied.pop(ref, None)
                await self._cluster.delete(resource.key, ref, uid)
            case _:
                assert_never(action)

    async def _apply(self, resource: Resource, state: ReconcileState, action: Create | Update) -> None:
        key, manifest = resource.key, action.manifest
        if isinstance(action, Create):
            child = await self._cluster.create(key, manifest, must_be_new=state.is_unread)
        else:
            child = await self._cluster.update(key, manifest)
        state.applied[manifest.ref] = Applied(uid=child.uid, digest=manifest.digest, fingerprint=child.fingerprint)
        self._store.put_child(key, child)
        if isinstance(action, Update) and action.drift:
            self._note_other_autoscaler(state, action.drift)
            await self._record_events(resource, [repaired(manifest.ref, action.drift)])

    def _note_other_autoscaler(self, state: ReconcileState, drift: Sequence[ForeignField]) -> None:
        manager = next((entry.manager for entry in drift if entry.path == REPLICAS), None)
        if manager is not None:
            state.other_autoscaler = OtherAutoscaler.after(
                state.other_autoscaler, manager=manager, now=self._clock.now()
            )


def _ref(action: Action) -> Ref:
    return action.manifest.ref if isinstance(action, Create | Update) else action.ref


def _repair(state: ReconcileState, action: Action) -> tuple[Ref, str] | None:
    """Return the change of other clients that an action reverts; None if it reverts nothing."""
    ref = _ref(action)
    match action:
        case Update(is_repair=True, drift=drift):
            return ref, listed(drift)
        case RemoveFields(fields=fields):
            return ref, listed(fields)
        case Create() if ref in state.applied:
            return ref, "another client deletes it"
        case _:
            return None


def _digest(action: Action) -> str:
    """Return a digest that is equal for equal actions of one kind on one object."""
    match action:
        case Create(manifest=manifest) | Update(manifest=manifest):
            return manifest.digest
        case RemoveFields(fields=fields):
            return listed(fields)
        case Delete(uid=uid):
            return uid
        case _:
            assert_never(action)
