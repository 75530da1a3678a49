"""The children that strategy Canary adds: the Deployment and Service of a canary, and the specs of its revisions. Pure.

The canary has a Deployment and a Service of its own, because a Deployment's selector cannot change, and the gateway
tells the tracks apart by their Services. A spec that serves or is tried is kept in a ControllerRevision, as
StatefulSets do it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from json import dumps

from quire_operator.api import HubSource, Invalid, Spec, names
from quire_operator.api.fields import JSON, section_of
from quire_operator.deployment.desired import (
    CHILDREN,
    ChildKind,
    Content,
    Parent,
    object_of,
    port,
    progress_deadline_seconds,
    render,
)
from quire_operator.deployment.manifests import (
    NO_FEATURES,
    ClusterFeatures,
    Manifest,
    Manifests,
    labels,
    owner_reference,
    selector,
)
from quire_operator.deployment.pod_template import Images, pod_template
from quire_operator.deployment.served_names import served_names
from quire_operator.kube.objects import Child, Ref, Resource

_OF_BOTH = ("replicas", "autoscaling", "rollout", "paused")
"""Fields of spec that reach no pod: a change of them is no new revision."""
_CLAIM = "PersistentVolumeClaim"


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A spec with the version of its model."""

    spec: JSON
    model_revision: str = ""
    """The commit to which a branch was resolved; empty without one."""

    @property
    def own(self) -> dict[str, object]:
        """The fields of the spec that reach pods."""
        return {key: value for key, value in self.spec.items() if key not in _OF_BOTH}

    @property
    def name(self) -> str:
        """A hash that is equal for equal pods."""
        text = dumps([self.own, self.model_revision], sort_keys=True)
        return blake2b(text.encode(), digest_size=5).hexdigest()

    def parse(self, resource: Resource) -> Spec | Invalid:
        """Return it as the spec of a resource, whose number of replicas and rollout it has."""
        raw = section_of(resource.body, "spec")
        shared = {key: raw[key] for key in _OF_BOTH if key in raw}
        spec = Spec.parse({**resource.body, "spec": {**self.own, **shared}})
        if isinstance(spec, Invalid) or not self.model_revision or not isinstance(spec.model.source, HubSource):
            return spec
        source = replace(spec.model.source, revision=self.model_revision)
        return replace(spec, model=replace(spec.model, source=source))


def kept_revisions(resource: Resource, children: Mapping[Ref, Child]) -> dict[str, Revision]:
    """Return the revisions in the ControllerRevisions of a resource, by name."""
    found: dict[str, Revision] = {}
    for ref, child in children.items():
        is_ours = child.owner is not None and child.owner.uid == resource.uid
        spec = None if child.data is None else child.data.get("spec")
        if ref.kind == REVISION.kind and is_ours and child.data is not None and isinstance(spec, Mapping):
            version = child.data.get("modelRevision")
            name = ref.name.removeprefix(f"{resource.key.name}-")
            found[name] = Revision(spec=spec, model_revision=version if isinstance(version, str) else "")
    return found


def canary_manifests(
    spec: Spec,
    replicas: int,
    *,
    uid: str,
    revision: str,
    images: Images,
    features: ClusterFeatures = NO_FEATURES,
    stable: Manifests,
) -> tuple[Manifest, ...] | Invalid:
    """Return the objects of a canary, with the cache of its model if the stable revision has none."""
    component = names.CANARY_COMPONENT
    template = pod_template(
        spec,
        images,
        labels=labels(spec.name, component=component),
        selector=selector(spec.name, component=component),
        served_names=served_names(spec, features.served_names),
    )
    if not isinstance(template, dict):
        return Invalid(name=spec.name, namespace=spec.namespace, problems=template)
    parent = Parent(spec=spec, uid=uid, created="", target=replicas, template=template, features=features)
    there = {manifest.ref for manifest in stable}
    claims = (child for child in CHILDREN if child.kind == _CLAIM and child.is_wanted(spec, features))
    shared = [claim for claim in claims if claim.ref(spec.name) not in there]
    deployment = replace(_DEPLOYMENT, render=lambda parent: _deployment(parent, revision))
    return tuple(render(child, parent) for child in (*shared, _SERVICE, deployment))


def revision_manifests(resource: Resource, revisions: Mapping[str, Revision]) -> tuple[Manifest, ...]:
    return tuple(_revision(resource, name, revision) for name, revision in sorted(revisions.items()))


def canary_refs(name: str) -> tuple[Ref, ...]:
    return _SERVICE.ref(name), _DEPLOYMENT.ref(name)


def _no_content(parent: Parent) -> Content:
    raise AssertionError("a revision is needed to render this child")


def _service(parent: Parent) -> Content:
    selected = selector(parent.spec.name, component=names.CANARY_COMPONENT)
    return Content(fields={"spec": {"selector": selected, "ports": [port()]}})


def _deployment(parent: Parent, revision: str) -> Content:
    deployment: dict[str, object] = {
        "replicas": parent.target,
        "selector": {"matchLabels": selector(parent.spec.name, component=names.CANARY_COMPONENT)},
        # Another revision gets no requests before it is ready, so nothing is lost, and no GPU is needed twice.
        "strategy": {"type": "Recreate"},
        "progressDeadlineSeconds": progress_deadline_seconds(parent.spec),
        "revisionHistoryLimit": 0,
        "template": parent.template,
    }
    # The replicas of one revision must never be taken for those of the next.
    return Content(fields={"spec": deployment}, annotations={names.ANNOTATION_TEMPLATE: revision})


def _revision(resource: Resource, name: str, revision: Revision) -> Manifest:
    data = {"spec": revision.own, "modelRevision": revision.model_revision}
    content = Content(fields={"revision": 1, "data": data})
    key = resource.key
    owner = owner_reference(key.name, resource.uid)
    child = replace(REVISION, suffix=f"-{name}")
    return object_of(child, content, name=key.name, namespace=key.namespace, owners=(owner,))


_SERVICE = ChildKind(
    kind="Service", api_version="v1", render=_service, suffix=names.CANARY_SUFFIX, component=names.CANARY_COMPONENT
)
_DEPLOYMENT = replace(_SERVICE, kind="Deployment", api_version="apps/v1", render=_no_content)
REVISION = ChildKind(kind="ControllerRevision", api_version="apps/v1", render=_no_content)
KINDS = (*CHILDREN, REVISION)
"""One or more children of every kind that the operator creates."""
WATCHED_KINDS: Mapping[str, tuple[str, str, str]] = {
    child.kind: (*child.group_and_version, child.plural) for child in KINDS if not child.is_optional
}
"""The API group, the version and the plural of the kinds that are watched."""
