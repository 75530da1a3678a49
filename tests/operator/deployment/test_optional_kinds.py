"""Kinds that appear and disappear: dependent children follow, and nothing else is affected."""

from dataclasses import replace
from typing import Any

import pytest

from quire_operator.deployment.desired import OPTIONAL_KINDS
from quire_operator.deployment.manifests import ClusterFeatures, Monitoring
from quire_operator.deployment.observe import OptionalKinds
from quire_operator.kube.errors import Forbidden, NotFound, Refused, Unavailable
from quire_operator.kube.objects import Ref

MONITOR, RULE = Ref("PodMonitor", "chat"), Ref("PrometheusRule", "chat")
AUTOSCALED = {"autoscaling": {"maxReplicas": 3}}


@pytest.fixture
def kinds(world: Any) -> OptionalKinds:
    """Return the kinds found by a refresh, as ``app`` has them."""
    found = OptionalKinds(world.view)

    def features() -> ClusterFeatures:
        return ClusterFeatures(monitoring=Monitoring(), served_kinds=found.served)

    world.reconciler._features = features
    return found


async def create_monitored(world: Any, kinds: OptionalKinds) -> None:
    """Create an LLMDeployment with autoscaling where all kinds are served."""
    world.cluster.kinds = OPTIONAL_KINDS
    world.apply(**AUTOSCALED)
    await kinds.refresh()
    await world.settle()


async def test_optional_children_appear_with_their_kinds(world: Any, kinds: OptionalKinds) -> None:
    world.apply(**AUTOSCALED)
    await kinds.refresh()
    asked = await world.settle()
    assert not [write for write in asked if "Monitor" in write or "Rule" in write]
    world.cluster.kinds = OPTIONAL_KINDS
    world.enqueued.clear()
    await kinds.refresh()
    assert world.enqueued == [world.store.live_keys()[0]]
    assert await world.settle() == [f"create {MONITOR}", f"create {RULE}"]
    world.enqueued.clear()
    await kinds.refresh()
    assert world.enqueued == [] and await world.settle() == [], "and then it is quiet"


async def test_deleted_monitor_is_recreated_at_the_next_refresh(world: Any, kinds: OptionalKinds) -> None:
    await create_monitored(world, kinds)
    del world.cluster.children[MONITOR]
    world.enqueued.clear()
    await kinds.refresh()
    assert world.enqueued
    assert await world.settle() == [f"create {MONITOR}"]


async def test_rule_is_removed_with_its_autoscaling(world: Any, kinds: OptionalKinds) -> None:
    await create_monitored(world, kinds)
    world.apply(replicas=2)
    assert f"delete {RULE}" in await world.settle()
    assert MONITOR in world.cluster.children


async def test_removed_kinds_affect_no_other_child(world: Any, kinds: OptionalKinds) -> None:
    await create_monitored(world, kinds)
    world.cluster.kinds = frozenset()
    for ref in (MONITOR, RULE):
        del world.cluster.children[ref]
    await kinds.refresh()
    assert kinds.served == frozenset()
    assert await world.settle() == []
    assert world.condition("Degraded") == "False AsExpected"


async def test_removed_kind_fails_only_its_objects_until_refreshed(world: Any, kinds: OptionalKinds) -> None:
    world.cluster.kinds = OPTIONAL_KINDS
    world.apply(**AUTOSCALED)
    await kinds.refresh()
    world.cluster.errors = {f"create {ref}": [NotFound("no such kind")] * 9 for ref in (MONITOR, RULE)}
    asked = await world.settle(passes=2)
    assert "create Deployment chat" in asked and asked[-1].startswith(("status", "event"))
    assert world.condition("Degraded") == "False AsExpected"


@pytest.mark.parametrize(
    ("error", "reason"), [(Refused("the webhook says no"), "InvalidSpec"), (Forbidden("no right"), "Forbidden")]
)
async def test_failed_optional_child_degrades_but_stays_ready(
    world: Any, kinds: OptionalKinds, error: Exception, reason: str
) -> None:
    world.cluster.kinds = OPTIONAL_KINDS
    await kinds.refresh()
    world.cluster.errors = {f"create {RULE}": [error] * 9}
    world.apply(**AUTOSCALED)
    await world.serve()
    assert (world.condition("Ready"), world.condition("Degraded")) == ("True Serving", f"True {reason}")
    assert str(error) in world.message("Degraded")


async def test_foreign_rule_of_the_name_is_reported_and_kept(world: Any, kinds: OptionalKinds) -> None:
    await create_monitored(world, kinds)
    world.run_replicas()
    theirs = replace(world.cluster.children[RULE], owner=None, version=world.cluster._next(), uid="theirs")
    world.cluster.children[RULE] = theirs
    world.restart()
    world.reconciler._features = lambda: ClusterFeatures(monitoring=Monitoring(), served_kinds=OPTIONAL_KINDS)
    await world.settle()
    assert world.condition("Ready") == "True Serving" and world.condition("Degraded") == "True NameConflict"
    assert world.cluster.children[RULE] == theirs


@pytest.mark.parametrize("error", [Unavailable("away"), Forbidden("no")])
async def test_failed_refresh_changes_nothing_and_is_logged_once(
    world: Any, kinds: OptionalKinds, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    world.cluster.kinds = OPTIONAL_KINDS
    for _ in range(2):  # each outage has its own line in the log
        await kinds.refresh()
        world.cluster.errors["served kinds"] = [error, error]
        await kinds.refresh()
        await kinds.refresh()
    assert kinds.served == OPTIONAL_KINDS
    assert caplog.text.count("could not look for") == 2


async def test_monitors_are_deleted_when_switched_off(world: Any, kinds: OptionalKinds) -> None:
    await create_monitored(world, kinds)
    world.reconciler._features = lambda: ClusterFeatures(served_kinds=OPTIONAL_KINDS)
    assert sorted(await world.settle()) == [f"delete {MONITOR}", f"delete {RULE}"]
