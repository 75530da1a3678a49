"""A rollout that waits for a slot, or is paused by its spec: scaled in the meantime, reported, and started later."""

from dataclasses import replace
from typing import Any

import pytest

from quire_operator.deployment.pod_template import Images
from quire_operator.kube.errors import Refused
from quire_operator.kube.objects import Key, Owner, Ref

DEPLOYMENT = Ref("Deployment", "chat")
OTHER = Key("prod", "other")


@pytest.fixture
async def upgraded(world: Any) -> Any:
    """Return a world with two serving LLMDeployments; a new operator takes over, and the other one already rolls."""
    world.apply(replicas=2)
    await world.serve()
    (key,) = world.cluster.resources
    live = world.cluster.children[DEPLOYMENT]
    assert live.deployment is not None
    world.start(images=Images(engine="engine:2"), max_concurrent_rollouts=1)
    world.store.put_resource(replace(world.cluster.resources[key], key=OTHER, uid="other"))
    owner = Owner(kind="LLMDeployment", name=OTHER.name, uid="other")

    def other_rolls(is_rolling: bool, version: str) -> None:
        state = replace(live.deployment, updated=1 if is_rolling else 2)
        child = replace(
            live, ref=Ref("Deployment", OTHER.name), uid="d", version=version, owner=owner, deployment=state
        )
        world.store.put_child(OTHER, child)

    world.other_rolls = other_rolls
    other_rolls(True, "5000")
    return world


def deployment(world: Any) -> dict[str, Any]:
    spec = world.cluster.manifests[DEPLOYMENT].body["spec"]
    (engine,) = spec["template"]["spec"]["containers"]
    return {"image": engine["image"], "paused": spec.get("paused", False), "replicas": spec["replicas"]}


async def test_a_rollout_waits_for_a_slot_while_it_serves(upgraded: Any) -> None:
    await upgraded.settle()
    assert deployment(upgraded) == {"image": "engine:2", "paused": True, "replicas": 2}
    assert upgraded.condition("Ready") == "True Serving"
    assert upgraded.condition("Progressing") == "True RolloutQueued"
    assert "prod/other" in upgraded.message("Progressing")
    assert await upgraded.reconciler.reconcile(Key("prod", "chat")) == 30.0

    upgraded.other_rolls(False, "6000")
    await upgraded.settle()
    assert deployment(upgraded) == {"image": "engine:2", "paused": False, "replicas": 2}


async def test_a_changed_spec_does_not_wait(upgraded: Any) -> None:
    await upgraded.settle()
    upgraded.apply(replicas=3)
    await upgraded.settle()
    assert deployment(upgraded) == {"image": "engine:2", "paused": False, "replicas": 3}


async def test_a_changed_spec_that_was_refused_does_not_wait(upgraded: Any) -> None:
    """The status of the refused pass has the generation of the spec, which was applied to no replica yet."""
    upgraded.cluster.errors["update Deployment chat"] = [Refused("denied by a policy")]
    upgraded.apply(replicas=2, engine={"image": "engine:3"})
    await upgraded.reconciler.reconcile(Key("prod", "chat"))
    assert upgraded.condition("Ready") == "False InvalidSpec"
    upgraded.clock.time += 60.0
    await upgraded.settle()
    assert deployment(upgraded) == {"image": "engine:3", "paused": False, "replicas": 2}


async def test_a_paused_spec_is_scaled_and_replaces_nothing(world: Any) -> None:
    world.apply(replicas=2)
    await world.settle()
    world.run_replicas()
    world.apply(replicas=3, paused=True, engine={"image": "engine:3"})
    await world.settle()
    assert deployment(world) == {"image": "engine:3", "paused": True, "replicas": 3}
    assert world.condition("Progressing") == "True Paused"
    world.apply(replicas=3, engine={"image": "engine:3"})
    await world.settle()
    assert deployment(world)["paused"] is False


async def test_a_paused_spec_still_gets_its_first_replicas(world: Any) -> None:
    world.apply(replicas=2, paused=True)
    await world.settle(passes=1)
    assert deployment(world)["paused"] is False


async def test_removed_field_of_a_stored_object_is_only_reported(world: Any) -> None:
    """Users of an earlier version keep their replicas, which are scaled and replaced as without the field."""
    windows = {"windows": [{"cron": "0 2 * * *", "duration": "2h"}]}
    world.apply(replicas=2, rollout=windows)
    await world.settle()
    world.run_replicas()
    await world.settle()
    assert (world.condition("Ready"), world.condition("Degraded")) == ("True Serving", "True RemovedField")
    assert world.message("Degraded").startswith("spec.rollout.windows: was removed: rollouts start at once.")

    world.apply(replicas=5, rollout=windows, engine={"image": "engine:3"})
    await world.settle()
    assert deployment(world) == {"image": "engine:3", "paused": False, "replicas": 5}

    world.apply(replicas=5, rollout={}, engine={"image": "engine:3"})
    await world.settle()
    assert world.condition("Degraded") == "False AsExpected"
