"""The reconcile of replicas that are groups of pods: a missing kind, the Secret, the order of writes, a departure."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quire_operator.deployment.manifests import ClusterFeatures
from quire_operator.kube.errors import Forbidden, Refused
from quire_operator.kube.objects import ContainerState, Key, Pod, Ref

KEY = Key("prod", "chat")
GROUPS, DEPLOYMENT = Ref("LeaderWorkerSet", "chat-group"), Ref("Deployment", "chat")
SHAPE = {"tensor": 2, "nodes": 2}
SERVED = ClusterFeatures(served_kinds=frozenset({"LeaderWorkerSet"}))
MakePod = Callable[..., Pod]


def run_groups(world: Any, pod: MakePod, number: int) -> None:
    """Let the controller run as many groups."""
    world.cluster.pods = {f"l{index}": pod(f"l{index}", group=str(index)) for index in range(number)}
    world.run_replicas(GROUPS)


@pytest.fixture
async def grouped(world: Any, pod: MakePod) -> Any:
    """Return a world with two groups that are ready."""
    world.features = SERVED
    world.apply(replicas=2, parallelism=SHAPE)
    await world.settle()
    run_groups(world, pod, 2)
    await world.settle()
    return world


def secrets_of(world: Any) -> list[str]:
    return sorted(world.cluster.secrets)


async def test_missing_kind_blocks_everything_until_it_appears(world: Any) -> None:
    world.apply(parallelism=SHAPE)
    assert await world.settle() == ["status", "event LeaderWorkerSetMissing"]
    assert world.condition("Ready") == "False LeaderWorkerSetMissing"
    assert world.condition("Stalled") == "True LeaderWorkerSetMissing"

    world.features = SERVED
    asked = await world.settle(passes=1)

    assert [write for write in asked if not write.startswith(("event", "status"))] == [
        "check Deployment chat-group",
        f"create Secret {secrets_of(world)[0]}",
        "create ServiceAccount chat",
        "create Service chat",
        "create Service chat-headless",
        "create PodDisruptionBudget chat",
        "create LeaderWorkerSet chat-group",
    ]


async def test_settled_groups_see_no_writes(grouped: Any) -> None:
    assert grouped.condition("Ready") == "True Serving"
    grouped.clock.time += 3600
    assert await grouped.settle() == []


async def test_groups_are_read_again_while_they_are_not_ready(world: Any, pod: MakePod) -> None:
    world.features = SERVED
    world.apply(parallelism=SHAPE)
    await world.settle()
    await world.rest()
    assert await world.reconciler.reconcile(KEY) == 3.0
    run_groups(world, pod, 1)
    for leader in world.cluster.pods.values():
        world.store.put_pod(KEY, leader)
    assert await world.reconciler.reconcile(KEY) is None, "no watch showed it: the pass has read it"
    assert world.condition("Ready") == "True Serving"


async def test_each_revision_has_a_secret_that_is_never_shown(grouped: Any) -> None:
    (first,) = secrets_of(grouped)
    body: Any = grouped.cluster.secrets[first].body
    value = body["stringData"]["secret"]
    assert len(value) >= 40 and body["immutable"] is True
    assert [(o["name"], o["uid"]) for o in body["metadata"]["ownerReferences"]] == [("chat", "uid-1")]

    grouped.apply(replicas=2, parallelism=SHAPE, engine={"maxSequences": 4})
    await grouped.settle()

    assert len(secrets_of(grouped)) == 2
    values = {str(grouped.cluster.secrets[name].body["stringData"]["secret"]) for name in secrets_of(grouped)}
    assert len(values) == 2
    written = repr([grouped.cluster.statuses, grouped.cluster.events, grouped.cluster.manifests, grouped.cluster.asked])
    assert not [secret for secret in values if secret in written]


async def test_scaling_runs_no_trial_and_renews_no_secret(grouped: Any) -> None:
    grouped.apply(replicas=3, parallelism=SHAPE)
    asked = await grouped.settle(passes=1)
    assert [write for write in asked if "Secret" in write or "check" in write or "update" in write] == [
        "update LeaderWorkerSet chat-group"
    ]


async def test_next_leader_applies_once_and_keeps_the_secret(grouped: Any) -> None:
    (name,) = secrets_of(grouped)
    before = grouped.cluster.secrets[name]
    grouped.restart()
    asked = await grouped.settle()
    assert asked.count("update LeaderWorkerSet chat-group") == 1
    assert grouped.cluster.secrets == {name: before}


async def test_deleted_secret_is_created_again(grouped: Any, pod: MakePod) -> None:
    (name,) = secrets_of(grouped)
    grouped.cluster.secrets.clear()
    waiting = ContainerState(
        name="engine",
        init=False,
        ready=False,
        restarts=0,
        waiting_reason="CreateContainerConfigError",
        waiting_message=f'secret "{name}" not found',
    )
    grouped.cluster.pods = {"w": pod("w", ready=False, is_worker=True, group="0", containers=(waiting,))}
    assert f"create Secret {name}" in await grouped.settle(passes=1)


@pytest.mark.parametrize(
    ("write", "error", "reason"),
    [
        ("check Deployment chat-group", Refused("no such field"), "InvalidSpec"),
        ("secret", Forbidden("may not create secrets"), "Forbidden"),
    ],
)
async def test_rejections_are_reported_and_nothing_is_created(
    world: Any, write: str, error: Exception, reason: str
) -> None:
    world.features = SERVED
    world.apply(parallelism=SHAPE)
    await world.settle(passes=0)
    name = "check Deployment chat-group"
    if write == "secret":
        other = type(world)()
        other.features = SERVED
        other.apply(parallelism=SHAPE)
        await other.settle()
        name = f"create Secret {secrets_of(other)[0]}"
    world.cluster.errors[name] = [error]
    await world.settle(passes=1)
    assert world.condition("Ready") == f"False {reason}"
    assert GROUPS not in world.cluster.children


async def test_victims_are_left_to_the_controller(grouped: Any, pod: MakePod) -> None:
    """LeaderWorkerSets remove the highest index, and ignore the cost of deleting a pod."""
    grouped.cluster.pods = {f"l{number}": pod(f"l{number}", group=str(number)) for number in range(2)}
    grouped.apply(replicas=2, parallelism=SHAPE, autoscaling={"minReplicas": 1, "maxReplicas": 2})
    await grouped.settle()
    grouped.reconciler.scaling.scale(KEY, replicas=1, victims=("l0",))
    assert not [write for write in await grouped.settle() if write.startswith("costs")]


async def test_workers_are_not_counted_as_replicas(grouped: Any, pod: MakePod) -> None:
    grouped.cluster.pods = {
        "chat-group-0": pod("chat-group-0", group="0"),
        "chat-group-0-1": pod("chat-group-0-1", group="0", is_worker=True),
    }
    grouped.show()
    assert [found.name for found in grouped.store.pods(KEY)] == ["chat-group-0"]
    assert [found.name for found in grouped.store.workers(KEY)] == ["chat-group-0-1"]


async def test_paused_groups_are_scaled_with_the_previous_template(grouped: Any) -> None:
    grouped.apply(replicas=3, parallelism=SHAPE, engine={"maxSequences": 4}, paused=True)
    await grouped.settle(passes=1)
    body: Any = grouped.cluster.manifests[GROUPS].body
    assert body["spec"]["replicas"] == 3
    assert body["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]["partition"] == 2**31 - 1
    assert grouped.condition("Progressing").endswith("Paused")


async def test_policy_outlives_the_groups_of_a_deleted_llmdeployment(grouped: Any, pod: MakePod) -> None:
    grouped.features = replace(SERVED, network_peers=({"podSelector": {}},))
    await grouped.settle()
    grouped.cluster.pods = {"l": pod("l", group="0"), "w": pod("w", group="0", is_worker=True)}
    grouped.show()
    grouped.delete()
    assert await grouped.settle() == ["update NetworkPolicy chat"]
    policy: Any = grouped.cluster.manifests[Ref("NetworkPolicy", "chat")].body
    assert {owner["name"] for owner in policy["metadata"]["ownerReferences"]} == {"l", "w"}
    # Nothing says any more whether the pods have GPUs, whose connections have ports that the kernel chooses.
    assert policy["spec"]["ingress"][1]["ports"] == [{"protocol": "TCP"}]


async def test_deleted_groups_are_created_again(grouped: Any) -> None:
    del grouped.cluster.children[GROUPS]
    await grouped.reconciler.reconcile(KEY)
    assert GROUPS in grouped.cluster.children
