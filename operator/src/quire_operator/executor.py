"""A plan carried out, action by action: objects made, changed and deleted, and what the server makes of it remembered.

Called by ``reconcile`` once in a pass. What to do was decided before; here is what a refusal means, and that what
others keep changing is set back ever more slowly.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import assert_never

from quire_operator.domain.conditions import Blocker
from quire_operator.domain.desired import Manifest
from quire_operator.domain.observed import Key, Ref, Resource
from quire_operator.domain.ownership import ForeignField
from quire_operator.domain.plan import Action, Applied, Create, Delete, Plan, RemoveFields, Update
from quire_operator.domain.plan_news import listed, refused, removed, repaired
from quire_operator.domain.rival_scalers import REPLICAS, Contest
from quire_operator.domain.status import Event
from quire_operator.domain.surroundings import ASIDE_KINDS, OPTIONAL_KINDS
from quire_operator.memory import Memory
from quire_operator.outcome import Outcome, soonest
from quire_operator.ports import Clock, Cluster, Forbidden, NotFound, QuotaExceeded, Refused
from quire_operator.store import Store

logger = logging.getLogger(__name__)

_QUOTA_SECONDS, _FORBIDDEN_SECONDS, _KIND_GONE_SECONDS = 30.0, 60.0, 30.0


class Executor:
    """``tell`` posts events."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        store: Store,
        clock: Clock,
        tell: Callable[[Resource, Sequence[Event]], Awaitable[None]],
    ) -> None:
        self._cluster, self._store, self._clock, self._tell = cluster, store, clock, tell

    async def carry_out(self, resource: Resource, memory: Memory, todo: Plan) -> Outcome:
        """All actions, though some are refused; the first refusal, and when to try again."""
        blocker: Blocker | None = None
        aside: Blocker | None = None
        again: float | None = None
        for action in todo.actions:
            if wait := self._wait_to_repair(memory, action):
                again = soonest(again, wait)
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
                refusal, again = None, soonest(again, _KIND_GONE_SECONDS)  # its kind went with its CRD
            if _ref(action).kind in ASIDE_KINDS:
                aside = aside or refusal
            else:
                blocker = blocker or refusal
        return Outcome(blocker=blocker, aside=aside, again_seconds=again)

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


def _ref(action: Action) -> Ref:
    return action.manifest.ref if isinstance(action, Create | Update) else action.ref
