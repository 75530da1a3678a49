"""The autoscaler's subjects in a cluster, and the effects of its decisions."""

from dataclasses import replace
from typing import Any

import pytest

from quire_operator.autoscaling.autoscale import observe
from quire_operator.autoscaling.decide import decide
from quire_operator.autoscaling.history import History
from quire_operator.autoscaling.observation import GatewayRequests, ReplicaPhase
from quire_operator.kube.objects import Key, Ref

KEY = Key("prod", "chat")
AUTOSCALING = {"minReplicas": 1, "maxReplicas": 8}


async def test_autoscaled_deployment_is_listed_with_its_replicas(world: Any, pod: Any) -> None:
    world.apply(replicas=2, autoscaling=AUTOSCALING, model={"source": "file:///m", "servedName": "org/m"})
    await world.settle()
    world.cluster.pods = {
        "a": pod("a"),
        "b": pod("b", ready=False, ip=""),
        "c": pod("c", ready=False, phase="Pending", ip=""),
        "d": pod("d", deleting=True, ip="fd00::1"),
        "e": pod("e", phase="Failed", ready=False),
    }
    world.show()
    (subject,) = world.cluster_scaling().subjects()
    assert (subject.key, subject.model, subject.target) == ("prod/chat", "org/m", 2)
    assert subject.record is not None and subject.record.desired_replicas == 2
    assert [(r.name, r.phase, r.metrics_url) for r in subject.replicas] == [
        ("prod/a", ReplicaPhase.READY, "http://10.0.0.1:8000/metrics"),
        ("prod/b", ReplicaPhase.LOADING, None),
        ("prod/c", ReplicaPhase.PENDING, None),
        ("prod/d", ReplicaPhase.DRAINING, "http://[fd00::1]:8000/metrics"),
    ]


@pytest.mark.parametrize("spec", [{"replicas": 2}, {"autoscaling": AUTOSCALING, "model": {"source": "s3://x"}}])
async def test_deployments_without_autoscaling_are_not_listed(world: Any, spec: dict[str, Any]) -> None:
    world.apply(**spec)
    await world.settle()
    assert world.cluster_scaling().subjects() == []


async def test_deployment_not_yet_created_is_not_listed(world: Any) -> None:
    world.apply(autoscaling=AUTOSCALING)
    assert world.cluster_scaling().subjects() == []


async def test_unreadable_metrics_are_reported_without_a_decision(world: Any) -> None:
    world.apply(autoscaling=AUTOSCALING | {"metricsSource": "Prometheus"})
    await world.settle()
    assert world.cluster_scaling().subjects() == []
    await world.settle()
    assert world.condition("Autoscaling") == "False PrometheusUnavailable"
    assert "--prometheus-url" in world.message("Autoscaling")


@pytest.mark.parametrize(
    ("source", "has_prometheus", "asks_it"),
    [(None, False, False), (None, True, True), ("Pods", True, False), ("Prometheus", True, True)],
)
async def test_metrics_source_follows_the_settings(
    world: Any, pod: Any, source: str | None, has_prometheus: bool, asks_it: bool
) -> None:
    world.apply(replicas=1, autoscaling=AUTOSCALING | ({} if source is None else {"metricsSource": source}))
    await world.settle()
    world.cluster.pods = {"a": pod("a")}
    world.show()
    looked = world.cluster_scaling((lambda: None) if has_prometheus else None)
    (subject,) = looked.subjects()
    assert [replica.by_prometheus for replica in subject.replicas] == [asks_it]


async def test_silent_prometheus_is_named_with_its_reason(world: Any, pod: Any) -> None:
    world.apply(replicas=1, autoscaling=AUTOSCALING)
    await world.settle()
    world.cluster.pods = {"a": pod("a")}
    world.show()
    problems: list[str | None] = ["HTTP 401: who are you"]
    looked = world.cluster_scaling(lambda: problems[-1])
    (subject,) = looked.subjects()
    decision = decide(subject.policy, observe(subject, {}, None), History(), 1_000.0)
    looked.note({subject.key: decision})
    await world.settle()
    assert world.condition("Autoscaling") == "False PrometheusUnavailable"
    assert "HTTP 401: who are you" in world.message("Autoscaling")
    problems.append(None)
    looked.note({subject.key: decision})
    await world.settle()
    assert world.condition("Autoscaling") == "False MetricsStale", "it answers, and has nothing new of this one"


async def test_victims_get_the_deletion_cost_as_pods(world: Any, pod: Any) -> None:
    world.apply(replicas=2, autoscaling=AUTOSCALING)
    await world.settle()
    world.cluster.pods = {name: pod(name) for name in ("a", "b")}
    world.show()
    await world.cluster_scaling().scale("prod/chat", replicas=1, victims=["prod/b"])
    await world.settle()
    assert world.cluster.costs == {"b": "-1000"}


# --- at zero ---

ASLEEP = {"minReplicas": 0, "maxReplicas": 2}


