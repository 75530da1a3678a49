"""The loop that applies wake routes: what it writes as pods, gateways and other clients change."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from quire_operator.domain.cluster_state.observed import Key
from quire_operator.domain.cluster_state.trimming import trim_resource
from quire_operator.domain.manifests.wake_route import GatewayAddress, WakeRoute
from quire_operator.ports import AppliedRoute, ClusterError, Forbidden, PartlyForbidden, Unavailable
from quire_operator.reconcile.store import Store
from quire_operator.reconcile.wake_routes import WakeRoutes

KEY = Key("prod", "chat")


class Slices:
    """Implements ``ports.WakeSlices``."""

    def __init__(self) -> None:
        self.routes: dict[Key, AppliedRoute] = {}
        self.bodies: list[Any] = []
        self.asked: list[str] = []
        self.error: ClusterError | None = None
        self.version = 0

    async def list_routes(self) -> AsyncIterator[AppliedRoute]:
        self.asked.append("list")
        for route in self.routes.values():
            yield route
        if self.error is not None:
            raise self.error

    async def apply_route(self, key: Key, route: WakeRoute, *, force: bool) -> AppliedRoute:
        self.asked.append("force" if force else "create")
        if self.error is not None:
            raise self.error
        self.version += 1
        self.bodies.append(route.body)
        owners: Any = route.body["metadata"]
        owner = owners["ownerReferences"][0]["uid"]
        self.routes[key] = AppliedRoute(key=key, uid="slice-1", version=str(self.version), owner_uid=owner)
        return self.routes[key]

    async def delete_route(self, route: AppliedRoute) -> None:
        self.asked.append("delete")
        del self.routes[route.key]


class World:
    """A store with one LLMDeployment, two gateways, and clocks that stand still."""

    def __init__(self) -> None:
        self.slices, self.store, self.time = Slices(), Store(), 1_767_225_600.0
        self.gateways = [GatewayAddress("10.0.0.1", 8001), GatewayAddress("10.0.0.2", 8001)]
        self.loop = self.successor()

    def successor(self, *, is_on: bool = True) -> WakeRoutes:
        return WakeRoutes(
            slices=self.slices,
            store=self.store,
            clock=self,
            gateways=self.addresses,
            now=lambda: self.time,
            is_on=is_on,
        )

    def now(self) -> float:
        return self.time

    async def addresses(self) -> list[GatewayAddress]:
        return self.gateways

    def put(self, *, uid: str = "u1", version: str = "1", generation: int = 1, **autoscaling: Any) -> None:
        spec = {"model": {"source": "file:///m"}, "autoscaling": {"minReplicas": 0, "maxReplicas": 2} | autoscaling}
        metadata = {
            "name": "chat",
            "namespace": "prod",
            "uid": uid,
            "resourceVersion": version,
            "generation": generation,
        }
        body = {"apiVersion": "quire.dev/v1alpha1", "kind": "LLMDeployment", "metadata": metadata, "spec": spec}
        self.store.put_resource(trim_resource(body))

    async def poll(self, *, after: float = 1.0) -> list[str]:
        """Return the requests of one round to the API server."""
        self.time += after
        self.slices.asked.clear()
        await self.loop.poll()
        return self.slices.asked


@pytest.fixture
def world() -> World:
    made = World()
    made.put()
    return made


async def test_a_route_is_added_once_and_removed_when_a_replica_serves(world: World, pod: Any) -> None:
    assert await world.poll() == ["list", "create"]
    assert await world.poll() == []
    world.store.put_pod(KEY, pod("chat-1"))
    assert await world.poll() == ["delete"]
    assert await world.poll() == []
    world.store.drop_pod(KEY, "chat-1", pod("chat-1").uid)
    assert await world.poll() == ["create"]


async def test_a_route_follows_the_gateways(world: World) -> None:
    await world.poll()
    world.gateways.pop()
    assert await world.poll() == ["force"]
    assert len(world.slices.bodies[-1]["endpoints"]) == 1
    world.gateways.clear()
    assert await world.poll() == ["delete"], "a route to gateways that are gone would refuse connections slowly"


async def test_a_route_that_another_client_changed_is_repaired(world: World) -> None:
    await world.poll()
    assert await world.poll(after=300) == ["list"]
    world.slices.routes[KEY] = replace(world.slices.routes[KEY], version="changed")
    assert await world.poll(after=300) == ["list", "force"]
    world.slices.routes.clear()
    assert await world.poll(after=300) == ["list", "create"]


async def test_new_leader_continues_with_existing_routes(world: World, pod: Any) -> None:
    await world.poll()
    world.store.put_pod(KEY, pod("chat-1"))
    world.loop = world.successor()
    assert await world.poll() == ["list", "delete"]


async def test_routes_are_removed_when_the_feature_is_disabled(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.poll()
    world.loop = world.successor(is_on=False)
    assert await world.poll() == ["list", "delete"]
    assert await world.poll() == []
    world.slices.error = Forbidden("no")
    assert await world.poll(after=300) == ["list"]
    assert "operator's role" not in caplog.text


async def test_earlier_deployment_keeps_its_route_until_collected(world: World) -> None:
    await world.poll()
    world.store.drop_resource(KEY, "u1")
    world.put(uid="u2")
    world.loop = world.successor()
    assert await world.poll() == ["list"]
    world.slices.routes.clear()
    assert await world.poll(after=300) == ["list", "create"]


async def test_an_invalid_spec_changes_nothing(world: World) -> None:
    await world.poll()
    world.put(version="2", generation=2, minReplicas=-1)
    assert await world.poll() == []
    world.put(version="3", generation=3, minReplicas=1)
    assert await world.poll() == ["delete"]


async def test_an_error_is_retried_later_and_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.poll(after=0)
    world.gateways.pop()
    world.slices.error = Unavailable("it is away")
    assert await world.poll() == ["force"]
    assert await world.poll() == []
    assert await world.poll(after=10) == ["force"]
    assert caplog.text.count("wake route of its Service failed") == 1
    world.slices.error = None
    assert await world.poll(after=11) == ["force"]


async def test_each_outage_of_a_route_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.poll(after=0)
    for _ in range(2):
        world.gateways.append(GatewayAddress(f"10.0.1.{len(world.gateways)}", 8001))
        world.slices.error = Unavailable("it is away")
        for _ in range(3):
            assert await world.poll(after=11) == ["force"]
        world.slices.error = None
        assert await world.poll(after=11) == ["force"]
    assert caplog.text.count("wake route of its Service failed") == 2


async def test_each_outage_of_listing_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        world.slices.error = Unavailable("it is away")
        for _ in range(3):
            assert await world.poll(after=300) == ["list"]
        world.slices.error = None
        assert "list" in await world.poll(after=300)
    assert caplog.text.count("listing EndpointSlices failed") == 2


async def test_no_wake_routes_without_the_permission(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.slices.error = Forbidden("no")
    assert await world.poll() == ["list"]
    assert await world.poll() == []
    assert await world.poll(after=10) == ["list"]
    assert caplog.text.count("check the operator's role") == 1


async def test_forbidden_namespace_affects_no_other(world: World) -> None:
    world.slices.error = PartlyForbidden("no", namespaces=frozenset({"other"}))
    assert await world.poll() == ["list", "create"]
