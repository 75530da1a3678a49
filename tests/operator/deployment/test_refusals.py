"""Rejections by the API server: reported, retried after a while, and not blocking anything else."""

from dataclasses import replace
from typing import Any

import pytest

from quire_operator.kube.errors import ClusterError, Forbidden, QuotaExceeded, Refused
from quire_operator.kube.objects import Key, Ref
from quire_operator.kube.ownership import ForeignField

KEY = Key("prod", "chat")
DEPLOYMENT = Ref("Deployment", "chat")


async def test_refused_requests_are_repeated_later(world: Any) -> None:
    world.cluster.errors["create Deployment chat"] = [Refused("denied by a policy"), Refused("denied by a policy")]
    world.apply()
    assert await world.reconciler.reconcile(KEY) == 2.0, "the first pass has read nothing"
    world.clock.time += 2.0
    assert await world.reconciler.reconcile(KEY) == 58.0
    world.clock.time += 57.0
    assert await world.reconciler.reconcile(KEY) == 1.0
    assert world.cluster.asked.count("create Deployment chat") == 1
    world.clock.time += 1.0
    assert await world.reconciler.reconcile(KEY) == 60.0
    assert world.condition("Ready") == "False InvalidSpec"
    world.clock.time -= 9.0  # a clock that is set back makes no wait longer
    assert await world.reconciler.reconcile(KEY) is None
    assert world.condition("Ready") == "False Starting"


@pytest.mark.parametrize("error", [Forbidden("no right to patch"), QuotaExceeded("exceeded quota")])
async def test_sooner_retry_of_another_child_is_kept(world: Any, error: ClusterError) -> None:
    world.cluster.errors["create Service chat"] = [Refused("denied by a policy")]
    world.apply()
    await world.reconciler.reconcile(KEY)
    world.clock.time += 50.0
    world.cluster.errors["update Deployment chat"] = [error]
    world.apply(replicas=3)
    assert await world.reconciler.reconcile(KEY) == 10.0
    assert world.condition("Ready") == "False InvalidSpec"


async def test_later_response_replaces_a_refusal(world: Any) -> None:
    world.cluster.errors["create Deployment chat"] = [Refused("denied by a policy"), Forbidden("no right any more")]
    world.apply()
    await world.reconciler.reconcile(KEY)
    world.clock.time += 60.0
    assert await world.reconciler.reconcile(KEY) == 60.0
    assert world.condition("Ready") == "False Forbidden"


async def test_immutable_child_may_be_deleted_and_recreated(world: Any) -> None:
    claim = Ref("PersistentVolumeClaim", "chat-models")
    cached = {"source": "hf://org/model", "cache": {"size": "2Gi", "storageClassName": "slow"}}
    world.apply(model=cached)
    await world.settle()
    world.cluster.errors[f"update {claim}"] = [Refused("spec is immutable")]
    world.apply(model={**cached, "cache": {"size": "2Gi", "storageClassName": "fast"}})
    await world.settle()
    assert world.condition("Ready") == "False InvalidSpec"
    assert "spec is immutable; revert spec.model.cache, or delete the claim" in world.message("Ready")
    assert "kubectl delete pvc chat-models" in world.message("Ready")
    del world.cluster.children[claim]
    assert f"create {claim}" in await world.settle()
    assert world.condition("Ready") == "False Starting"


async def test_refused_deletion_is_reported_and_delays_nothing_else(world: Any) -> None:
    claim = Ref("PersistentVolumeClaim", "chat-models")
    world.apply(model={"source": "hf://org/model", "cache": {"size": "2Gi"}})
    await world.settle()
    world.cluster.errors[f"delete {claim}"] = [Refused("claims are not deleted here")]
    world.apply(model={"source": "hf://org/model"}, replicas=3)
    assert (await world.settle()).count(f"delete {claim}") == 1
    assert world.cluster.statuses[-1]["observedGeneration"] == 2 and world.cluster.statuses[-1]["desiredReplicas"] == 3
    assert world.condition("Ready") == "False Starting"
    assert world.condition("Degraded") == "True DeletionRefused"
    world.clock.time += 60.0
    await world.settle()
    assert claim not in world.cluster.children and world.condition("Degraded") == "False AsExpected"


async def test_additions_that_cannot_be_removed_are_reported(world: Any) -> None:
    world.apply()
    await world.settle()
    child = world.cluster.children[DEPLOYMENT]
    added = ForeignField(path=("f:spec", "f:template", "f:spec", "f:hostNetwork"), manager="kubectl-edit")
    world.cluster.children[DEPLOYMENT] = replace(child, version=world.cluster._next(), foreign=(added,))
    world.cluster.errors["remove-fields Deployment chat"] = [Refused("no")]
    assert (await world.settle()).count("remove-fields Deployment chat") == 1
    assert world.condition("Ready") == "False RemovalRefused"
    world.clock.time += 60.0
    await world.settle()
    assert world.condition("Degraded") == "False AsExpected"


@pytest.mark.parametrize("error", [Refused("a policy wants labels on pods"), Forbidden("no right to patch pods")])
async def test_fewer_replicas_are_requested_without_a_chosen_victim(world: Any, pod: Any, error: ClusterError) -> None:
    world.apply(replicas=3, autoscaling={"minReplicas": 1, "maxReplicas": 8})
    await world.settle()
    world.cluster.pods = {name: pod(name) for name in ("a", "b", "c")}
    world.cluster.errors["costs {'b': '-1000'}"] = [error]
    world.reconciler.scaling.scale(KEY, replicas=2, victims=["b"])
    await world.settle()
    assert world.cluster.children[DEPLOYMENT].deployment.replicas_asked == 2