async def test_sleeping_deployments_are_listed_between_ticks(world: Any, pod: Any) -> None:
    world.apply(replicas=0, autoscaling=ASLEEP, model={"source": "file:///m", "servedName": "org/m"})
    await world.settle()
    looked = world.cluster_scaling()
    (subject,) = looked.sleeping()
    assert (subject.key, subject.model, subject.target, subject.replicas) == ("prod/chat", "org/m", 0, ())
    await looked.scale("prod/chat", replicas=1, victims=())
    await world.settle()
    assert looked.sleeping() == []


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": 0},
        {"replicas": 1, "autoscaling": ASLEEP},
        {"replicas": 0, "autoscaling": ASLEEP | {"mode": "Recommend"}},
    ],
    ids=["fixed", "awake", "only recommended for"],
)
async def test_other_deployments_are_not_woken(world: Any, spec: dict[str, Any]) -> None:
    world.apply(**spec)
    await world.settle()
    assert world.cluster_scaling().sleeping() == []


async def test_missing_gateways_are_reported_only_if_they_stay_away(world: Any) -> None:
    world.apply(replicas=0, autoscaling=ASLEEP)
    await world.settle()
    looked = world.cluster_scaling()
    history = History()

    async def look(now: float, gateway: GatewayRequests | None) -> str:
        nonlocal history
        (subject,) = looked.subjects()
        decision = decide(subject.policy, observe(subject, {}, gateway), history, now)
        history = decision.history
        looked.note({subject.key: decision})
        await world.settle()
        return world.condition("Autoscaling") + ", " + world.condition("Available")

    answer = GatewayRequests(held={}, in_flight={})
    assert await look(0.0, None) == "True Enforcing, True HeldByGateway"
    assert await look(30.0, None) == "True Enforcing, True HeldByGateway"
    assert await look(45.0, None) == "False GatewayUnavailable, False NoReplicaReady"
    assert await look(60.0, answer) == "True Enforcing, True HeldByGateway"
    assert await look(75.0, None) == "True Enforcing, True HeldByGateway"


async def test_changed_resource_is_read_again(world: Any, monkeypatch: Any) -> None:
    world.apply(replicas=2, autoscaling=AUTOSCALING)
    await world.settle()
    looked = world.cluster_scaling()
    (before,) = looked.subjects()
    parsed: list[object] = []
    monkeypatch.setattr("quire_operator.autoscaling.controller.Spec.parse", lambda body: parsed.append(body))
    assert looked.subjects() == [before]
    assert parsed == []
    monkeypatch.undo()
    world.apply(replicas=2, autoscaling=AUTOSCALING | {"maxReplicas": 3})
    await world.settle()
    (after,) = looked.subjects()
    assert after.policy.autoscaling.max_replicas == 3


async def test_last_decision_of_a_deleted_resource_is_dropped(world: Any) -> None:
    world.apply(replicas=2, autoscaling=AUTOSCALING)
    await world.settle()
    looked = world.cluster_scaling()
    (subject,) = looked.subjects()
    looked.note({subject.key: decide(subject.policy, observe(subject, {}, None), History(), 1_000.0)})
    assert looked.latest.keys() == {"prod/chat"}
    world.apply(replicas=2)
    await world.settle()
    assert looked.subjects() == []
    assert looked.latest == {} and looked.decisions("prod/chat") == ()


async def test_foreign_deployment_of_the_same_name_is_not_scaled(world: Any) -> None:
    world.apply(autoscaling={"maxReplicas": 3})
    await world.settle()
    scaling = world.cluster_scaling()
    assert [subject.key for subject in scaling.subjects()] == [str(KEY)]
    ours = world.store.children(KEY)[Ref("Deployment", KEY.name)]
    world.store.put_child(KEY, replace(ours, owner=None, uid="another", version="99999"))
    assert scaling.subjects() == []


OFFICE = {"cron": "0 8 * * *", "timeZone": "Europe/Berlin", "duration": "10h", "minReplicas": 4, "maxReplicas": 12}
EIGHT = 1_772_434_800.0
"""2026-03-02T08:00:00+01:00."""


async def test_status_shows_a_schedule_before_during_and_after(world: Any) -> None:
    """Each pass asks for the next one at the time at which the bounds change."""
    world.clock.time = EIGHT - 3600
    world.apply(replicas=1, autoscaling=AUTOSCALING | {"schedules": [OFFICE]})
    world.clock.time -= 1
    await world.settle()
    await world.rest()
    seen = []
    for _ in range(5):
        again = await world.reconciler.reconcile(KEY)
        schedule = dict(world.status["autoscaling"].get("schedule", {}))
        seen.append((world.clock.time - EIGHT, world.status["desiredReplicas"], sorted(schedule)))
        assert again is not None
        world.clock.time += again
        world.show()
    whole = ["cron", "endTime", "index", "maxReplicas", "minReplicas", "timeZone"]
    assert seen == [
        (-3600.0, 1, []),
        (-150.0, 4, [*whole[:5], "startTime", "timeZone"]),
        (0.0, 4, whole),
        (35_850.0, 4, whole),
        (36_000.0, 4, []),
    ]


