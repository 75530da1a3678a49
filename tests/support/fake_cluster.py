"""A cluster in memory that answers as ``KubeClient`` does and records the writes."""

import hashlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire_operator.deployment.manifests import Manifest
from quire_operator.deployment.plan import RemoveFields
from quire_operator.deployment.status import Event
from quire_operator.kube.errors import ClusterError, Conflict
from quire_operator.kube.objects import Child, DeploymentState, Key, Owner, Pod, Ref, Resource

KEY = Key("prod", "chat")
CHANGED = "2023-11-14T22:13:20Z"
"""The time at which LeaderWorkerSets were changed: that of the clock at the beginning."""


class FakeClock:
    def __init__(self) -> None:
        self.time = 1_700_000_000.0

    def __call__(self) -> float:
        return self.time


class Killed(BaseException):
    """The end of the operator's process."""


@dataclass(slots=True)
class FakeCluster:
    """A ``KubeClient`` in memory. ``observe`` acts as the controllers of Kubernetes do."""

    children: dict[Ref, Child] = field(default_factory=dict)
    resources: dict[Key, Resource] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """The writes, in order."""
    read: list[Ref] = field(default_factory=list)
    """The children that were read one by one, in order."""
    events: list[Event] = field(default_factory=list)
    costs: dict[str, str | None] = field(default_factory=dict)
    errors: dict[str, list[ClusterError]] = field(default_factory=dict)
    """The errors of the next writes, by kind of write."""
    statuses: list[dict[str, Any]] = field(default_factory=list)
    unknown_fields: frozenset[str] = frozenset()
    """Fields of status that an older CRD drops."""
    kinds: frozenset[str] = frozenset()
    """The optional kinds that it serves."""
    image_volumes: bool = False
    secrets: dict[str, Manifest] = field(default_factory=dict)
    manifests: dict[Ref, Manifest] = field(default_factory=dict)
    """The manifests that were applied last."""
    adapters: dict[Key, Resource] = field(default_factory=dict)
    """The LLMAdapters."""
    annotated: list[str] = field(default_factory=list)
    """The pods that got the digest of a list of adapters, in order."""
    nodes: list[dict[str, str]] = field(default_factory=list)
    """The labels of the nodes that report GPU memory."""
    rolled_out: dict[Ref, str] = field(default_factory=dict)
    """The digests of the templates that the controllers roll out."""
    version: int = 100
    dies_before: int | None = None
    """The number of the write before which the operator is killed, once."""

    def _next(self) -> str:
        self.version += 1
        return str(self.version)

    def _ask(self, what: str) -> None:
        if self.dies_before == len(self.asked):
            self.dies_before = None
            raise Killed(what)
        self.asked.append(what)
        if self.errors.get(what):
            raise self.errors[what].pop(0)

    async def served_kinds(self) -> frozenset[str]:
        if self.errors.get("served kinds"):
            raise self.errors["served kinds"].pop(0)
        return self.kinds

    async def takes_image_volumes(self, key: Key, deployment: Manifest) -> bool:
        if self.errors.get("image volumes"):
            raise self.errors["image volumes"].pop(0)
        return self.image_volumes

    async def node_labels(self) -> list[dict[str, str]]:
        self.read.append(Ref("Node", ""))
        if self.errors.get("nodes"):
            raise self.errors["nodes"].pop(0)
        return self.nodes

    async def check_template(self, key: Key, deployment: Manifest) -> None:
        self._ask(f"check {deployment.ref}")

    async def create_secret(self, key: Key, manifest: Manifest) -> None:
        self._ask(f"create {manifest.ref}")
        self.secrets.setdefault(manifest.ref.name, manifest)

    async def read_resource(self, key: Key) -> Resource | None:
        return self.resources.get(key)

    async def read_child(self, key: Key, ref: Ref) -> Child | None:
        self.read.append(ref)
        if self.errors.get(f"read {ref}"):
            raise self.errors[f"read {ref}"].pop(0)
        return self.children.get(ref)

    async def create(self, key: Key, manifest: Manifest, *, must_be_new: bool) -> Child:
        self._ask(f"create {manifest.ref}")
        if must_be_new and manifest.ref in self.children:
            raise Conflict("the object has been modified")
        return self._apply(manifest)

    async def update(self, key: Key, manifest: Manifest) -> Child:
        self._ask(f"update {manifest.ref}")
        return self._apply(manifest)

    def _apply(self, manifest: Manifest) -> Child:
        body: Any = manifest.body
        applied = self.manifests.get(manifest.ref)
        self.manifests[manifest.ref] = manifest
        owners = body["metadata"].get("ownerReferences", [])
        controller = next(
            (Owner(kind=o["kind"], name=o["name"], uid=o["uid"]) for o in owners if "controller" in o), None
        )
        old = self.children.get(manifest.ref)
        is_changed = applied is None or applied.body.get("spec") != body.get("spec")
        child = Child(
            ref=manifest.ref,
            uid=old.uid if old else f"uid {manifest.ref}",
            version=self._next(),
            owner=controller,
            owner_uids=frozenset(owner["uid"] for owner in owners),
            deleting=False,
            fingerprint=hashlib.md5(repr(body).encode(), usedforsecurity=False).hexdigest(),
            foreign=(),
            deployment=_state(body, old, is_changed=is_changed)
            if manifest.ref.kind in ("Deployment", "LeaderWorkerSet")
            else None,
            data=body["data"] if manifest.ref.kind == "ControllerRevision" else None,
        )
        self.children[manifest.ref] = child
        return child

    def observe(self) -> None:
        """Let the controllers observe what was applied, as they do soon after each write."""
        for ref, child in self.children.items():
            state = child.deployment
            if state is None or state.observed_generation >= state.generation:
                continue
            is_same = self.rolled_out.get(ref) == state.template_digest
            if not state.is_held:
                self.rolled_out[ref] = state.template_digest
            state = replace(
                state,
                observed_generation=state.generation,
                updated=state.updated if is_same else 0,
                revision=state.revision or "1",
            )
            self.children[ref] = replace(child, version=self._next(), deployment=state)

    async def remove_fields(self, key: Key, action: RemoveFields) -> Child:
        self._ask(f"remove-fields {action.ref}")
        child = self.children[action.ref]
        kept = tuple(entry for entry in child.foreign if entry not in action.fields)
        self.children[action.ref] = replace(child, version=self._next(), foreign=kept)
        return self.children[action.ref]

    async def delete(self, key: Key, ref: Ref, uid: str) -> None:
        self._ask(f"delete {ref}")
        if self.children.get(ref, None) is not None and self.children[ref].uid == uid:
            del self.children[ref]

    async def set_deletion_costs(self, key: Key, costs: Mapping[str, str | None]) -> None:
        self._ask(f"costs {dict(costs)}")
        self.costs |= costs

    async def write_status(self, resource: Resource, status: Mapping[str, object]) -> Resource:
        self._ask("status")
        current = self.resources[resource.key]
        if (current.uid, current.version) != (resource.uid, resource.version):
            raise Conflict("the object has been modified")
        self.statuses.append(dict(status))
        kept = {name: value for name, value in status.items() if name not in self.unknown_fields}
        self.resources[resource.key] = replace(current, version=self._next(), status=kept)
        return self.resources[resource.key]

    async def record_event(self, resource: Resource, event: Event) -> None:
        self._ask(f"event {event.reason}")
        self.events.append(event)

    async def list_adapters(self) -> AsyncIterator[Resource]:
        for adapter in list(self.adapters.values()):
            yield adapter

    async def write_adapter_status(self, resource: Resource, status: Mapping[str, object]) -> Resource:
        self._ask("adapter status")
        self.statuses.append(dict(status))
        self.adapters[resource.key] = replace(resource, version=self._next(), status=dict(status))
        return self.adapters[resource.key]

    async def annotate_pod(self, namespace: str, pod: str, digest: str) -> None:
        self.annotated.append(pod)
        self._ask(f"annotate {pod}")

    async def list_resources(self) -> AsyncIterator[Resource]:
        for resource in list(self.resources.values()):
            yield resource

    async def list_children(self, kind: str) -> AsyncIterator[tuple[Key, Child]]:
        for child in [child for child in self.children.values() if child.ref.kind == kind]:
            yield KEY, child

    async def list_pods(self) -> AsyncIterator[tuple[Key, Pod]]:
        for pod in list(self.pods.values()):
            yield KEY, pod


def _state(body: Any, old: Child | None, *, is_changed: bool) -> DeploymentState:
    """Return the state in the answer to a write, before the controller has observed it."""
    before = old.deployment if old else None
    asked = body["spec"]["replicas"]
    groups = body["spec"].get("leaderWorkerTemplate")
    deadline = body["metadata"]["annotations"].get("quire.dev/progress-deadline-seconds", "0")
    is_changed = before is None or is_changed or before.replicas_asked != asked
    return DeploymentState(
        replicas_asked=asked,
        template_digest=body["metadata"]["annotations"]["quire.dev/template"],
        is_held=body["spec"].get("paused", False),
        generation=is_changed + (before.generation if before else 0),
        observed_generation=before.observed_generation if before else 0,
        replicas=before.replicas if before else 0,
        updated=before.updated if before else 0,
        ready=before.ready if before else 0,
        available=before.available if before else 0,
        revision=before.revision if before else "",
        progressing=None,
        failure=None,
        nodes=1 if groups is None else groups["size"],
        changed="" if groups is None else CHANGED,
        deadline_seconds=int(deadline),
    )
