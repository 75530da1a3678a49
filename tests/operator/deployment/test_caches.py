"""The claim that caches a model: refused where replicas cannot share it, and kept where that is requested."""

from dataclasses import replace
from typing import Any

from quire_operator.deployment import controller as controller_module
from quire_operator.kube.objects import Key, Ref

KEY = Key("prod", "chat")
CLAIM, DEPLOYMENT = Ref("PersistentVolumeClaim", "chat-models"), Ref("Deployment", "chat")
CANARY = Ref("Deployment", "chat-canary")


def cached(**cache: str) -> dict[str, Any]:
    return {"source": "hf://org/model", "cache": {"size": "1Gi"} | cache}


async def test_several_replicas_of_one_readwriteonce_claim_are_refused(world: Any) -> None:
    world.apply(model=cached(), replicas=2)
    await world.settle()
    assert world.condition("Ready") == "False InvalidSpec"
    assert world.message("Ready").startswith("spec.model.cache.accessMode: ")
    assert world.condition("Stalled") == "True InvalidSpec"
    assert world.cluster.children == {}

    world.apply(model=cached(accessMode="ReadWriteMany"), replicas=2)
    assert f"create {DEPLOYMENT}" in await world.settle()


async def test_canary_that_may_not_mount_the_claim_is_refused(world: Any) -> None:
    world.apply(model=cached(), rollout={"strategy": "Canary"})
    await world.settle()
    assert world.condition("Ready") == "False InvalidSpec"
    assert "spec.rollout.strategy to RollingUpdate" in world.message("Ready")


async def test_canary_with_a_claim_that_it_cannot_share_is_refused(world: Any) -> None:
    canary = {"strategy": "Canary"}
    world.apply(rollout=canary)
    await world.settle()
    world.run_replicas()
    world.apply(model=cached(), rollout=canary)
    await world.settle()
    assert world.condition("Ready") == "False InvalidSpec" and CANARY not in world.cluster.children


async def test_in_place_rollout_message_warns_of_interruption(world: Any) -> None:
    """With a surge, old and new replica would wait for each other if the new one is on another node."""
    world.apply(model=cached())
    await world.serve()
    world.apply(model=cached(), engine={"maxSequences": 8})
    await world.settle()
    assert world.condition("Progressing") == "True RollingOut"
    assert "the old replica is stopped before the new one starts" in world.message("Progressing")


async def test_children_of_an_older_operator_stay_until_changed(world: Any, monkeypatch: Any) -> None:
    with monkeypatch.context() as older:
        older.setattr(controller_module, "cache_refusal", lambda spec, was_let_in: (None, None))
        world.apply(model=cached(), autoscaling={"maxReplicas": 3})
        await world.settle()
        world.run_replicas()
    world.restart()
    await world.settle()
    assert world.condition("Ready") == "True Serving"
    assert world.condition("Degraded") == "True CacheNotShared"
    world.reconciler.scaling.scale(KEY, replicas=2, victims=())
    assert f"update {DEPLOYMENT}" in await world.settle(), "it is still scaled"

    world.apply(model=cached(), autoscaling={"maxReplicas": 4})
    await world.settle()
    assert world.condition("Ready") == "False InvalidSpec"
    assert world.cluster.children[DEPLOYMENT].deployment.replicas_asked == 2, "and its replicas stay"


async def test_retained_claim_has_no_owner_and_is_adopted_again(world: Any) -> None:
    world.apply(model=cached(retain="Retain"))
    await world.settle()
    assert world.cluster.children[CLAIM].owner_uids == set()
    uid = world.cluster.children[CLAIM].uid
    world.delete()
    await world.settle()
    assert list(world.cluster.children) == [CLAIM]

    world.apply(uid="uid-2", model=cached(retain="Retain"))
    await world.settle()
    assert world.condition("Ready") == "False Starting"
    assert (world.cluster.children[CLAIM].uid, world.cluster.children[CLAIM].owner_uids) == (uid, set())


async def test_retention_changes_with_the_spec(world: Any) -> None:
    world.apply(model=cached())
    await world.settle()
    assert world.cluster.children[CLAIM].owner_uids == {"uid-1"}
    world.apply(model=cached(retain="Retain"))
    assert f"update {CLAIM}" in await world.settle()
    assert world.cluster.children[CLAIM].owner_uids == set()
    world.apply(model=cached(retain="Delete"))
    await world.settle()
    assert world.cluster.children[CLAIM].owner_uids == {"uid-1"}


async def test_retained_claim_stays_when_the_cache_is_removed(world: Any) -> None:
    world.apply(model=cached(retain="Retain"))
    await world.settle()
    world.apply(model={"source": "hf://org/model"})
    assert f"delete {CLAIM}" not in await world.settle()


async def test_claim_of_another_client_is_not_adopted(world: Any) -> None:
    world.apply(model=cached(retain="Retain"))
    await world.settle()
    world.delete()
    world.cluster.children[CLAIM] = replace(world.cluster.children[CLAIM], fingerprint="", version="900")
    world.apply(uid="uid-2", model=cached(retain="Retain"))
    await world.settle()
    assert world.condition("Ready") == "False NameConflict"
