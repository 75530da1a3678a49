"""The slots for rollouts of all LLMDeployments: a pass requests one before it replaces replicas.

``reconciler`` uses it. The store shows which LLMDeployments have a slot, so that a new leader knows it at once. Between
the decision of a pass and its write, the key is reserved.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from quire_operator.domain.cluster_state.observed import DeploymentState, Key, Resource, own_deployment
from quire_operator.domain.convergence.rollout_slots import (
    PAUSED,
    begins_rollout,
    is_own_idea,
    queued,
    takes_slot,
)
from quire_operator.domain.resource import Spec
from quire_operator.domain.status.conditions import Queued
from quire_operator.domain.status.groups import judged
from quire_operator.reconcile.store import Store

ASK_AGAIN_SECONDS = 30.0


class RolloutSlots:
    """The rollout slots. A ``limit`` of 0 means no limit."""

    def __init__(self, store: Store, *, limit: int) -> None:
        self._store, self._limit = store, limit
        self._reserved: set[Key] = set()

    def slot(
        self, resource: Resource, spec: Spec, live: DeploymentState | None, *, template_digest: str, now: float
    ) -> AbstractContextManager[Queued | None]:
        """Reserve a slot if this pass starts a rollout; the context is the reason why it must wait."""
        if spec.paused and live is not None and live.revision:  # otherwise its controller would create no replica
            return nullcontext(PAUSED)
        if live is None or not begins_rollout(live, template_digest=template_digest):
            return nullcontext()
        return self.requested(resource, now)

    @contextmanager
    def requested(self, resource: Resource, now: float) -> Iterator[Queued | None]:
        """Reserve a slot while the pass writes, or yield the reason why it has to wait."""
        if self._limit and is_own_idea(resource):
            wait = queued(self._rolling(now) - {resource.key}, self._limit)
            if wait is not None:
                yield wait
                return
        self._reserved.add(resource.key)
        try:
            yield None
        finally:
            self._reserved.discard(resource.key)

    def _rolling(self, now: float) -> set[Key]:
        rolling = set(self._reserved)
        for key in self._store.live_keys():
            resource = self._store.resource(key)
            live = None if resource is None else own_deployment(resource, self._store.children(key))
            state = judged(live, self._store.pods(key), now=now)
            if state is not None and takes_slot(state):
                rolling.add(key)
        return rolling
