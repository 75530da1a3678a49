"""The reconcile of one LLMDeployment: what is written, in which order, and what is not written again."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_cluster import Killed

from quire_operator.autoscaling.history import Change, ScalingNotDone, ScalingRecord
from quire_operator.deployment import scaling as scaling_module
from quire_operator.deployment.conditions import MetricsProblem, MetricsReason
from quire_operator.deployment.controller import retry_after
from quire_operator.kube.errors import (
    ClusterError,
    Conflict,
    Forbidden,
    NotFound,
    NotLeading,
    QuotaExceeded,
    Refused,
    Throttled,
    Unavailable,
)
from quire_operator.kube.objects import Key, Owner, Pod, Ref
from quire_operator.kube.ownership import ForeignField

KEY = Key("prod", "chat")
DEPLOYMENT, SERVICE = Ref("Deployment", "chat"), Ref("Service", "chat")
AUTOSCALING = {"minReplicas": 1, "maxReplicas": 8}
CHILDREN = [
    "create ServiceAccount chat",
    "create Service chat",
    "create Service chat-headless",
    "create PodDisruptionBudget chat",
    "create Deployment chat",
]
Make = Callable[..., Pod]


async def test_second_reconcile_writes_nothing(world: Any) -> None:
    world.apply()
    await world.serve()
    world.clock.time += 3600
    assert await world.settle() == []
    assert world.condition("Ready") == "True Serving"


async def test_own_writes_are_known_before_watch_events(world: Any) -> None:
    world.apply()
    await world.reconciler.reconcile(KEY)
    start = len(world.cluster.asked)
    await world.reconciler.reconcile(KEY)  # no watch has shown anything
    assert world.cluster.asked[start:] == ["status"]


async def test_restart_applies_each_child_once_and_no_status(world: Any) -> None:
    world.apply()
    await world.settle()
    await world.rest()
    world.restart()
    assert await world.settle() == [write.replace("create", "update") for write in CHILDREN]


async def test_deleted_deployment_is_left_to_garbage_collection(world: Any) -> None:
    assert await world.settle() == []
    world.apply()
    world.cluster.resources[KEY] = replace(world.cluster.resources[KEY], deleting=True, version="999")
    assert await world.settle() == []


async def test_invalid_spec_changes_nothing_and_lists_all_problems(world: Any) -> None:
    world.apply()
    await world.settle()
    world.apply(model={"source": "s3://x"}, engine={"blockSize": 7})
    assert await world.settle() == ["status", "event InvalidSpec"]
    (message,) = (c["message"] for c in world.status["conditions"] if c["type"] == "Ready")
    assert "spec.model.source" in message and "spec.engine.blockSize" in message


async def test_a_pod_template_that_can_not_be_merged_is_invalid_too(world: Any) -> None:
    world.apply(podTemplate={"spec": {"hostNetwork": True}})
    assert await world.settle() == ["status", "event InvalidSpec"]


async def test_drift_is_repaired_and_reported(world: Any) -> None:
    world.apply()
    await world.settle()
    foreign = (ForeignField(path=("f:spec", "f:replicas"), manager="kubectl"),)
    child = world.cluster.children[DEPLOYMENT]
    world.cluster.children[DEPLOYMENT] = replace(child, version="500", fingerprint="x", foreign=foreign)
    world.cluster.version = 500
    assert await world.settle() == ["update Deployment chat", "event DriftRepaired"]
    assert "spec.replicas (set by kubectl)" in world.cluster.events[-1].message


async def test_additions_are_removed_or_named(world: Any) -> None:
    world.apply()
    await world.settle()
    pod = ("f:spec", "f:template", "f:spec")
    foreign = tuple(ForeignField(path=(*pod, name), manager="m") for name in ("f:hostPID", "f:nodeSelector"))
    world.cluster.version = 500
    world.cluster.children[DEPLOYMENT] = replace(world.cluster.children[DEPLOYMENT], version="500", foreign=foreign)
    written = await world.settle()
    assert written[:2] == ["remove-fields Deployment chat", "event FieldsRemoved"]
    assert world.condition("ForeignFields") == "True FieldsAdded"
    assert world.condition("Degraded") == "False AsExpected"
    assert [entry.path[-1] for entry in world.cluster.children[DEPLOYMENT].foreign] == ["f:nodeSelector"]


@pytest.mark.parametrize(
    ("owner", "again"), [(None, 30.0), (Owner(kind="LLMDeployment", name="chat", uid="earlier"), 2.0)]
)
async def test_foreign_object_is_kept_and_checked_again(world: Any, owner: Owner | None, again: float) -> None:
    world.apply()
    await world.settle()
    world.cluster.children[SERVICE] = replace(world.cluster.children[SERVICE], owner=owner, version="999")
    world.restart()
    assert await world.reconciler.reconcile(KEY) == again
    assert world.condition("Ready") == "False NameConflict"
    assert "update Service chat" not in world.cluster.asked and "update Deployment chat" not in world.cluster.asked


async def test_refused_objects_are_reported_and_retried_when_changed(world: Any) -> None:
    world.cluster.errors["create Deployment chat"] = [Refused("spec.x: unknown field")]
    world.apply()
    assert (await world.settle()).count("create Deployment chat") == 1
    assert world.condition("Ready") == "False InvalidSpec"
    world.apply(replicas=2)
    assert (await world.settle()).count("create Deployment chat") == 1
    assert world.condition("Degraded") == "False AsExpected"


@pytest.mark.parametrize(
    ("error", "reason", "again"), [(QuotaExceeded("q"), "QuotaExceeded", 30.0), (Forbidden("f"), "Forbidden", 60.0)]
)
async def test_refusals_of_the_namespace_are_reported_and_retried(
    world: Any, error: ClusterError, reason: str, again: float
) -> None:
    world.cluster.errors["create Service chat"] = [error]
    world.apply()
    assert await world.reconciler.reconcile(KEY) == again
    assert world.condition("Ready") == f"False {reason}"
    assert DEPLOYMENT not in world.cluster.children, "nothing could reach its pods"
    assert Ref("PodDisruptionBudget", "chat") in world.cluster.children
    assert await world.reconciler.reconcile(KEY) is None
    assert DEPLOYMENT in world.cluster.children
    assert world.condition("Ready") == "False Starting"


@pytest.mark.parametrize("write", [*CHILDREN, "status"])
@pytest.mark.parametrize(
    "error", [Conflict("c"), Unavailable("u"), Throttled("t", after_seconds=None), NotLeading("n")]
)
async def test_interrupted_reconcile_is_completed_by_the_next(world: Any, write: str, error: ClusterError) -> None:
    world.apply()
    world.cluster.errors[write] = [error]
    with pytest.raises(type(error)):
        await world.settle(passes=2)
    await world.settle()
    assert world.condition("Ready") == "False Starting"
    assert {f"create {ref}" for ref in world.cluster.children} == set(CHILDREN)


async def test_operator_killed_before_any_first_write_converges(world: Any) -> None:
    """Die before the nth write of a new LLMDeployment, for each n; then another process goes on."""
    cached = {"source": "hf://org/m", "cache": {"size": "1Gi", "accessMode": "ReadWriteMany"}}
    spec = {"model": cached, "replicas": 3, "autoscaling": AUTOSCALING}
    world.apply(**spec)
    writes = await world.settle()
    wanted = {ref: child.fingerprint for ref, child in world.cluster.children.items()}
    assert len(writes) > len(CHILDREN)
    for number in range(len(writes)):
        other = type(world)()
        other.cluster.dies_before = number
        other.apply(**spec)
        with pytest.raises(Killed):
            await other.settle()
        other.restart()
        await other.settle()
        found = {ref: child.fingerprint for ref, child in other.cluster.children.items()}
        assert (found, asked(other)) == (wanted, 3), f"killed at write {number}, {writes[number]}"


async def test_failed_event_does_not_stop_reconciling(world: Any) -> None:
    world.apply()
    await world.settle()
    world.cluster.errors["event Serving"] = [Unavailable("u")]
    world.run_replicas()
    assert (await world.settle()).count("event Serving") == 1
    assert world.condition("Ready") == "True Serving"


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (Conflict("c"), 0.1),
        (Throttled("t", after_seconds=7.0), 7.0),
        (Throttled("t", after_seconds=None), 1.0),
        (NotFound("n"), 5.0),
        (NotLeading("n"), 1.0),
        (Unavailable("u"), None),
        (ZeroDivisionError(), None),
    ],
)
def test_each_error_has_its_retry_delay(error: Exception, seconds: float | None) -> None:
    assert retry_after(error) == seconds


async def test_status_changed_by_the_server_is_not_rewritten_forever(world: Any) -> None:
    """An older CRD drops unknown fields: the result of our write is what the server has."""
    world.cluster.unknown_fields = frozenset({"endpoint"})
    world.apply()
    await world.settle()
    await world.rest()
    assert await world.rest() == []


# --- the autoscaler's decision ---


def record(replicas: int, *, since: int = 1) -> ScalingRecord:
    change = Change(time=1.0, from_replicas=since, to_replicas=replicas, reason="QueueDepth", message="9 wait")
    return ScalingRecord(desired_replicas=replicas, changes=(change,))


def asked(world: Any) -> int:
    return int(world.cluster.children[DEPLOYMENT].deployment.replicas_asked)


async def test_initial_replicas_are_stored_before_children_exist(world: Any) -> None:
    world.apply(replicas=3, autoscaling=AUTOSCALING)
    written = await world.settle(passes=1)
    assert written[:2] == ["status", CHILDREN[0]]
    assert world.cluster.statuses[0] == {"autoscaling": {"desiredReplicas": 3, "specReplicas": 3}}
    assert asked(world) == 3


async def test_decision_is_stored_before_victims_and_the_deployment(world: Any, pod: Make) -> None:
    world.apply(replicas=3, autoscaling=AUTOSCALING)
    await world.settle()
    world.run_replicas()
    world.cluster.pods = {name: pod(name) for name in ("a", "b", "c")}
    await world.settle()
    start = len(world.cluster.asked)

    persisting = asyncio.create_task(world.reconciler.scaling.persist(KEY, record(2, since=3)))
    await asyncio.sleep(0)
    assert world.enqueued == [KEY]
    world.show()
    await world.reconciler.reconcile(KEY)
    await persisting
    assert world.status["autoscaling"]["desiredReplicas"] == 2
    assert asked(world) == 3, "what is persisted is acted upon when the autoscaler says so"

    world.reconciler.scaling.scale(KEY, replicas=2, victims=["b"])
    await world.settle(passes=1)
    assert world.cluster.asked[start:] == [
        "status",
        "event ScaledDown",
        "costs {'b': '-1000'}",
        "update Deployment chat",
        "status",
    ]
    assert asked(world) == 2


async def test_stored_decision_is_applied_by_the_next_leader(world: Any) -> None:
    world.apply(replicas=1, autoscaling=AUTOSCALING)
    await world.settle()
    persisting = asyncio.create_task(world.reconciler.scaling.persist(KEY, record(5)))
    await asyncio.sleep(0)
    await world.reconciler.reconcile(KEY)
    await persisting
    world.restart()  # killed before the decision was applied
    await world.settle()
    assert asked(world) == 5


async def test_unwritable_record_stops_the_scaling(world: Any) -> None:
    world.apply(autoscaling=AUTOSCALING)
    await world.settle()
    world.cluster.errors["status"] = [Unavailable("down")]
    persisting = asyncio.create_task(world.reconciler.scaling.persist(KEY, record(2)))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await world.reconciler.reconcile(KEY)
    with pytest.raises(ScalingNotDone, match="down"):
        await persisting


@pytest.mark.parametrize(
    ("spec", "why"),
    [({"replicas": 2}, "a fixed number of replicas"), ({"model": {"source": "s3://x"}}, "the spec is invalid")],
)
async def test_record_of_a_removed_autoscaler_is_not_applied(world: Any, spec: Any, why: str) -> None:
    world.apply(autoscaling=AUTOSCALING)
    await world.settle()
    persisting = asyncio.create_task(world.reconciler.scaling.persist(KEY, record(2)))
    await asyncio.sleep(0)
    world.apply(**spec)
    await world.reconciler.reconcile(KEY)
    with pytest.raises(ScalingNotDone, match=why):
        await persisting


async def test_record_of_earlier_bounds_is_written_within_the_new_ones(world: Any) -> None:
    world.apply(replicas=3, autoscaling={"minReplicas": 1, "maxReplicas": 8})
    await world.settle()
    persisting = asyncio.create_task(world.reconciler.scaling.persist(KEY, record(7, since=3)))
    await asyncio.sleep(0)
    world.apply(replicas=3, autoscaling={"minReplicas": 1, "maxReplicas": 5})
    await world.reconciler.reconcile(KEY)
    await persisting
    assert world.status["autoscaling"]["desiredReplicas"] == 5
    world.apply(replicas=3)
    await world.settle()
    assert asked(world) == 5, "a 7 would stay after the autoscaler was removed"


async def test_record_that_waited_too_long_is_never_written(world: Any, monkeypatch: Any) -> None:
    world.apply(replicas=1, autoscaling=AUTOSCALING)
    await world.settle()
    monkeypatch.setattr(scaling_module, "_PERSIST_SECONDS", 0.0)
    with pytest.raises(ScalingNotDone, match="within 0 s"):
        await world.reconciler.scaling.persist(KEY, record(5))
    await world.settle()
    assert world.status["autoscaling"]["desiredReplicas"] == 1


async def test_persist_fails_for_a_deleted_resource(world: Any) -> None:
    with pytest.raises(ScalingNotDone):
        await world.reconciler.scaling.persist(KEY, record(2))


async def test_fixed_replicas_discard_the_scaling_decision(world: Any) -> None:
    world.apply(replicas=1, autoscaling=AUTOSCALING)
    await world.settle()
    world.reconciler.scaling.scale(KEY, replicas=6, victims=[])
    await world.settle()
    assert asked(world) == 6
    world.apply(replicas=2)
    await world.settle()
    assert asked(world) == 2 and "autoscaling" not in world.status
    world.run_replicas()
    world.apply(replicas=2, autoscaling=AUTOSCALING)
    await world.settle()
    assert asked(world) == 2


async def test_lowered_maximum_is_stored_before_the_next_decision(world: Any) -> None:
    world.apply(replicas=6, autoscaling={"minReplicas": 7, "maxReplicas": 8})
    await world.settle()
    assert asked(world) == 7
    world.apply(replicas=6, autoscaling={"minReplicas": 1, "maxReplicas": 5})
    await world.settle()
    assert (asked(world), world.status["autoscaling"]["desiredReplicas"]) == (5, 5)
    world.apply(replicas=6)
    await world.settle()
    assert asked(world) == 6, "the 7 must not come back"


async def test_missing_metrics_set_and_clear_the_condition(world: Any) -> None:
    world.apply(autoscaling=AUTOSCALING)
    await world.settle()
    for _ in range(2):
        world.reconciler.scaling.note_metrics(KEY, MetricsProblem(reason=MetricsReason.STALE, message="none came"))
    assert world.enqueued == [KEY], "once"
    await world.settle()
    assert world.condition("Autoscaling") == "False MetricsStale"
    world.reconciler.scaling.note_metrics(KEY, None)
    await world.settle()
    assert world.condition("Autoscaling") == "True Enforcing"


async def test_new_leader_repeats_the_metrics_state_until_its_first_poll(world: Any) -> None:
    world.apply(autoscaling=AUTOSCALING)
    await world.settle()
    world.reconciler.scaling.note_metrics(
        KEY, MetricsProblem(reason=MetricsReason.PROMETHEUS_UNAVAILABLE, message="no answer: refused")
    )
    await world.settle()
    before = world.message("Autoscaling")
    world.restart()
    await world.settle()
    assert world.condition("Autoscaling") == "False PrometheusUnavailable"
    assert world.message("Autoscaling") == before == "no answer: refused"
    world.reconciler.scaling.note_metrics(KEY, None)
    await world.settle()
    assert world.condition("Autoscaling") == "True Enforcing"


async def test_an_hpa_on_the_deployment_is_named_for_a_while(world: Any) -> None:
    world.apply(autoscaling=AUTOSCALING)
    await world.settle()
    foreign = (ForeignField(path=("f:spec", "f:replicas"), manager="horizontal-pod-autoscaler"),)
    for condition in ("True Enforcing", "False ReplicasContested"):  # a single change is taken for a manual one
        changed = replace(world.cluster.children[DEPLOYMENT], fingerprint="x", foreign=foreign)
        world.cluster.children[DEPLOYMENT] = replace(changed, version=world.cluster._next())
        await world.settle()
        assert world.condition("Autoscaling") == condition
    assert world.message("Autoscaling").startswith(
        "A HorizontalPodAutoscaler, perhaps one that a KEDA ScaledObject made,"
    )
    world.clock.time += 1201
    await world.settle()
    assert world.condition("Autoscaling") == "True Enforcing"


async def test_recommend_mode_follows_other_writers(world: Any) -> None:
    world.apply(replicas=2, autoscaling=AUTOSCALING | {"mode": "Recommend"})
    await world.settle()
    foreign = (ForeignField(path=("f:spec", "f:replicas"), manager="kube-controller-manager"),)
    for count in (5, 3, 4):
        child = world.cluster.children[DEPLOYMENT]
        state = replace(child.deployment, replicas_asked=count)
        changed = replace(child, fingerprint=f"x{count}", foreign=foreign, deployment=state)
        world.cluster.children[DEPLOYMENT] = replace(changed, version=world.cluster._next())
        await world.settle()
        assert world.cluster.children[DEPLOYMENT].deployment.replicas_asked == count
    assert world.condition("Autoscaling") == "True Recommending"
    assert "DriftRepaired" not in {event.reason for event in world.cluster.events}


async def test_conflict_is_resolved_without_waiting_for_a_dead_watch(world: Any) -> None:
    world.apply(replicas=1)
    await world.settle()
    stale = world.store.resource(KEY)
    assert stale is not None
    world.apply(replicas=2, model={"source": "file:///other"})
    world.store.drop_resource(KEY, stale.uid)
    world.store.put_resource(stale)  # no watch has shown the change
    world.change_deployment(replicas=1)
    world.store.put_child(KEY, world.cluster.children[DEPLOYMENT])
    with pytest.raises(Conflict):
        await world.reconciler.reconcile(KEY)
    start = len(world.cluster.asked)
    await world.reconciler.reconcile(KEY)
    assert world.cluster.asked[start:][:1] == ["update Deployment chat"]


async def test_endless_conflicts_are_retried_with_backoff(world: Any) -> None:
    world.apply(replicas=1)
    world.cluster.errors["create Deployment chat"] = [Conflict("c")] * 9
    found = []
    for _ in range(9):
        with pytest.raises(ClusterError) as caught:
            await world.reconciler.reconcile(KEY)
        found.append(retry_after(caught.value))
    assert found == [0.1] * 5 + [None] * 4, "None leaves it to the backoff"
    await world.reconciler.reconcile(KEY)
    world.cluster.errors["status"] = [Conflict("c")]
    world.change_deployment(replicas=1)
    world.show()
    with pytest.raises(Conflict):
        await world.reconciler.reconcile(KEY)