async def test_schedule_in_force_is_in_the_condition_until_it_ends(world: Any) -> None:
    world.clock.time = EIGHT + 60
    world.apply(replicas=1, autoscaling=AUTOSCALING | {"schedules": [OFFICE]})
    await world.settle()
    assert world.condition("Autoscaling") == "True Enforcing"
    text = "between 4 and 12 replicas; autoscaling.schedules[0] applies until 2026-03-02T17:00:00Z"
    assert world.message("Autoscaling") == text
    assert world.status["autoscaling"]["schedule"] == {
        "index": 0,
        "cron": "0 8 * * *",
        "timeZone": "Europe/Berlin",
        "minReplicas": 4,
        "maxReplicas": 12,
        "endTime": "2026-03-02T17:00:00Z",
    }
    await world.rest()
    world.clock.time += 3600
    assert await world.settle() == [], "a schedule in force causes no further write"


async def test_replicas_of_a_schedule_that_still_start_leave_it_ready(world: Any) -> None:
    world.clock.time = EIGHT - 3600
    world.apply(replicas=1, autoscaling=AUTOSCALING | {"schedules": [OFFICE]})
    await world.settle()
    world.run_replicas()
    world.clock.time = EIGHT + 1
    await world.settle()
    assert (world.status["desiredReplicas"], world.status["readyReplicas"]) == (4, 1)
    assert world.condition("Ready") == "True Serving"


@pytest.mark.parametrize("replicas", [3, 2], ids=["up", "down"])
async def test_scaling_of_a_serving_deployment_leaves_it_ready(world: Any, pod: Any, replicas: int) -> None:
    before = 5 - replicas
    world.apply(replicas=before, autoscaling=AUTOSCALING | {"minReplicas": 2})
    await world.settle()
    world.run_replicas()
    world.cluster.pods = {name: pod(name) for name in "abc"[:before]}
    await world.settle()
    since = [c["lastTransitionTime"] for c in world.status["conditions"] if c["type"] == "Ready"]
    events, writes = len(world.cluster.events), len(world.cluster.statuses)
    world.clock.time += 60
    await world.cluster_scaling().scale("prod/chat", replicas=replicas, victims=())
    await world.settle()
    ready = [c for status in world.cluster.statuses[writes:] for c in status["conditions"] if c["type"] == "Ready"]
    assert {(c["status"], c["reason"], c["lastTransitionTime"]) for c in ready} == {("True", "Serving", *since)}
    assert len(ready) == 1 and world.cluster.events[events:] == []


async def test_new_template_is_rolling_out_before_it_is_observed(world: Any) -> None:
    world.apply(replicas=2)
    await world.serve()
    assert world.condition("Ready") == "True Serving"
    world.apply(replicas=2, engine={"extraArgs": ["--seed=1"]})
    await world.settle(passes=1)
    assert world.condition("Ready") == "False RollingOut"
    world.apply(replicas=3, engine={"extraArgs": ["--seed=1"]})
    await world.settle(passes=1)
    assert world.condition("Ready") == "False RollingOut", "the new number of replicas hides no rollout"


async def test_first_observation_of_a_deployment_changes_no_condition(world: Any) -> None:
    world.apply(replicas=1)
    for _ in range(2):
        await world.reconciler.reconcile(KEY)
    before = world.status
    await world.rest()
    assert world.status == before | {"currentRevision": "1"}


async def test_minor_changes_of_the_status_are_one_write_per_second(world: Any, pod: Any) -> None:
    world.apply(replicas=2)
    for _ in range(2):
        await world.reconciler.reconcile(KEY)
    world.clock.time += 0.25
    assert await world.settle(passes=1) == [], "the Deployment has a revision"
    world.change_deployment(replicas=1, updated=1)
    world.cluster.pods = {"a": pod("a", ready=False)}
    world.show()
    assert await world.reconciler.reconcile(KEY) == 0.75
    assert await world.rest() == ["status"]
    assert (world.status["replicas"], world.status["currentRevision"]) == (1, "1")
    assert world.condition("ModelLoaded") == "False Loading"

    world.change_deployment(replicas=2, updated=2)
    assert await world.settle(passes=1) == []
    world.change_deployment(ready=1)
    assert "status" in await world.settle(passes=1), "a ready replica is reported at once"
    assert (world.status["replicas"], world.status["readyReplicas"]) == (2, 1)

    world.change_deployment(replicas=3, updated=3)
    world.clock.time -= 3600
    assert await world.settle(passes=1) == ["status"], "a clock that is set back delays nothing"


async def test_new_process_waits_for_the_observation_of_its_template(world: Any) -> None:
    """The new process does not know which template the controller has observed."""
    world.apply(replicas=2)
    await world.settle()
    world.run_replicas()
    world.change_deployment(generation=5)
    ref = Ref("Deployment", KEY.name)
    child = world.cluster.children[ref]
    assert child.after(None).deployment.is_rolling
    assert not child.after(world.store.children(KEY)[ref]).deployment.is_rolling
    assert child.after(replace(world.store.children(KEY)[ref], uid="deleted")).deployment.is_rolling
