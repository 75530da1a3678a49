"""Several that ask for one served name: who has it, who hears of it, and that nothing else of theirs suffers."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_operator.domain.cluster_state.observed import Child, Key, Owner, Ref
from quire_operator.domain.manifests.served_names import Claim, conflict, seniority
from quire_operator.scaling.cluster_scaling import ClusterScaling

KEY, OTHER = Key("prod", "chat"), Key("team", "talk")
OLDER, YOUNGER = "2026-01-01T00:00:00Z/u", "2026-01-03T00:00:00Z/u"


def rival_service(age: str, *, name: str = "chat", version: str = "1") -> Child:
    return Child(
        ref=Ref("Service", OTHER.name),
        uid="rival",
        version=version,
        owner=Owner(kind="LLMDeployment", name=OTHER.name, uid="uid-2"),
        deleting=False,
        fingerprint="",
        foreign=(),
        served_name=name,
        seniority=age,
    )


async def test_the_younger_is_told_whose_the_name_is_and_serves_on(world: Any) -> None:
    world.apply()
    await world.settle()
    world.run_replicas()
    await world.settle()
    assert world.condition("Ready") == "True Serving"
    world.store.put_child(OTHER, rival_service(OLDER))
    assert await world.settle() == ["status", "event ServedNameConflict"], "told once, and no child is touched"
    assert (world.condition("Ready"), world.condition("Degraded")) == (
        "False ServedNameConflict",
        "True ServedNameConflict",
    )
    assert world.condition("Available") == "True ReplicaReady"
    assert "requests for the model chat go to team/talk, which serves it and is older" in world.message("Ready")


async def test_requests_that_gateways_hold_for_the_older_do_not_wake_the_younger(world: Any) -> None:
    world.apply(autoscaling={"minReplicas": 0, "maxReplicas": 2})
    await world.settle()
    scaling = ClusterScaling(store=world.store, reconciler=world.reconciler)
    assert [subject.model for subject in scaling.subjects()] == ["chat"]
    world.store.put_child(OTHER, rival_service(OLDER))
    assert [subject.model for subject in scaling.subjects()] == [""]


async def test_it_recovers_when_the_other_goes(world: Any) -> None:
    world.apply()
    world.store.put_child(OTHER, rival_service(OLDER))
    await world.settle()
    world.run_replicas()
    await world.settle()
    assert world.condition("Ready") == "False ServedNameConflict"
    await world.reconciler.reconcile(OTHER)
    world.store.drop_child(OTHER, Ref("Service", OTHER.name), "rival")
    world.enqueued.clear()
    await world.reconciler.reconcile(OTHER)  # as the watch's event would have it
    assert world.enqueued == [KEY]
    await world.settle()
    assert (world.condition("Ready"), world.condition("Degraded")) == ("True Serving", "False AsExpected")


async def test_the_older_does_not_mind_and_tells_the_younger_of_itself(world: Any) -> None:
    world.store.put_child(OTHER, rival_service(YOUNGER))
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


async def test_whoever_leads_anew_tells_rivals_of_each_other_anew(world: Any) -> None:
    world.store.put_child(OTHER, rival_service(OLDER))
    await world.reconciler.reconcile(OTHER)
    world.apply()
    await world.settle()
    world.enqueued.clear()
    await world.reconciler.reconcile(OTHER)
    assert world.enqueued == [], "nothing changed"
    world.reconciler.forget()
    await world.reconciler.reconcile(OTHER)
    assert world.enqueued == [KEY]


async def test_another_name_is_no_rival(world: Any) -> None:
    world.store.put_child(OTHER, rival_service(OLDER, name="Chat"))
    world.apply()
    await world.settle()
    world.run_replicas()
    await world.settle()
    assert world.condition("Ready") == "True Serving"


async def test_without_one_gateway_for_all_names_may_be_shared(world: Any) -> None:
    world.features = replace(world.features, unique_served_names=False)
    world.store.put_child(OTHER, rival_service(OLDER))
    world.apply()
    await world.settle()
    world.run_replicas()
    await world.settle()
    assert world.condition("Ready") == "True Serving"


def test_the_store_forgets_claims_with_their_services(world: Any) -> None:
    store = world.store
    store.put_child(OTHER, rival_service(OLDER))
    store.put_child(OTHER, rival_service(OLDER, name="else", version="2"))
    assert store.claims("chat") == ()
    assert store.claim(OTHER) == Claim(key=OTHER, served_name="else", seniority=OLDER)
    store.drop_child(OTHER, Ref("Service", OTHER.name), "rival")
    assert (store.claims("else"), store.claim(OTHER)) == ((), None)


@pytest.mark.parametrize("twice", [False, True])
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(0, 2)), min_size=1, unique=True))
def test_exactly_one_of_those_who_ask_has_the_name(twice: bool, asked: list[tuple[str, str, int]]) -> None:
    claims = [
        Claim(key=Key(ns, name), served_name="m", seniority=seniority(f"2026-01-0{age + 1}T00:00:00Z", "u"))
        for ns, name, age in {(ns, name): (ns, name, age) for ns, name, age in asked}.values()
    ]
    served = [claim for claim in claims if conflict(claim, claims * (1 + twice)) is None]
    assert len(served) == 1
    assert all(served[0].seniority <= claim.seniority for claim in claims)
