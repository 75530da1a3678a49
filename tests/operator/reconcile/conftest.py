"""A cluster in memory that answers like an API server and records the requests."""

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from quire_operator.domain.canary.figures import TracksPage
from quire_operator.domain.cluster_state.observed import Child, DeploymentState, Key, Owner, Pod, Ref, Resource
from quire_operator.domain.cluster_state.trimming import trim_resource
from quire_operator.domain.convergence.plan import RemoveFields
from quire_operator.domain.manifests.cluster_features import ClusterFeatures
from quire_operator.domain.manifests.objects import Manifest
from quire_operator.domain.manifests.pod_template import Images
from quire_operator.domain.status.status import Event
from quire_operator.ports import ClusterError, Conflict
from quire_operator.reconcile.canaries import Canaries
from quire_operator.reconcile.reconciler import Reconciler
from quire_operator.reconcile.store import Store
from quire_operator.scaling.cluster_scaling import ClusterScaling

KEY = Key("prod", "chat")
DEPLOYMENT = Ref("Deployment", "chat")
CHANGED = "2023-11-14T22:13:20Z"
"""The time at which LeaderWorkerSets were changed: that of the clock at the beginning."""


class FakeClock:
    def __init__(self) -> None:
        self.time = 1_700_000_000.0

    def now(self) -> float:
        return self.time


class Killed(BaseException):
    """The end of the operator's process."""


@dataclass(slots=True)
class FakeCluster:
    """A ``ports.Cluster`` in memory."""

    children: dict[Ref, Child] = field(default_factory=dict)
    resources: dict[Key, Resource] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """The writes, in order."""
    read: list[Ref] = field(default_factory=list)
    """The children that were read one by one, in order."""
    told: list[Event] = field(default_factory=list)
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
        self.told.append(event)

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


@dataclass(slots=True)
class FakeGateways:
    """A ``ports.TracksReader`` in memory."""

    page: TracksPage = field(default_factory=dict)

    async def tracks(self) -> TracksPage:
        return self.page


class World:
    """The cluster, the watches' view of it, and an operator's reconciler."""

    def __init__(self) -> None:
        self.cluster, self.clock = FakeCluster(), FakeClock()
        self.enqueued: list[Key] = []
        self.gateways = FakeGateways()
        self.features = ClusterFeatures()
        self.restart()

    def restart(self) -> None:
        """Start another process, without the state in memory."""
        self.store = Store()
        self.canaries = Canaries(store=self.store, enqueue=self.enqueued.append)
        self.start(canaries=self.canaries, features=lambda: self.features)
        self.show()

    def start(self, **options: Any) -> None:
        """Start a reconciler with these options."""
        parts = {"cluster": self.cluster, "store": self.store, "clock": self.clock, "enqueue": self.enqueued.append}
        self.reconciler = Reconciler(**{**parts, "images": Images(engine="engine:1"), **options})

    def cluster_scaling(self, prometheus_problem: Callable[[], str | None] | None = None) -> ClusterScaling:
        return ClusterScaling(
            store=self.store,
            pending=self.reconciler.scaling,
            requested_name=self.reconciler.served_names.requested_name,
            prometheus_problem=prometheus_problem,
        )

    def show(self) -> None:
        """Deliver all changes to the watches, with those of the controllers."""
        self.cluster.observe()
        for resource in self.cluster.resources.values():
            self.store.put_resource(resource)
        for child in self.cluster.children.values():
            self.store.put_child(KEY, child)
        for ref in set(self.store.children(KEY)) - set(self.cluster.children):
            self.store.drop_child(KEY, ref, self.store.children(KEY)[ref].uid)
        for pod in self.cluster.pods.values():
            self.store.put_pod(KEY, pod)
        for pod in self.store.all_pods(KEY):
            if pod.name not in self.cluster.pods:
                self.store.drop_pod(KEY, pod.name, pod.uid)

    def apply(self, *, uid: str = "uid-1", **spec: Any) -> None:
        """Apply as a user does."""
        body = {
            "apiVersion": "quire.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": KEY.name, "namespace": KEY.namespace},
            "spec": {"model": {"source": "file:///m"}} | spec,
        }
        old = self.cluster.resources.get(KEY)
        self.cluster.resources[KEY] = replace(
            trim_resource(body),
            uid=uid,
            version=self.cluster._next(),
            generation=1 if old is None else old.generation + 1,
            status={} if old is None else old.status,
            created="2026-01-02T00:00:00Z" if old is None else old.created,
        )
        self.show()

    async def settle(self, passes: int = 3) -> list[str]:
        """Run some passes, with current watches before each; return the writes."""
        start = len(self.cluster.asked)
        for _ in range(passes):
            self.show()
            await self.reconciler.reconcile(KEY)
        return self.cluster.asked[start:]

    async def serve(self) -> None:
        """Settle, let the requested replicas run, and settle again."""
        await self.settle()
        self.run_replicas()
        await self.settle()

    async def rest(self) -> list[str]:
        """Let the second pass for which minor changes of the status wait; return the writes."""
        self.clock.time += 1.0
        return await self.settle()

    def delete(self) -> None:
        """As a person would; the garbage collector removes what has an owner, but pods go on draining."""
        gone = self.cluster.resources.pop(KEY)
        owned = [ref for ref, child in self.cluster.children.items() if gone.uid in child.owner_uids]
        for ref in owned:
            del self.cluster.children[ref]
        self.store.drop_resource(KEY, gone.uid)

    def change_deployment(self, ref: Ref = DEPLOYMENT, **changes: Any) -> None:
        """Change the Deployment as its controller does."""
        self.cluster.observe()
        child = self.cluster.children[ref]
        assert child.deployment is not None
        state = replace(child.deployment, **changes)
        self.cluster.children[ref] = replace(child, version=self.cluster._next(), deployment=state)

    def run_replicas(self, ref: Ref = DEPLOYMENT) -> None:
        """Let its controller run the requested replicas."""
        self.cluster.observe()
        state = self.cluster.children[ref].deployment
        assert state is not None
        asked = state.replicas_asked
        self.change_deployment(ref, replicas=asked, updated=asked, ready=asked, available=asked)

    @property
    def status(self) -> Any:
        return self.cluster.resources[KEY].status

    def condition(self, kind: str) -> str:
        found = {c["type"]: c for c in self.status["conditions"]}[kind]
        return f"{found['status']} {found['reason']}"

    def message(self, kind: str) -> str:
        return str({c["type"]: c for c in self.status["conditions"]}[kind]["message"])


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def pod() -> Callable[..., Pod]:
    def made(name: str, **changes: Any) -> Pod:
        fields: dict[str, Any] = {
            "uid": name,
            "version": "1",
            "ip": "10.0.0.1",
            "phase": "Running",
            "ready": True,
            "deleting": False,
            "revision": "r",
            "created": "",
            "unschedulable": "",
            "containers": (),
            "deletion_cost": "",
        }
        return Pod(name=name, **(fields | changes))

    return made
