"""The execution of a plan against the API server, one action after another.

The executor interprets rejections and delays repairs of fields that other clients keep changing. Replicas that are
groups of pods also need a Secret, which is created and never read, so that the operator needs no permission to see
Secrets.
"""

import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import assert_never

from quire_operator.deployment.conditions import BlockingCondition
from quire_operator.deployment.desired import (
    MONITORING_KINDS,
    NONBLOCKING_KINDS,
    OPTIONAL_KINDS,
    WORKLOAD_KINDS,
    group_secret_name,
)
from quire_operator.deployment.groups import unanswered_webhook
from quire_operator.deployment.manifests import Manifest, Manifests, labels, owner_reference
from quire_operator.deployment.plan import (
    Action,
    Applied,
    Create,
    Delete,
    Plan,
    RemoveFields,
    Update,
    listed,
    refused,
    removed,
    repaired,
)
from quire_operator.deployment.pod_template import GROUP_SECRET_KEY
from quire_operator.deployment.repairs import REPLICAS, OtherAutoscaler
from quire_operator.deployment.state import ApiRejection, ReconcileResult, ReconcileState, rejection, soonest
from quire_operator.deployment.status import Event
from quire_operator.deployment.store import Cluster
from quire_operator.kube.client import KubeClient
from quire_operator.kube.errors import Forbidden, NotFound, QuotaExceeded, Refused, Unavailable
from quire_operator.kube.objects import Pod, Ref, Resource
from quire_operator.kube.ownership import ForeignField

_SECRET_BYTES = 32


async def prepare_groups(
    kube: KubeClient, resource: Resource, state: ReconcileState, manifests: Manifests, workers: Sequence[Pod]
) -> BlockingCondition | None:
    """Create the Secret of this revision and try its template. Return why the groups cannot be created, or None.

    ``workers`` show whether the Secret was deleted. Raises ``ClusterError``.
    """
    name = group_secret_name(manifests)
    if name is None:
        return None
    try:
        if state.tried_template != manifests.template_digest:
            what = "a dry run of the pods of this spec"
            await kube.check_template(resource.key, manifests.trial)
            state.tried_template = manifests.template_digest
        if state.group_secret != name or any(_lacks(pod, name) for pod in workers):
            what = f"Secret {name}, which the pods of a group share"
            await kube.create_secret(resource.key, _secret(resource, name))
            state.group_secret = name
    except (Refused, QuotaExceeded, Forbidden) as error:
        return rejection(what, error)
    return None


def _lacks(pod: Pod, secret: str) -> bool:
    """Return True if a container waits for this Secret."""
    return any(secret in c.waiting_message and "not found" in c.waiting_message for c in pod.containers)


def _secret(resource: Resource, name: str) -> Manifest:
    body: dict[str, object] = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "namespace": resource.key.namespace,
            "labels": labels(resource.key.name),
            "ownerReferences": [owner_reference(resource.key.name, resource.uid)],
        },
        "type": "Opaque",
        "immutable": True,
        "stringData": {GROUP_SECRET_KEY: secrets.token_urlsafe(_SECRET_BYTES)},
    }
    return Manifest(ref=Ref("Secret", name), body=body)


logger = logging.getLogger(__name__)

_QUOTA_SECONDS, _FORBIDDEN_SECONDS, _KIND_GONE_SECONDS = 30.0, 60.0, 30.0
_WEBHOOK_SECONDS = 10.0


class Executor:
    """An executor of plans. ``record_events`` creates Events."""

    def __init__(self, cluster: Cluster, record_events: Callable[[Resource, Sequence[Event]], Awaitable[None]]) -> None:
        self._kube, self._store, self._clock = cluster.kube, cluster.store, cluster.clock
        self._record_events = record_events

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
            wait = 0.0 if repair is None else state.repairs.wait_seconds(*repair, self._clock())
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
        if known is not None and known.digest == digest and known.wait_seconds(self._clock()):
            return refused(action, known.message)
        state.refused.pop(place, None)
        logger.info("%s: %s %s: %s", resource.key, type(action).__name__.lower(), _ref(action), action.reason)
        try:
            await self._act(resource, state, action)
        except Refused as error:
            state.refused[place] = ApiRejection(digest=digest, message=str(error), at=self._clock())
            return refused(action, str(error))
        if repair is not None:
            state.repairs.note(*repair, self._clock())
        return None

    def _until_asked_again(self, state: ReconcileState, action: Action) -> float | None:
        """Return the seconds until the next attempt; None if the action was not rejected."""
        known = state.refused.get((_ref(action), type(action)))
        return None if known is None else known.wait_seconds(self._clock())

    def _forget_unwanted(self, state: ReconcileState, todo: Plan) -> None:
        wanted = {(_ref(action), type(action)) for action in todo.actions}
        state.refused = {place: refusal for place, refusal in state.refused.items() if place in wanted}

    async def _act(self, resource: Resource, state: ReconcileState, action: Action) -> None:
        match action:
            case Create() | Update():
                await self._apply(resource, state, action)
            case RemoveFields(ref=ref, fields=fields):
                child = await self._kube.remove_fields(resource.key, action)
                self._store.put_child(resource.key, child)
                await self._record_events(resource, [removed(ref, fields)])
            case Delete(ref=ref, uid=uid):
                state.applied.pop(ref, None)
                await self._kube.delete(resource.key, ref, uid)
            case _:
                assert_never(action)

    async def _apply(self, resource: Resource, state: ReconcileState, action: Create | Update) -> None:
        key, manifest = resource.key, action.manifest
        if isinstance(action, Create):
            child = await self._kube.create(key, manifest, must_be_new=state.is_unread)
        else:
            child = await self._kube.update(key, manifest)
        state.applied[manifest.ref] = Applied(uid=child.uid, digest=manifest.digest, fingerprint=child.fingerprint)
        self._store.put_child(key, child)
        if isinstance(action, Update) and action.drift:
            self._note_other_autoscaler(state, action.drift)
            await self._record_events(resource, [repaired(manifest.ref, action.drift)])

    def _note_other_autoscaler(self, state: ReconcileState, drift: Sequence[ForeignField]) -> None:
        manager = next((entry.manager for entry in drift if entry.path == REPLICAS), None)
        if manager is not None:
            state.other_autoscaler = OtherAutoscaler.after(state.other_autoscaler, manager=manager, now=self._clock())


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
