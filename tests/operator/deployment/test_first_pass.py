"""The first pass over an LLMDeployment reads no child, and changes no foreign object that has the name of one."""

from dataclasses import replace
from typing import Any

import pytest

from quire_common.model_memory import ModelFacts
from quire_operator.api import HubSource
from quire_operator.capacity.hub import HubReader, ModelUnknown
from quire_operator.kube.errors import Conflict, Refused, Throttled
from quire_operator.kube.objects import Key, Ref

KEY = Key("prod", "chat")
CHILDREN = [
    Ref("ServiceAccount", "chat"),
    Ref("Service", "chat"),
    Ref("Service", "chat-headless"),
    Ref("PodDisruptionBudget", "chat"),
    Ref("Deployment", "chat"),
]
IMAGE = {"source": "oci://registry.example/llama:1"}


class Hub:
    """``HubFacts`` that knows the commit of every model."""

    async def commit(self, source: HubSource) -> str:
        return 40 * "a"

    async def facts(self, source: HubSource) -> ModelFacts:
        raise ModelUnknown("it has no facts", unreachable=False)

    async def aclose(self) -> None: ...


@pytest.mark.parametrize(
    ("spec", "calls"),
    [
        ({}, [*(f"create {ref}" for ref in CHILDREN), "status"]),
        (
            {"autoscaling": {"minReplicas": 1, "maxReplicas": 3}},
            ["status", *(f"create {ref}" for ref in CHILDREN), "status"],
        ),
        (
            {
                "autoscaling": {"minReplicas": 1, "maxReplicas": 3},
                "rollout": {"strategy": "Canary"},
                "model": {"source": "hf://org/model"},
            },
            ["status", "create ControllerRevision", *(f"create {ref}" for ref in CHILDREN), "status"],
        ),
    ],
    ids=["fixed", "autoscaled", "autoscaled, with a canary and a moving model"],
)
async def test_new_one_costs_its_children_and_its_status(world: Any, spec: dict[str, Any], calls: list[str]) -> None:
    """One write of the status records all decisions before they are applied."""
    world.start(hub=HubReader(Hub(), now=world.clock))
    world.apply(**spec)
    asked = await world.settle(passes=2)
    assert [call.partition(" chat-" if "Revision" in call else "\n")[0] for call in asked] == calls
    assert world.cluster.read == []


async def test_first_status_follows_in_the_next_pass(world: Any) -> None:
    """When many are created together, the children of all come before the first status of any."""
    world.apply()
    assert await world.reconciler.reconcile(KEY) == 0.0, "soon, but after what waits already"
    assert world.status == {} and list(world.cluster.children) == CHILDREN
    assert await world.reconciler.reconcile(KEY) is None
    assert world.condition("Ready") == "False Starting"


async def test_child_that_was_deleted_later_is_read_before_it_is_created(world: Any) -> None:
    world.apply()
    await world.settle()
    del world.cluster.children[CHILDREN[1]]
    assert f"create {CHILDREN[1]}" in await world.settle(passes=1)
    assert world.cluster.read == [CHILDREN[1]]


async def test_pass_after_one_that_failed_reads_what_no_watch_shows(world: Any) -> None:
    world.cluster.errors[f"create {CHILDREN[2]}"] = [Throttled("slow down", after_seconds=None)]
    world.apply()
    with pytest.raises(Throttled):
        await world.reconciler.reconcile(KEY)
    await world.settle(passes=1)
    assert world.cluster.read == CHILDREN[2:]
    assert list(world.cluster.children) == CHILDREN


async def test_successor_reads_what_a_crash_left(world: Any) -> None:
    """The status was not written, but the watches show what was created."""
    world.cluster.errors[f"create {CHILDREN[2]}"] = [Throttled("slow down", after_seconds=None)]
    world.apply()
    with pytest.raises(Throttled):
        await world.reconciler.reconcile(KEY)
    world.restart()
    asked = await world.settle(passes=2)
    assert asked == [*(f"update {ref}" for ref in CHILDREN[:2]), *(f"create {ref}" for ref in CHILDREN[2:]), "status"]


@pytest.mark.parametrize("taken", CHILDREN, ids=str)
async def test_foreign_object_that_no_watch_shows_is_found_and_kept(world: Any, taken: Ref) -> None:
    foreign = await foreign_object(world, taken)
    with pytest.raises(Conflict):
        await world.reconciler.reconcile(KEY)
    await world.reconciler.reconcile(KEY)
    assert world.condition("Ready") == "False NameConflict" and str(taken) in world.message("Ready")
    assert world.cluster.children[taken] == foreign
    assert set(world.cluster.children) == {*CHILDREN[:-1], taken}, "the others are created, except the workload"


@pytest.mark.parametrize("taken", CHILDREN[:3], ids=str)
async def test_foreign_object_is_named_also_if_a_policy_protects_it(world: Any, taken: Ref) -> None:
    foreign = await foreign_object(world, taken)
    world.cluster.errors[f"create {taken}"] = [Refused("a policy denies it")]
    assert await world.reconciler.reconcile(KEY) == 2.0
    assert world.condition("Ready") == "False InvalidSpec"
    assert CHILDREN[-1] not in world.cluster.children, "its pods would use the foreign object"
    await world.reconciler.reconcile(KEY)
    assert world.condition("Ready") == "False NameConflict"
    assert world.cluster.children[taken] == foreign and CHILDREN[-1] not in world.cluster.children


async def test_foreign_deployment_is_read_before_image_volumes_are_tried(world: Any) -> None:
    taken = CHILDREN[-1]
    foreign = await foreign_object(world, taken, model=IMAGE)
    world.cluster.errors["image volumes"] = [Refused("the selector is immutable")]
    await world.reconciler.reconcile(KEY)
    assert taken in world.cluster.read
    assert world.condition("Ready") == "False NameConflict"
    assert world.cluster.children[taken] == foreign


async def foreign_object(world: Any, ref: Ref, **spec: Any) -> Any:
    """Apply an LLMDeployment while an object of another owner, without our label, has the name of a child."""
    world.apply()
    await world.settle()
    foreign = replace(world.cluster.children[ref], owner=None, fingerprint="", uid="theirs", version="900")
    world.delete()
    world.cluster.children = {ref: foreign}
    world.restart()
    world.apply(uid="uid-2", **spec)
    world.store.drop_child(KEY, ref, foreign.uid)  # no watch shows it
    return foreign
