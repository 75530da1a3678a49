"""Several LLMDeployments with one served name: who has it, who is notified, and that nothing else is affected."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.served_names import Claim, NameScope
from quire_operator.deployment.served_names import conflict, recorded_claim, wanted_claim
from quire_operator.kube.objects import Key, Ref, Resource

KEY, OTHER = Key("prod", "chat"), Key("team", "talk")
CREATED = "2026-01-02T00:00:00Z"
"""The creation time of ``KEY``."""
OLDER, YOUNGER = "2026-01-01T00:00:00Z", "2026-01-03T00:00:00Z"


def rival(since: str, *, key: Key = OTHER, name: str = "chat", version: str = "1") -> Resource:
    """Return another LLMDeployment with a recorded claim. Its spec is invalid, so that it has no children."""
    return Resource(
        key=key,
        uid="rival",
        version=version,
        generation=1,
        deleting=False,
        body={"spec": {"model": {"servedName": name}}},
        status={"observedGeneration": 1, "servedName": {"name": name, "since": since}},
        created=OLDER,
    )


def meet(world: Any, resource: Resource) -> None:
    """Create the other LLMDeployment."""
    world.cluster.resources[resource.key] = resource
    world.store.put_resource(resource)


def unreported(*, generation: int = 1, **fields: Any) -> Resource:
    """Return a resource as a user writes it."""
    return replace(rival(""), generation=generation, status={}, **fields)


async def test_younger_rival_gets_a_condition_and_keeps_serving(world: Any) -> None:
    world.apply()
    await world.serve()
    assert world.condition("Ready") == "True Serving"
    meet(world, rival(OLDER))
    assert await world.settle() == ["status", "event ServedNameConflict"], "reported once, and no child is changed"
    assert (world.condition("Ready"), world.condition("Degraded")) == (
        "False ServedNameConflict",
        "True ServedNameConflict",
    )
    assert world.condition("Available") == "True ReplicaReady"
    assert "requests for the model chat go to team/talk, which has served this name for longer" in world.message(
        "Ready"
    )


async def test_requests_held_for_the_older_do_not_wake_the_younger(world: Any) -> None:
    world.apply(autoscaling={"minReplicas": 0, "maxReplicas": 2})
    await world.settle()
    scaling = world.cluster_scaling()
    assert [subject.model for subject in scaling.subjects()] == ["chat"]
    meet(world, rival(OLDER))
    assert [subject.model for subject in scaling.subjects()] == [""]


async def test_conflict_ends_when_the_rival_is_deleted(world: Any) -> None:
    world.apply()
    meet(world, rival(OLDER))
    await world.serve()
    assert world.condition("Ready") == "False ServedNameConflict"
    await world.reconciler.reconcile(OTHER)
    del world.cluster.resources[OTHER]
    world.store.drop_resource(OTHER, "rival")
    world.enqueued.clear()
    await world.reconciler.reconcile(OTHER)  # as after the watch's event
    assert world.enqueued == [KEY]
    await world.settle()
    assert (world.condition("Ready"), world.condition("Degraded")) == ("True Serving", "False AsExpected")


async def test_older_resource_is_ready_and_enqueues_the_younger(world: Any) -> None:
    meet(world, rival(YOUNGER))
    world.apply()
    await world.settle()
    assert OTHER in world.enqueued
    world.enqueued.clear()
    world.run_replicas()
    await world.settle()
    assert world.condition("Ready") == "True Serving"
    assert world.enqueued == [], "nothing changed for the other"
    world.apply(model={"source": "file:///m", "servedName": "another"})
    await world.settle()
    assert world.enqueued == [OTHER], "the name is free"


async def test_new_leader_enqueues_rivals_again(world: Any) -> None:
    meet(world, rival(OLDER))
    await world.reconciler.reconcile(OTHER)
    world.apply()
    await world.settle()
    world.enqueued.clear()
    await world.reconciler.reconcile(OTHER)
    assert world.enqueued == [], "nothing changed"
    world.reconciler.forget()
    await world.reconciler.reconcile(OTHER)
    assert world.enqueued == [KEY]


async def test_other_served_name_is_no_conflict(world: Any) -> None:
    world.store.put_resource(rival(OLDER, name="Chat"))
    world.apply()
    await world.serve()
    assert world.condition("Ready") == "True Serving"


async def test_names_may_be_shared_without_a_common_gateway(world: Any) -> None:
    world.features = replace(world.features, served_names=None)
    meet(world, rival(OLDER))
    world.apply()
    await world.serve()
    assert world.condition("Ready") == "True Serving"


async def test_names_of_other_namespaces_do_not_compete(world: Any) -> None:
    world.features = replace(world.features, served_names=NameScope.NAMESPACED)
    meet(world, rival(OLDER))
    world.apply(autoscaling={"minReplicas": 0, "maxReplicas": 2})
    await world.settle()
    scaling = world.cluster_scaling()
    assert {subject.model for subject in scaling.subjects()} == {"prod/chat"}
    args = world.cluster.manifests[Ref("Deployment", "chat")].body["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--served-model-name") :][:3] == ["--served-model-name", "chat", "prod/chat"]
    neighbour = Key(KEY.namespace, "talk")
    world.store.put_resource(rival(OLDER, key=neighbour))
    await world.settle()
    assert world.condition("Ready") == "False ServedNameConflict"
    assert "requests for the model prod/chat go to prod/talk" in world.message("Ready")


async def test_edit_of_an_old_llmdeployment_takes_no_name(world: Any) -> None:
    """It was created before its rival, but claims the name since its edit."""
    world.apply(model={"source": "file:///m", "servedName": "mine"})
    await world.settle()
    assert world.status["servedName"] == {"name": "mine", "since": CREATED}
    meet(world, rival(YOUNGER))
    world.clock.time = 1_800_000_000.5
    world.apply(model={"source": "file:///m", "servedName": "chat"})
    await world.settle()
    assert world.status["servedName"] == {"name": "chat", "since": "2027-01-15T08:00:01Z"}
    assert world.condition("Ready") == "False ServedNameConflict"


async def test_invalid_spec_claims_its_name(world: Any) -> None:
    """Otherwise it could be kept and later made valid with any name and its old age."""
    world.apply(model={"source": "nonsense", "servedName": "mine"})
    await world.settle()
    assert world.condition("Ready") == "False InvalidSpec"
    assert world.status["servedName"]["name"] == "mine"


async def test_edited_status_is_restored_at_once_each_time(world: Any) -> None:
    """Other fields of a status that another client keeps writing are restored less and less often."""
    world.apply()
    await world.settle()
    rightful = world.status["servedName"]
    for _ in range(20):
        forged = {**world.status, "servedName": {"name": "theirs", "since": "2000-01-01T00:00:00Z"}}
        resource = world.cluster.resources[KEY]
        world.cluster.resources[KEY] = replace(resource, version=world.cluster._next(), status=forged)
        await world.settle(passes=1)
        assert world.status["servedName"] == rightful


@pytest.mark.parametrize(
    ("resource", "since"),
    [
        (unreported(), OLDER),
        # It was edited before the operator saw it, so its earlier name is unknown.
        (unreported(generation=2), "1970-01-01T00:00:10Z"),
        (replace(unreported(generation=2), status={"observedGeneration": 2}), OLDER),
        (rival(YOUNGER), YOUNGER),
        (replace(rival(YOUNGER, name="else"), body={"spec": {"model": {}}}), "1970-01-01T00:00:10Z"),
    ],
    ids=["new", "edited unseen", "of operator 0.1", "recorded", "renamed"],
)
def test_claim_time_is_the_earliest_proven_one(resource: Resource, since: str) -> None:
    claim = wanted_claim(resource, known=None, now=9.5)
    assert claim.since == since


def test_claims_are_dropped_with_their_llmdeployment(world: Any) -> None:
    store = world.store
    store.put_resource(rival(OLDER))
    store.put_resource(rival(OLDER, name="else", version="2"))
    assert store.claims("chat") == ()
    assert store.claim(OTHER) == recorded_claim(rival(OLDER, name="else"))
    store.drop_resource(OTHER, "rival")
    assert (store.claims("else"), store.claim(OTHER)) == ((), None)


@pytest.mark.parametrize("scope", list(NameScope))
@pytest.mark.parametrize("twice", [False, True])
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(0, 2)), min_size=1, unique=True))
def test_exactly_one_claimant_gets_the_name(scope: NameScope, twice: bool, asked: list[tuple[str, str, int]]) -> None:
    claims = [
        Claim(namespace=ns, deployment=name, name="m", since=f"2026-01-0{age + 1}T00:00:00Z")
        for ns, name, age in {(ns, name): (ns, name, age) for ns, name, age in asked}.values()
    ]
    served = [claim for claim in claims if conflict(claim, claims * (1 + twice), scope) is None]
    assert len(served) == len({claim.requested_as(scope) for claim in claims})
    for holder in served:
        rivals = [claim for claim in claims if claim.requested_as(scope) == holder.requested_as(scope)]
        assert all(holder.since <= claim.since for claim in rivals)
