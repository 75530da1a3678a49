"""The NetworkPolicy of an LLMDeployment that is deleted: it stays until the last pod has drained."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quire_operator.deployment.manifests import ClusterFeatures
from quire_operator.kube.errors import Unavailable
from quire_operator.kube.objects import Key, Pod, Ref

KEY = Key("prod", "chat")
POLICY, BUDGET = Ref("NetworkPolicy", "chat"), Ref("PodDisruptionBudget", "chat")
MadePod = Callable[..., Pod]


@pytest.fixture
async def served(world: Any, pod: MadePod) -> Any:
    """Return a world with two replicas that only the peers may reach."""
    world.features = ClusterFeatures(network_peers=({"podSelector": {}},))
    world.apply(replicas=2)
    await world.settle()
    world.cluster.pods = {name: pod(name) for name in ("a", "b")}
    world.show()
    return world


def drain(world: Any, *names: str) -> None:
    for name in names:
        found = world.cluster.pods[name]
        world.cluster.pods[name] = replace(found, deleting=True, version=world.cluster._next())


async def test_policy_outlives_the_llmdeployment_while_pods_drain(served: Any) -> None:
    served.delete()
    drain(served, "a", "b")
    assert BUDGET not in served.cluster.children, "an eviction ignores the budgets of pods that terminate"

    assert await served.settle() == ["update NetworkPolicy chat"], "once, and then there is nothing to do"

    policy = served.cluster.children[POLICY]
    assert (policy.owner, policy.owner_uids) == (None, {"a", "b"})


async def test_policy_is_deleted_when_no_pod_remains(served: Any) -> None:
    served.delete()
    served.cluster.pods.clear()

    assert await served.settle() == ["delete NetworkPolicy chat"]

    assert served.cluster.children == {}


async def test_policy_of_an_orphaned_deployment_stays_with_it(served: Any) -> None:
    """As by ``kubectl delete --cascade=orphan``."""
    deployment = served.cluster.children[Ref("Deployment", "chat")]
    served.delete()
    served.cluster.children[deployment.ref] = replace(deployment, owner=None, owner_uids=frozenset())
    served.cluster.pods.clear()

    assert await served.settle() == ["update NetworkPolicy chat"]

    assert served.cluster.children[POLICY].owner_uids == {deployment.uid}


async def test_later_pod_is_added_as_an_owner(served: Any, pod: MadePod) -> None:
    served.delete()
    await served.settle()
    served.cluster.pods["c"] = pod("c")

    assert await served.settle() == ["update NetworkPolicy chat"]

    assert served.cluster.children[POLICY].owner_uids == {"a", "b", "c"}


async def test_new_llmdeployment_of_the_name_adopts_the_policy(served: Any) -> None:
    served.delete()
    await served.settle()
    served.apply(uid="uid-2", replicas=1)

    assert "update NetworkPolicy chat" in await served.settle()

    assert served.cluster.children[POLICY].owner_uids == set()
    assert served.condition("Degraded") == "False AsExpected"


async def test_policy_that_is_switched_off_is_deleted(served: Any) -> None:
    served.features = ClusterFeatures()

    assert "delete NetworkPolicy chat" in await served.settle()

    assert POLICY not in served.cluster.children


async def test_policy_of_a_deployment_unknown_to_watches_stays(served: Any) -> None:
    served.store.drop_resource(KEY, "uid-1")

    await served.reconciler.reconcile(KEY)

    assert served.enqueued[-1] == KEY and POLICY in served.cluster.children
    assert served.store.resource(KEY) is not None


async def test_failed_write_is_retried(served: Any) -> None:
    served.cluster.errors["update NetworkPolicy chat"] = [Unavailable("it hangs")]
    served.delete()
    with pytest.raises(Unavailable):
        await served.settle()

    assert await served.settle() == ["update NetworkPolicy chat"]


async def test_foreign_policy_is_left_unchanged(served: Any) -> None:
    theirs = replace(served.cluster.children[POLICY], fingerprint="", version=served.cluster._next())
    served.delete()
    served.cluster.children[POLICY] = theirs
    served.cluster.pods.clear()

    assert await served.settle() == []
