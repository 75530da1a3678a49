"""The two tracks of an LLMDeployment with strategy Canary, in a pass: which specs they have, and their children.

``reconciler`` uses it between the target and the plan. ``domain.convergence.tracks`` decides.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quire_operator.domain.cluster_state.observed import Child, Key, Ref, Resource
from quire_operator.domain.convergence.target import Target
from quire_operator.domain.convergence.tracks import Tracked, tracks
from quire_operator.domain.manifests.canary import canary_manifests, canary_refs, revision_manifests
from quire_operator.domain.manifests.cluster_features import ClusterFeatures
from quire_operator.domain.manifests.objects import Manifests
from quire_operator.domain.manifests.pod_template import Images
from quire_operator.domain.resource import Invalid, Spec
from quire_operator.domain.status.conditions import BlockingCondition
from quire_operator.ports import Clock, Cluster
from quire_operator.reconcile.canaries import Canaries
from quire_operator.reconcile.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """The spec of the resource and how specs are rendered in this pass."""

    spec: Spec
    manifests: Manifests
    """The children of this spec without strategy Canary."""
    images: Images
    rendered: Callable[[Images, Spec, int], Manifests | Invalid]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The result: the children to apply with the number of replicas."""

    tracked: Tracked
    manifests: Manifests
    goal: Target
    children: Mapping[Ref, Child]
    """The observed children, with those that no watch shows."""


class TrackRenderer:
    """A renderer of both tracks."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        store: Store,
        clock: Clock,
        canaries: Canaries | None,
        features: Callable[[], ClusterFeatures],
        requested_name: Callable[[Key], str | None],
    ) -> None:
        self._cluster, self._store, self._clock, self._canaries = cluster, store, clock, canaries
        self._features, self._requested_name = features, requested_name

    def decide(
        self, resource: Resource, basis: Basis, children: Mapping[Ref, Child], *, replicas: int, model_revision: str
    ) -> Tracked | BlockingCondition:
        """Return the specs of both tracks, or why they are not known."""
        model, canaries = self._requested_name(resource.key), self._canaries

        def template_digest(spec: Spec) -> str | None:
            found = basis.manifests if spec is basis.spec else basis.rendered(basis.images, spec, replicas)
            return None if isinstance(found, Invalid) else found.template_digest

        return tracks(
            resource,
            basis.spec,
            children,
            model_revision=model_revision,
            replicas=replicas,
            canary_pods=self._store.canary_pods(resource.key),
            figures=lambda revision: None if canaries is None else canaries.figures(model, revision),
            template_digest=template_digest,
            now=self._clock.now(),
        )

    def render(self, resource: Resource, basis: Basis, tracked: Tracked, *, replicas: int) -> Manifests | Invalid:
        """Return the children of the stable revision, with the kept revisions and those of the canary."""
        if tracked.record is None:
            return basis.manifests
        stable = basis.rendered(basis.images, tracked.main, replicas)
        if isinstance(stable, Invalid):
            return stable
        whole = stable.with_others(revision_manifests(resource, tracked.revisions), before=True)
        if tracked.canary is None:
            return whole
        others = canary_manifests(
            tracked.canary,
            tracked.canary_replicas,
            uid=resource.uid,
            revision=tracked.record.canary,
            images=basis.images,
            features=self._features(),
            stable=stable,
        )
        return others if isinstance(others, Invalid) else whole.with_others(others)

    async def unwatched(self, key: Key, tracked: Tracked, children: Mapping[Ref, Child]) -> Mapping[Ref, Child]:
        """Return objects with the names of a canary's that no watch shows, such as those of other owners."""
        found: dict[Ref, Child] = {}
        for ref in canary_refs(key.name) if tracked.canary is not None else ():
            if ref not in children and (child := await self._cluster.read_child(key, ref)) is not None:
                found[ref] = child
        return found
