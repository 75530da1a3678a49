"""An operator in memory: the fake cluster, what its watches show, and the reconciler."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fake_cluster import KEY, FakeClock, FakeCluster

from quire_operator.autoscaling.controller import ClusterScaling
from quire_operator.canary.analysis import TracksPage
from quire_operator.canary.controller import Canaries
from quire_operator.deployment.controller import Options, Reconciler, Sources
from quire_operator.deployment.manifests import ClusterFeatures
from quire_operator.deployment.pod_template import Images
from quire_operator.deployment.store import Cluster, Store
from quire_operator.kube.objects import Key, Pod, Ref
from quire_operator.kube.trimming import trim_resource

DEPLOYMENT = Ref("Deployment", "chat")


@dataclass(slots=True)
class FakeGateways:
    """``Gateways`` in memory: what they report about canaries."""

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
        self.view = Cluster(kube=self.cluster, store=self.store, enqueue=self.enqueued.append, clock=self.clock)
        self.canaries = Canaries(self.view)
        self.start(canaries=self.canaries, features=lambda: self.features)
        self.show()

    def start(self, **options: Any) -> None:
        """Start a reconciler with these options and sources."""
        chosen = {name: options.pop(name) for name in tuple(options) if name in Options.__slots__}
        self.reconciler = Reconciler(
            self.view, Options(**{"images": Images(engine="engine:1"), **chosen}), Sources(**options)
        )

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
