"""Objects as they are applied, with the labels and the owner of what belongs to one LLMDeployment."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from json import dumps
from typing import Any

from quire_operator.domain.cluster_state.observed import Ref
from quire_operator.domain.resource import names

JSON = dict[str, object]
COMPONENT = names.COMPONENT
HEADLESS_COMPONENT = "engine-headless"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """An object as it is applied."""

    ref: Ref
    body: JSON

    @property
    def digest(self) -> str:
        """A hash that is equal for equal bodies."""
        return digest(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifests:
    """The children of one LLMDeployment, in the order of ``CHILDREN``."""

    children: tuple[Manifest, ...]

    def __iter__(self) -> Iterator[Manifest]:
        return iter(self.children)

    @property
    def deployment(self) -> Manifest:
        """The Deployment, which every LLMDeployment has."""
        return next(manifest for manifest in self if manifest.ref.kind == "Deployment")

    @property
    def template_digest(self) -> str:
        """A hash that is equal for equal pod templates."""
        metadata: Any = self.deployment.body["metadata"]
        return str(metadata["annotations"][names.ANNOTATION_TEMPLATE])

    def with_others(self, others: Sequence[Manifest], *, before: bool = False) -> "Manifests":
        """Return the same children with others, which are created after them or before."""
        return Manifests(children=(*others, *self.children) if before else (*self.children, *others))

    def held(self) -> "Manifests":
        """Return the same children with a paused Deployment, which is scaled but replaces no replicas."""
        body: Any = self.deployment.body
        held = Manifest(ref=self.deployment.ref, body={**body, "spec": {**body["spec"], "paused": True}})
        return Manifests(children=tuple(held if child.ref == held.ref else child for child in self))


def labels(name: str, *, component: str = COMPONENT) -> dict[str, str]:
    """Return the labels of a child."""
    return {
        names.LABEL_APP: "quire",
        names.LABEL_INSTANCE: name,
        names.LABEL_COMPONENT: component,
        names.LABEL_MANAGED_BY: "quire-operator",
        names.LABEL_DEPLOYMENT: name,
    }


def selector(name: str) -> dict[str, str]:
    """Return the labels that select the pods of one LLMDeployment.

    A Deployment's selector is immutable, so it contains no labels that users choose.
    """
    return {names.LABEL_DEPLOYMENT: name, names.LABEL_COMPONENT: COMPONENT}


def all_tracks(name: str) -> JSON:
    """Return the selector of the pods of one LLMDeployment with those of its canary."""
    components: JSON = {
        "key": names.LABEL_COMPONENT,
        "operator": "In",
        "values": [names.COMPONENT, names.CANARY_COMPONENT],
    }
    return {"matchLabels": {names.LABEL_DEPLOYMENT: name}, "matchExpressions": [components]}


def owner_reference(name: str, uid: str) -> JSON:
    """Return the reference with which a child belongs to its LLMDeployment."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def digest(body: JSON) -> str:
    """Return a hash that is equal for equal bodies."""
    return blake2b(dumps(body, sort_keys=True).encode(), digest_size=12).hexdigest()
