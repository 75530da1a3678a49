"""The operator's view of the cluster: the objects that the watches have shown, by LLMDeployment.

An older version of an object never replaces a newer one, so our own write is visible at once and its late event has no
effect. There is one event loop and no lock. Also the claims to served names: that of one LLMDeployment determines the
conditions of others.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quire_common.served_names import Claim, NameScope
from quire_operator.autoscaling.observation import Clock
from quire_operator.deployment.served_names import conflict, key_of, recorded_claim
from quire_operator.kube.client import KubeClient
from quire_operator.kube.objects import Child, Key, Pod, Ref, Resource, is_newer

Enqueue = Callable[[Key], None]
"""Has the next pass of an LLMDeployment run soon."""


@dataclass(slots=True)
class _Family:
    resource: Resource | None = None
    children: dict[Ref, Child] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return self.resource is None and not self.children and not self.pods


class Store:
    def __init__(self) -> None:
        self._families: dict[Key, _Family] = {}
        self._claims: dict[str, dict[Key, Claim]] = {}

    def live_keys(self) -> list[Key]:
        """Return the keys of all existing LLMDeployments."""
        return [key for key, family in self._families.items() if family.resource is not None]

    def all_keys(self) -> list[Key]:
        """Return all keys, also those with children but without an LLMDeployment."""
        return list(self._families)

    def resource(self, key: Key) -> Resource | None:
        """Return an LLMDeployment, which is the same object until a newer one is stored."""
        family = self._families.get(key)
        return None if family is None else family.resource

    def children(self, key: Key) -> Mapping[Ref, Child]:
        family = self._families.get(key)
        return {} if family is None else dict(family.children)

    def all_pods(self, key: Key) -> tuple[Pod, ...]:
        """Return the pods, sorted by name."""
        family = self._families.get(key)
        return () if family is None else tuple(pod for _, pod in sorted(family.pods.items()))

    def pods(self, key: Key) -> tuple[Pod, ...]:
        """Return the pods that stand for the replicas of the stable revision, sorted by name: leaders of groups."""
        return tuple(pod for pod in self.all_pods(key) if not pod.is_canary and not pod.is_worker)

    def workers(self, key: Key) -> tuple[Pod, ...]:
        """Return the pods that work for the leaders of groups, sorted by name."""
        return tuple(pod for pod in self.all_pods(key) if pod.is_worker)

    def canary_pods(self, key: Key) -> tuple[Pod, ...]:
        """Return the pods of a canary, sorted by name."""
        return tuple(pod for pod in self.all_pods(key) if pod.is_canary)

    def put_resource(self, resource: Resource) -> bool:
        """Store the resource and return True if it is newer than the stored one."""
        family = self._family(resource.key)
        if not _is_news(resource, family.resource):
            return False
        self._unclaim(resource.key)
        family.resource = resource
        if (claim := recorded_claim(resource)) is not None:
            self._claims.setdefault(claim.name, {})[resource.key] = claim
        return True

    def put_child(self, key: Key, child: Child) -> bool:
        """Store the child and return True if it is newer than the stored one."""
        children = self._family(key).children
        known = children.get(child.ref)
        if not _is_news(child, known):
            return False
        children[child.ref] = child.after(known)
        return True

    def put_pod(self, key: Key, pod: Pod) -> bool:
        """Store the pod and return True if it is newer than the stored one."""
        pods = self._family(key).pods
        if not _is_news(pod, pods.get(pod.name)):
            return False
        pods[pod.name] = pod
        return True

    def drop_resource(self, key: Key, uid: str) -> None:
        """Remove the deleted resource; a newer one with the same name stays."""
        family = self._families.get(key)
        if family is not None and family.resource is not None and family.resource.uid == uid:
            self._unclaim(key)
            family.resource = None
            self._forget_empty(key)

    def drop_child(self, key: Key, ref: Ref, uid: str) -> None:
        """Remove the deleted child; a newer one with the same name stays."""
        family = self._families.get(key)
        if family is not None and ref in family.children and family.children[ref].uid == uid:
            del family.children[ref]
            self._forget_empty(key)

    def drop_pod(self, key: Key, name: str, uid: str) -> None:
        """Remove the deleted pod; a newer one with the same name stays."""
        family = self._families.get(key)
        if family is not None and name in family.pods and family.pods[name].uid == uid:
            del family.pods[name]
            self._forget_empty(key)

    def claim(self, key: Key) -> Claim | None:
        """Return the recorded claim of an LLMDeployment to its served name; None before its first report."""
        resource = self.resource(key)
        return None if resource is None else recorded_claim(resource)

    def claims(self, served_name: str) -> tuple[Claim, ...]:
        """Return all recorded claims to a served name, of all namespaces."""
        return tuple(self._claims.get(served_name, {}).values())

    def _unclaim(self, key: Key) -> None:
        claim = self.claim(key)
        claims = None if claim is None else self._claims.get(claim.name)
        if claim is not None and claims is not None and claims.pop(key, None) is not None and not claims:
            del self._claims[claim.name]

    def _family(self, key: Key) -> _Family:
        return self._families.setdefault(key, _Family())

    def _forget_empty(self, key: Key) -> None:
        if self._families[key].is_empty:
            del self._families[key]


def _is_news(new: Resource | Child | Pod, old: Resource | Child | Pod | None) -> bool:
    return old is None or is_newer(new.version, old.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The cluster for controllers: its client, what the watches have shown, the queue of passes, and the clock."""

    kube: KubeClient
    store: Store
    enqueue: Enqueue
    clock: Clock = time.time


class ServedNameClaims:
    """The claims at the last check of each LLMDeployment."""

    def __init__(
        self,
        store: Store,
        enqueue: Callable[[Key], None],
        scope: Callable[[], NameScope | None],
        adapters: Callable[[str], Sequence[Claim]] = lambda name: (),
    ) -> None:
        """``scope`` is None without gateways; ``adapters`` returns the claims of LLMAdapters to a served name."""
        self._store, self._enqueue, self._scope, self._adapters = store, enqueue, scope, adapters
        self._known: dict[Key, Claim] = {}

    def forget(self) -> None:
        """Forget everything, because another process led and nothing was checked."""
        self._known.clear()

    def check(self, key: Key) -> None:
        """Enqueue all LLMDeployments that a change of this one's claim affects."""
        claim, before = self._store.claim(key), self._known.get(key)
        if claim == before:
            return
        if claim is None:
            del self._known[key]
        else:
            self._known[key] = claim
        for name in {known.name for known in (claim, before) if known is not None}:
            for other in self._store.claims(name):
                if key_of(other) != key:
                    self._enqueue(key_of(other))

    def conflict(self, mine: Claim | None) -> str | None:
        """Return why requests for a claimed name go to another object; None if they do not."""
        scope = self._scope()
        if mine is None or scope is None:
            return None
        return conflict(mine, (*self._store.claims(mine.name), *self._adapters(mine.name)), scope)

    def requested_name(self, key: Key) -> str | None:
        """Return the model name with which gateways send requests here; None if they send none."""
        claim = self._store.claim(key)
        if claim is None or self.conflict(claim) is not None:
            return None
        return claim.requested_as(self._scope() or NameScope.CLUSTER)
