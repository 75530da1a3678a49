"""Strategy Canary in whole passes: two tracks, promotion, rollback, edits in between, and an operator that dies."""

import asyncio
from typing import Any

import pytest
from fake_cluster import Killed

from quire_common.contract.gateway import bin_of
from quire_operator.autoscaling.history import ScalingRecord
from quire_operator.canary.analysis import Track, Tracks
from quire_operator.kube.objects import ContainerState, Ref

from ..conftest import DEPLOYMENT, KEY, World

CANARY, SERVICE = Ref("Deployment", "chat-canary"), Ref("Service", "chat-canary")
STEPS = [{"weightPercent": 20, "duration": "1m"}, {"weightPercent": 50, "duration": "1m"}]
ROLLOUT = {"strategy": "Canary", "canary": {"steps": STEPS, "minRequests": 100}}
OLD: dict[str, Any] = {"replicas": 4, "rollout": ROLLOUT, "engine": {"maxSequences": 8}}
NEW: dict[str, Any] = {**OLD, "engine": {"maxSequences": 16}}
OTHER: dict[str, Any] = {**OLD, "engine": {"maxSequences": 32}}


def track(requests: int, *, seconds: float = 0.1, errors: int = 0) -> Track:
    spread = {bin_of(seconds * (0.7 + 0.02 * step)): requests // 30 + 1 for step in range(30)}
    latencies = {"timeToFirstToken": spread, "interTokenLatency": spread}
    return Track(requests=requests, errors=errors, latencies=latencies)


async def pass_time(world: World, seconds: float, *, tracks: Tracks | None = None) -> None:
    """Let some time pass in which the canary served, poll the gateways, and run passes."""
    world.clock.time += seconds
    revision = world.status["rollout"].get("canaryRevision", "")
    world.gateways.page = {} if tracks is None else {("chat", revision): tracks}
    world.show()
    await world.canaries.poll(world.gateways)
    await world.settle()


async def stable(world: World) -> None:
    world.apply(**OLD)
    await world.serve()


async def serving(world: World) -> None:
    """Bring the canary to its first step."""
    await stable(world)
    world.apply(**NEW)
    await world.settle()
    world.run_replicas(CANARY)
    await world.settle()


GOOD = Tracks(stable=track(4000), canary=track(1000))
SLOW = Tracks(stable=track(4000), canary=track(1000, seconds=0.2))
FAILING = Tracks(stable=track(4000), canary=track(1000, errors=30))


def max_sequences(world: World, ref: Ref) -> str:
    body: Any = world.cluster.manifests[ref].body
    arguments = body["spec"]["template"]["spec"]["containers"][0]["args"]
    return str(arguments[arguments.index("--max-num-seqs") + 1])


def phase(world: World) -> tuple[str, int]:
    return world.status["rollout"]["phase"], world.status["rollout"]["weightPercent"]


def revisions(world: World) -> list[str]:
    return sorted(ref.name for ref in world.cluster.children if ref.kind == "ControllerRevision")


async def test_first_spec_is_stable_and_kept(world: World) -> None:
    await stable(world)
    assert phase(world) == ("Stable", 0)
    assert CANARY not in world.cluster.children
    assert revisions(world) == [f"chat-{world.status['rollout']['stableRevision']}"]


async def test_changed_spec_starts_a_canary_and_keeps_stable_pods(world: World) -> None:
    await stable(world)
    world.apply(**NEW)
    await world.settle()
    assert phase(world) == ("Starting", 0)
    assert (max_sequences(world, DEPLOYMENT), max_sequences(world, CANARY)) == ("8", "16")
    assert SERVICE in world.cluster.children and len(revisions(world)) == 2
    body: Any = world.cluster.manifests[CANARY].body
    assert body["spec"]["replicas"] == 1
    assert body["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] == "engine-canary"
    assert world.condition("Progressing") == "True Canary" and world.condition("Ready") == "True Serving"


async def test_change_that_reaches_no_pod_applies_without_a_canary(world: World) -> None:
    def cached(retain: str, **other: Any) -> dict[str, Any]:
        cache = {"size": "10Gi", "accessMode": "ReadWriteMany", "retain": retain}
        return {**OLD, "model": {"source": "hf://org/model@" + 40 * "a", "cache": cache}, **other}

    world.apply(**cached("Delete"))
    await world.serve()
    world.apply(**cached("Retain"))
    await world.settle()
    assert phase(world) == ("Stable", 0) and CANARY not in world.cluster.children
    body: Any = world.cluster.manifests[Ref("PersistentVolumeClaim", "chat-models")].body
    assert "ownerReferences" not in body["metadata"], "the claim must stay when the LLMDeployment is deleted"
    assert len(revisions(world)) == 1
    world.apply(**cached("Retain", engine={"maxSequences": 16}))
    await world.settle()
    assert phase(world) == ("Starting", 0) and max_sequences(world, DEPLOYMENT) == "8"


async def test_good_canary_is_promoted_step_by_step(world: World) -> None:
    await serving(world)
    assert phase(world) == ("Canary", 20)
    await pass_time(world, 30, tracks=GOOD)
    assert phase(world) == ("Canary", 20)
    await pass_time(world, 31, tracks=GOOD)
    assert phase(world) == ("Canary", 20), "50 % need two replicas"
    world.run_replicas(CANARY)
    await pass_time(world, 15, tracks=GOOD)
    assert phase(world) == ("Canary", 33)
    await pass_time(world, 61, tracks=GOOD)
    assert phase(world) == ("Promoting", 33)
    assert max_sequences(world, DEPLOYMENT) == "16" and CANARY in world.cluster.children
    world.change_deployment(updated=2, replicas=4)
    await pass_time(world, 15, tracks=GOOD)
    assert phase(world) == ("Promoting", 33)
    world.run_replicas()
    await world.settle()
    assert phase(world) == ("Stable", 0)
    assert {CANARY, SERVICE}.isdisjoint(world.cluster.children) and len(revisions(world)) == 1
    assert {event.reason for event in world.cluster.events} >= {"CanaryStarted", "CanaryPassed", "CanaryPromoted"}


@pytest.mark.parametrize(("tracks", "why"), [(SLOW, "TimeToFirstToken p95"), (FAILING, "ErrorRate")])
async def test_bad_canary_is_rolled_back_and_not_retried(world: World, tracks: Tracks, why: str) -> None:
    await serving(world)
    await pass_time(world, 15, tracks=tracks)
    assert phase(world) == ("RolledBack", 0)
    assert why in world.status["rollout"]["message"]
    assert {CANARY, SERVICE}.isdisjoint(world.cluster.children)
    assert max_sequences(world, DEPLOYMENT) == "8" and len(revisions(world)) == 1
    assert world.condition("Degraded") == "True CanaryRolledBack" and world.condition("Ready") == "True Serving"
    gates = {gate["metric"]: gate for gate in world.status["rollout"]["gates"]}
    assert gates["TimeToFirstToken"]["canary"]["count"] == sum(tracks.canary.histogram("timeToFirstToken").values())
    before = len(world.cluster.asked)
    await pass_time(world, 600)
    world.restart()
    await world.settle()
    assert phase(world) == ("RolledBack", 0) and CANARY not in world.cluster.children
    assert not [write for write in world.cluster.asked[before:] if write.startswith("create")]
    world.apply(**OTHER)
    await world.settle()
    assert phase(world) == ("Starting", 0) and max_sequences(world, CANARY) == "32"


async def test_broken_replicas_of_an_old_canary_fail_no_new_one(world: World, pod: Any) -> None:
    canary = {**ROLLOUT["canary"], "onFailure": "Pause"}  # type: ignore[dict-item]
    rollout = {"rollout": {"strategy": "Canary", "canary": canary}}
    ended = ContainerState(name="engine", init=False, ready=True, restarts=1, ended_reason="OOMKilled", ended_code=137)
    await serving(world)
    world.apply(**{**NEW, **rollout})
    world.cluster.pods["old"] = pod("old", is_canary=True, created="2023-11-14T22:13:20Z", containers=(ended,))
    await pass_time(world, 15, tracks=Tracks())
    assert phase(world) == ("Paused", 0)
    world.apply(**{**OTHER, **rollout})
    await world.settle()
    assert phase(world) == ("Starting", 0)
    broken = pod("new", is_canary=True, created="2033-01-01T00:00:00Z", containers=(ended,))
    world.cluster.pods = {"new": broken}
    await world.settle()
    assert phase(world) == ("Paused", 0)


async def test_replicas_of_an_old_canary_get_no_new_requests(world: World) -> None:
    """Die after the record of the new canary was written and before its Deployment was."""
    await serving(world)
    world.apply(**OTHER)
    world.cluster.dies_before = len(world.cluster.asked) + 1
    with pytest.raises(Killed):
        await world.settle()
    assert phase(world) == ("Starting", 0) and max_sequences(world, CANARY) == "16"
    world.restart()
    await world.settle(passes=1)
    assert phase(world) == ("Starting", 0) and max_sequences(world, CANARY) == "32"


async def test_restarted_replica_fails_the_canary(world: World, pod: Any) -> None:
    await serving(world)
    ended = ContainerState(
        name="engine", init=False, ready=True, restarts=1, ended_reason="OOMKilled", ended_code=137, running=True
    )
    world.cluster.pods["chat-canary-1"] = pod("chat-canary-1", is_canary=True, containers=(ended,))
    await pass_time(world, 15, tracks=Tracks())
    assert phase(world) == ("RolledBack", 0)
    assert "restarted: OOMKilled with exit code 137" in world.status["rollout"]["message"]


async def test_hung_canary_is_rolled_back(world: World) -> None:
    """No request is answered, so that none is counted: minRequests must not be waited for."""
    await serving(world)
    await pass_time(world, 60, tracks=Tracks(stable=track(4000), canary=Track(unanswered=12)))
    assert phase(world) == ("RolledBack", 0)
    assert "wait for their first byte: 12 times" in world.status["rollout"]["message"]


async def test_other_strategy_applies_the_spec_at_once(world: World) -> None:
    await serving(world)
    world.apply(**{**NEW, "rollout": {}})
    await world.settle()
    assert "rollout" not in world.status and CANARY not in world.cluster.children
    assert max_sequences(world, DEPLOYMENT) == "16" and revisions(world) == []


async def test_deleted_stable_revision_stops_all_changes(world: World) -> None:
    await serving(world)
    name = f"chat-{world.status['rollout']['stableRevision']}"
    gone = world.cluster.children.pop(Ref("ControllerRevision", name))
    world.restart()
    start = len(world.cluster.asked)
    await world.settle()
    assert world.condition("Ready") == "False StableRevisionLost" and name in world.message("Ready")
    assert {write for write in world.cluster.asked[start:] if not write.startswith("event")} == {"status"}
    world.cluster.children[gone.ref] = gone
    await world.settle()
    assert phase(world) == ("Canary", 20)


async def test_renamed_model_is_refused(world: World) -> None:
    await stable(world)
    world.apply(**{**NEW, "model": {"source": "file:///m", "servedName": "other"}})
    await world.settle()
    assert world.condition("Ready") == "False InvalidSpec"
    assert "spec.model.servedName: a canary serves the same name" in world.message("Ready")


async def life(world: World, *, tracks: Tracks) -> None:
    """Drive a canary to its end with whatever operator there is."""
    for _ in range(12):
        world.show()
        for ref in (DEPLOYMENT, CANARY):
            if ref in world.cluster.children:
                world.run_replicas(ref)
        world.clock.time += 61
        revision = world.status["rollout"].get("canaryRevision", "")
        world.gateways.page = {("chat", revision): tracks}
        await world.canaries.poll(world.gateways)
        try:
            await world.settle(passes=1)
        except Killed:
            world.restart()


@pytest.mark.parametrize(("tracks", "end"), [(GOOD, "16"), (SLOW, "8")])
async def test_operator_killed_at_any_write_converges(world: World, tracks: Tracks, end: str) -> None:
    """Die before the nth write of a canary, for each n; then another process goes on."""
    await stable(world)
    world.apply(**NEW)
    start = len(world.cluster.asked)
    await life(world, tracks=tracks)
    writes = world.cluster.asked[start:]
    wanted = {ref: child.fingerprint for ref, child in world.cluster.children.items()}, phase(world)
    assert max_sequences(world, DEPLOYMENT) == end and len(writes) > 8
    for number in range(len(writes)):
        other = World()
        await stable(other)
        other.apply(**NEW)
        other.cluster.dies_before = len(other.cluster.asked) + number
        await life(other, tracks=tracks)
        found = {ref: child.fingerprint for ref, child in other.cluster.children.items()}, phase(other)
        assert found == wanted, f"killed at write {number}, {writes[number]}"


async def test_figures_are_separate_for_each_deployment(world: World) -> None:
    await serving(world)
    world.gateways.page = {("other", "x"): GOOD}
    await world.canaries.poll(world.gateways)
    assert world.canaries.figures("chat", world.status["rollout"]["canaryRevision"]) is None
    assert world.enqueued[-1] == KEY


async def test_decision_is_stored_in_a_pass_without_a_stable_spec(world: World) -> None:
    scaled = {**OLD, "autoscaling": {"minReplicas": 1, "maxReplicas": 8}}
    world.apply(**scaled)
    await world.settle()
    (revision,) = revisions(world)
    del world.cluster.children[Ref("ControllerRevision", revision)]
    world.apply(**{**scaled, "engine": {"maxSequences": 16}})
    persisting = asyncio.create_task(world.reconciler.scaling.persist(KEY, ScalingRecord(desired_replicas=5)))
    await asyncio.sleep(0)
    await world.settle()
    await persisting
    assert world.condition("Ready") == "False StableRevisionLost"
    assert world.status["autoscaling"]["desiredReplicas"] == 5
