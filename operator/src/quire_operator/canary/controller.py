"""The canaries in a pass: the figures that the gateways report, the specs of both tracks, and their children."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quire_operator.api import Invalid, Spec
from quire_operator.autoscaling.scrape import Gateways
from quire_operator.canary.analysis import Tracks, TracksPage
from quire_operator.canary.manifests import canary_manifests, canary_refs, revision_manifests
from quire_operator.canary.progress import HAS_CANARY, read
from quire_operator.canary.tracks import Tracked, tracks
from quire_operator.deployment.conditions import BlockingCondition
from quire_operator.deployment.manifests import ClusterFeatures, Manifests
from quire_operator.deployment.plan import Target
from quire_operator.deployment.pod_template import Images
from quire_operator.deployment.store import Cluster
from quire_operator.kube.objects import Child, Key, Ref, Resource

PERIOD_SECONDS = 15.0


class Canaries:
    def __init__(self, cluster: Cluster, *, period_seconds: float = PERIOD_SECONDS) -> None:
        self._store, self._enqueue, self._period = cluster.store, cluster.enqueue, period_seconds
        self._page: TracksPage = {}

    def figures(self, model: str | None, revision: str) -> Tracks | None:
        """Return what the gateways report about a revision of a model's canary; None if none of them knows it."""
        return None if model is None else self._page.get((model, revision))

    async def follow(self, reader: Gateways) -> None:
        try:
            while True:
                await self.poll(reader)
                await asyncio.sleep(self._period)
        finally:
            self._page = {}

    async def poll(self, reader: Gateways) -> None:
        """Read the figures once if there is a canary, and enqueue the LLMDeployments that have one."""
        keys = [key for key in self._store.live_keys() if self._has_canary(key)]
        self._page = await reader.tracks() if keys else {}
        for key in keys:
            self._enqueue(key)

    def _has_canary(self, key: Key) -> bool:
        resource = self._store.resource(key)
        record = None if resource is None else read(resource.status)
        return record is not None and record.phase in HAS_CANARY


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
    def __init__(
        self,
        cluster: Cluster,
        *,
        canaries: Canaries | None,
        features: Callable[[], ClusterFeatures],
        requested_name: Callable[[Key], str | None],
    ) -> None:
        self._kube, self._store, self._clock = cluster.kube, cluster.store, cluster.clock
        self._canaries = canaries
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
            now=self._clock(),
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
            if ref not in children and (child := await self._kube.read_child(key, ref)) is not None:
                found[ref] = child
        return found
