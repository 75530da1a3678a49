"""A rollout that waits for a slot, or is paused by its spec: scaled in the meantime, reported, and started later."""

from dataclasses import replace
from typing import Any

import pytest

from quire_operator.domain.cluster_state.observed import Key, Owner, Ref
from quire_operator.domain.manifests.pod_template import Images
from quire_operator.ports import Refused

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


WINDOWS = {"windows": [{"cron": "0 2 * * *", "duration": "2h"}]}
MIDNIGHT = 1_772_409_600.0
"""2026-03-02T00:00:00Z."""


@pytest.fixture
async def outside(world: Any) -> Any:
    """One LLMDeployment that serves and has got another engine outside its window."""
    world.clock.time = MIDNIGHT
    world.apply(replicas=2, rollout=WINDOWS)
    await world.settle()
    world.run_replicas()
    world.apply(replicas=2, rollout=WINDOWS, engine={"image": "engine:3"})
    await world.settle()
    return world


async def test_changed_engine_waits_for_the_window(outside: Any) -> None:
    assert deployment(outside) == {"image": "engine:3", "paused": True, "replicas": 2}
    assert outside.condition("Ready") == "True Serving"
    assert outside.condition("Progressing") == "True OutsideRolloutWindow"
    assert "2026-03-02T02:00:00Z" in outside.message("Progressing")
    assert await outside.reconciler.reconcile(Key("prod", "chat")) == 7200.0
    outside.clock.time += 7000
    assert await outside.settle() == [], "waiting causes no write"

    outside.clock.time = MIDNIGHT + 7200
    await outside.settle()
    assert deployment(outside)["paused"] is False


async def test_rollout_that_has_started_outlasts_its_window(outside: Any) -> None:
    outside.clock.time = MIDNIGHT + 7200
    await outside.settle()
    outside.change_deployment(updated=1)
    outside.clock.time = MIDNIGHT + 6 * 3600
    await outside.settle()
    assert deployment(outside)["paused"] is False


async def test_scaling_does_not_wait_for_the_window(outside: Any) -> None:
    outside.apply(replicas=5, rollout=WINDOWS, engine={"image": "engine:3"})
    await outside.settle()
    assert deployment(outside) == {"image": "engine:3", "paused": True, "replicas": 5}


async def test_new_operator_keeps_the_rollout_waiting(outside: Any) -> None:
    outside.restart()
    await outside.settle()
    assert deployment(outside)["paused"] is True


@pytest.mark.parametrize("way", ["annotation", "no windows", "no ready replica"])
async def test_urgent_rollout_starts_outside_its_window(outside: Any, way: str) -> None:
    key = Key("prod", "chat")
    if way == "annotation":
        digest = outside.message("Progressing").rpartition("quire.dev/rollout-now=")[2]
        resource = outside.cluster.resources[key]
        outside.cluster.resources[key] = replace(resource, rollout_now=digest, version=outside.cluster._next())
    elif way == "no windows":
        outside.apply(replicas=2, engine={"image": "engine:3"})
    else:
        outside.change_deployment(ready=0, available=0)
    await outside.settle()
    assert deployment(outside)["paused"] is False


async def test_annotation_does_not_start_the_rollout_after_it(outside: Any) -> None:
    key = Key("prod", "chat")
    digest = outside.message("Progressing").rpartition("quire.dev/rollout-now=")[2]
    outside.apply(replicas=2, rollout=WINDOWS, engine={"image": "engine:4"})
    outside.cluster.resources[key] = replace(outside.cluster.resources[key], rollout_now=digest)
    await outside.settle()
    assert deployment(outside) == {"image": "engine:4", "paused": True, "replicas": 2}
