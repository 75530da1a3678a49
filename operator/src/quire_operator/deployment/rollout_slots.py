"""The slots for rollouts of all LLMDeployments: a pass requests one before it replaces replicas.

The store shows which LLMDeployments have a slot, so that a new leader knows it at once. Between the decision of a pass
and its write, the key is reserved.
"""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from quire_operator.api import Spec
from quire_operator.capacity.judge import is_refused
from quire_operator.deployment.conditions import Queued, is_overdue
from quire_operator.deployment.groups import judged
from quire_operator.deployment.store import Store
from quire_operator.kube.objects import DeploymentState, Key, Resource, own_deployment

_SHOWN = 5


def begins_rollout(live: DeploymentState, *, template_digest: str) -> bool:
    """Return whether applying a template with this digest starts a rollout, unless one is already in progress."""
    # A new Deployment has no pods to replace, and a pause would keep its controller from creating them.
    if live.is_new or (live.replicas_asked == 0 and live.replicas == 0):
        return False
    return live.is_held or (live.template_digest != template_digest and not live.is_rolling)


def is_own_idea(resource: Resource) -> bool:
    """Return whether this generation of the spec was applied before, so that the operator causes the rollout."""
    return resource.status.get("observedGeneration") == resource.generation and not is_refused(resource)


def takes_slot(state: DeploymentState) -> bool:
    """Return whether a Deployment replaces replicas; one that has exceeded its deadline has stopped."""
    return state.is_rolling and state.replicas_asked > 0 and not is_overdue(state)


def queued(rolling: Collection[Key], limit: int) -> Queued | None:
    """Return why another rollout must wait for these, or None if it may start."""
    if not limit or len(rolling) < limit:
        return None
    names = sorted(map(str, rolling))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return Queued(
        reason="RolloutQueued",
        message=(
            f"the operator has a newer pod template; its rollout waits for those of {', '.join(names[:_SHOWN])}{more} "
            f"(at most {limit} at once)"
        ),
    )


PAUSED = Queued(reason="Paused", message="spec.paused is true: replicas are scaled and not replaced")


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
