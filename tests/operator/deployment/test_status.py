"""Conditions, the whole status, and the events for its changes."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specs import valid_spec
from status_views import BROKEN_POD, deployment, pod, view

from quire_operator.api import Spec
from quire_operator.api.fields import Problem, parse_time
from quire_operator.autoscaling.history import Change, ScalingRecord
from quire_operator.autoscaling.rates import Rates
from quire_operator.deployment.conditions import (
    BlockingCondition,
    ConditionState,
    MetricsProblem,
    MetricsReason,
    View,
    conditions,
    last_metrics_problem,
    merged,
)
from quire_operator.deployment.status import events, is_minor, kept_replicas, scaling_record, scaling_sections, status
from quire_operator.kube.objects import Key, Resource
from quire_operator.kube.ownership import ForeignField

TYPES = [
    *("Ready", "Progressing", "Available", "ModelLoaded", "Autoscaling", "Degraded"),
    *("Reconciling", "Stalled", "ForeignFields"),
]


ASLEEP = valid_spec(autoscaling={"minReplicas": 0, "maxReplicas": 2})


LOADING = pod()
AUTOSCALING = {"minReplicas": 1, "maxReplicas": 8}
STALE = MetricsProblem(reason=MetricsReason.STALE, message="none: for 50 s")
ADDED = ForeignField(path=("f:spec", "f:paused"), manager="kubectl")
SCALED = valid_spec(autoscaling=AUTOSCALING)

CASES: dict[str, tuple[View, dict[str, str]]] = {
    "serving": (
        view(),
        {
            "Ready": "True Serving",
            "Progressing": "False Complete",
            "Available": "True ReplicaReady",
            "ModelLoaded": "True Loaded",
            "Autoscaling": "False NotConfigured",
            "Degraded": "False AsExpected",
        },
    ),
    "not made yet": (
        view(deployment=None, pods=()),
        {
            "Ready": "False Creating",
            "Progressing": "True Creating",
            "Available": "False NoReplicaReady",
            "ModelLoaded": "False NoReplica",
        },
    ),
    "loading": (
        view(deployment=deployment(2, 0), pods=(LOADING,)),
        {"Ready": "False Starting", "Progressing": "True Scaling", "ModelLoaded": "False Loading"},
    ),
    "one of two": (view(deployment=deployment(2, 1)), {"Ready": "False Starting", "Available": "True ReplicaReady"}),
    "rolling out": (
        view(deployment=deployment(2, 2, replicas=3, updated=1)),
        {"Ready": "False RollingOut", "Progressing": "True RollingOut", "Available": "True ReplicaReady"},
    ),
    "stuck in a rollout": (
        view(deployment=deployment(2, 2, replicas=3, updated=1), pods=(pod(ready=True), BROKEN_POD)),
        {
            "Ready": "False ImagePullFailed",
            "Progressing": "False ImagePullFailed",
            "Available": "True ReplicaReady",
            "Degraded": "True ImagePullFailed",
        },
    ),
    "scaling up leaves those who serve ready": (
        view(spec=SCALED, target=5, deployment=deployment(5, 2)),
        {"Ready": "True Serving", "Progressing": "True Scaling", "Autoscaling": "True Enforcing"},
    ),
    "to be none": (
        view(target=0, deployment=deployment(0, 0), pods=()),
        {"Ready": "True ScaledToZero", "Available": "False NoReplicaReady"},
    ),
    "none without requests": (
        view(spec=ASLEEP, target=0, deployment=deployment(0, 0), pods=()),
        {
            "Ready": "True ScaledToZero",
            "Available": "True HeldByGateway",
            "Progressing": "False Complete",
            "ModelLoaded": "False NoReplica",
            "Autoscaling": "True Enforcing",
            "Degraded": "False AsExpected",
        },
    ),
    "the first after a request": (
        view(spec=ASLEEP, target=1, deployment=deployment(1, 0), pods=(pod(),)),
        {"Ready": "False Starting", "Available": "True HeldByGateway", "Progressing": "True Scaling"},
    ),
    "none, and no gateway that would tell": (
        view(
            spec=ASLEEP,
            target=0,
            deployment=deployment(0, 0),
            pods=(),
            metrics_problem=MetricsProblem(reason=MetricsReason.GATEWAY_UNAVAILABLE, message="no answer"),
        ),
        {
            "Ready": "False GatewayUnavailable",
            "Available": "False NoReplicaReady",
            "Autoscaling": "False GatewayUnavailable",
        },
    ),
    "none, and none would be started": (
        view(
            spec=valid_spec(autoscaling={"minReplicas": 0, "maxReplicas": 2, "mode": "Recommend"}),
            target=0,
            deployment=deployment(0, 0),
            pods=(),
        ),
        {"Ready": "True ScaledToZero", "Available": "False NoReplicaReady", "Autoscaling": "True Recommending"},
    ),
    "the first can't start": (
        view(
            spec=ASLEEP,
            target=1,
            deployment=deployment(1, 0),
            pods=(pod(waiting_reason="ImagePullBackOff", waiting_message="no such image"),),
        ),
        {"Ready": "False ImagePullFailed", "Available": "False NoReplicaReady"},
    ),
    "out of memory": (
        view(deployment=deployment(2, 0), pods=(pod(ended_reason="OOMKilled", ended_code=137),)),
        {"Ready": "False OutOfMemory", "ModelLoaded": "False OutOfMemory", "Degraded": "True OutOfMemory"},
    ),
    "invalid, with what was there before still serving": (
        view(spec=None, blocking=BlockingCondition.invalid([Problem(path="spec.x", message="is wrong")])),
        {
            "Ready": "False InvalidSpec",
            "Progressing": "False InvalidSpec",
            "Available": "True ReplicaReady",
            "Autoscaling": "False InvalidSpec",
            "Degraded": "True InvalidSpec",
        },
    ),
    "a name that is taken": (
        view(blocking=BlockingCondition(reason="NameConflict", message="taken")),
        {"Ready": "False NameConflict", "Degraded": "True NameConflict"},
    ),
    "added fields": (
        view(additions=(ADDED,)),
        {"Ready": "True Serving", "Degraded": "False AsExpected", "ForeignFields": "True FieldsAdded"},
    ),
    "recommending": (
        view(spec=valid_spec(autoscaling=AUTOSCALING | {"mode": "Recommend"})),
        {"Autoscaling": "True Recommending"},
    ),
    "recommending more than there are": (
        view(spec=valid_spec(autoscaling={"minReplicas": 3, "maxReplicas": 8, "mode": "Recommend"})),
        {"Ready": "True Serving", "Autoscaling": "True Recommending"},
    ),
    "without metrics": (
        view(spec=SCALED, metrics_problem=MetricsProblem(reason=MetricsReason.STALE, message="none")),
        {"Autoscaling": "False MetricsStale"},
    ),
    "contested": (view(spec=SCALED, contested="hpa"), {"Autoscaling": "False ReplicasContested"}),
}


@pytest.mark.parametrize("case", CASES)
def test_conditions(case: str) -> None:
    seen, wanted = CASES[case]
    found = {c.type: f"{c.is_true} {c.reason}" for c in conditions(seen)}
    assert list(found) == TYPES
    assert {kind: found[kind] for kind in wanted} == wanted


def test_every_condition_has_a_message() -> None:
    for seen, _ in CASES.values():
        assert all(condition.message for condition in conditions(seen))


def test_the_time_of_a_condition_changes_only_with_its_status() -> None:
    first = ConditionState(type="Ready", is_true=False, reason="Starting", message="a")
    (old,) = merged([], [first], generation=1, now="t1")
    (same,) = merged([old], [replace(first, reason="RollingOut", message="b")], generation=2, now="t2")
    (turned,) = merged([same], [replace(first, is_true=True)], generation=2, now="t3")
    assert [old["lastTransitionTime"], same["lastTransitionTime"], turned["lastTransitionTime"]] == ["t1", "t1", "t3"]
    assert (same["reason"], same["observedGeneration"]) == ("RollingOut", 2)


def resource(**changes: Any) -> Resource:
    fields: dict[str, Any] = {
        "key": Key("prod", "chat"),
        "uid": "u",
        "version": "1",
        "generation": 4,
        "deleting": False,
        "body": {},
        "status": {},
    }
    return Resource(**(fields | changes))


def made(view: View, **changes: Any) -> dict[str, Any]:
    return status(resource(**changes), view, cluster_domain="cluster.local", now=1_700_000_000.9)


def test_the_whole_status() -> None:
    found = made(view())
    listed = found.pop("conditions")
    assert [condition["type"] for condition in listed] == TYPES
    assert listed[0]["lastTransitionTime"] == "2023-11-14T22:13:20Z"
    assert found == {
        "observedGeneration": 4,
        "replicas": 2,
        "readyReplicas": 2,
        "desiredReplicas": 2,
        "selector": "app.kubernetes.io/component=engine,quire.dev/llmdeployment=chat",
        "endpoint": "http://chat.prod.svc.cluster.local:8000/v1",
        "currentRevision": "3",
    }


def test_status_rendering_is_idempotent() -> None:
    first = made(view())
    again = status(resource(status=first), view(), cluster_domain="cluster.local", now=1_800_000_000.0)
    assert again == first, "so nothing is written while nothing changes, however late it is"


RECORD = ScalingRecord(
    desired_replicas=3,
    changes=(
        Change(
            time=1.5, from_replicas=1, to_replicas=2, reason="QueueDepth", message="9 wait", inputs={"waiting": 9.0}
        ),
        Change(time=99.25, from_replicas=2, to_replicas=3, reason="KVDemand", message="full", inputs={}),
    ),
    rates=Rates(
        step_seconds=0.012,
        prefill_seconds_per_token=1 / 8000,
        decode_seconds_per_token=2e-6,
        mean_prompt_tokens=500.0,
        mean_output_tokens=120.0,
        kv_tokens=64_000.0,
    ),
    rates_time=50.0,
    start_up_seconds=95,
)


def test_autoscaler_record_survives_the_status_unchanged() -> None:
    sections = scaling_sections(RECORD, SCALED, now=0.0)
    assert scaling_record(sections) == RECORD
    assert sections["capacity"] == {
        "kvTokens": 64_000,
        "kvBlocks": 4_000,
        "prefillTokensPerSecond": 8_000,
        "stepMicroseconds": 12_000,
        "decodeNanosecondsPerToken": 2_000,
        "meanPromptTokens": 500,
        "meanOutputTokens": 120,
        "learntTime": "1970-01-01T00:00:50.000Z",
        "startUpSeconds": 95,
    }


def test_start_up_time_is_stored_before_other_rates() -> None:
    record = ScalingRecord(desired_replicas=2, start_up_seconds=95)
    sections = scaling_sections(record, SCALED, now=0.0)
    assert sections["capacity"] == {"startUpSeconds": 95}
    assert scaling_record(sections) == record


@pytest.mark.parametrize("written", [-5, 0, True, "95", 95.5, None, [95]])
def test_invalid_start_up_time_counts_as_absent(written: object) -> None:
    record = scaling_record({"autoscaling": {}, "capacity": {"startUpSeconds": written}})
    assert record is not None and record.start_up_seconds is None


FLOATS = st.floats(0, 1e6, allow_nan=False)


@given(st.tuples(FLOATS, FLOATS, FLOATS, FLOATS, FLOATS, FLOATS), st.floats(0, 2e9))
def test_record_is_stable_after_one_round_trip(rates: tuple[float, ...], time: float) -> None:
    names = (
        "step_seconds",
        "prefill_seconds_per_token",
        "decode_seconds_per_token",
        "mean_prompt_tokens",
        "mean_output_tokens",
        "kv_tokens",
    )
    record = ScalingRecord(
        desired_replicas=1,
        changes=(Change(time=time, from_replicas=0, to_replicas=1, reason="r", message="m", inputs={"x": rates[0]}),),
        rates=Rates(**dict(zip(names, rates, strict=True))),
        rates_time=time,
    )
    once = scaling_sections(record, SCALED, now=0.0)
    read = scaling_record(once)
    assert read is not None
    assert scaling_sections(read, SCALED, now=0.0) == once


@pytest.mark.parametrize(
    "section",
    [
        "three",
        {"desiredReplicas": -1},
        {
            "desiredReplicas": "many",
            "history": [{"time": "noon"}, 7, {"time": "2026-01-01T00:00:00", "from": 1, "to": 2}],
        },
    ],
)
def test_unreadable_record_gives_no_decision(section: object) -> None:
    record = scaling_record({"autoscaling": section, "capacity": {"kvTokens": "much"}})
    assert record is None or record == ScalingRecord()


def test_time_without_a_zone_is_invalid() -> None:
    assert (parse_time("2026-01-01T00:00:00"), parse_time("1970-01-01T00:00:01Z")) == (None, 1.0)


def test_status_keeps_the_record_only_while_it_autoscales() -> None:
    sections = scaling_sections(RECORD, SCALED, now=0.0)
    kept = made(view(spec=SCALED), status=sections)
    assert kept["autoscaling"] == sections["autoscaling"] and kept["capacity"] == sections["capacity"]
    invalid = made(view(spec=None, blocking=BlockingCondition(reason="InvalidSpec", message="x")), status=sections)
    assert invalid["autoscaling"] == sections["autoscaling"]
    changed = made(view(spec=valid_spec(replicas=2)), status=sections)
    assert not {"autoscaling", "capacity"} & changed.keys()


@pytest.mark.parametrize(
    ("now", "kept"),
    [
        (valid_spec(replicas=1), 3),
        (valid_spec(replicas=2), None),
        (valid_spec(replicas=5), None),
        (valid_spec(replicas=1, autoscaling=AUTOSCALING), None),
    ],
    ids=["the same spec.replicas", "a lower one", "a higher one", "with an autoscaler again"],
)
def test_replicas_stay_when_autoscaling_is_removed(now: Spec, kept: int | None) -> None:
    sections = scaling_sections(RECORD, SCALED, now=0.0)
    assert kept_replicas(sections, now) == kept
    if kept is not None:
        written = made(view(spec=now, target=kept, deployment=deployment(kept, kept)), status=sections)
        assert kept_replicas(written, now) == kept, "it is written back"
        assert written["desiredReplicas"] == kept


def test_a_recommendation_is_not_kept() -> None:
    sections = scaling_sections(RECORD, valid_spec(autoscaling=AUTOSCALING | {"mode": "Recommend"}), now=0.0)
    assert kept_replicas(sections, valid_spec(replicas=1)) is None


def test_events_report_only_condition_changes() -> None:
    starting = made(view(deployment=deployment(2, 0), pods=(LOADING,)))
    broken = made(view(deployment=deployment(2, 0), pods=(BROKEN_POD,)), status=starting)
    serving = made(view(), status=broken)
    assert events({}, starting) == (), "what is new starts: that is no news"
    assert [(e.reason, e.warning) for e in events(serving, starting)] == [("Starting", False)], "all went away"
    assert [(e.reason, e.warning) for e in events(starting, broken)] == [("ImagePullFailed", True)]
    assert [(e.reason, e.warning) for e in events(broken, serving)] == [("Serving", False)]
    assert events(serving, serving) == ()


def test_additions_of_others_are_a_normal_event() -> None:
    before = made(view())
    (event,) = events(before, made(view(additions=(ADDED,)), status=before))
    assert (event.reason, event.warning) == ("FieldsAdded", False)


def test_each_scaling_change_is_one_event() -> None:
    before = {
        "autoscaling": scaling_sections(replace(RECORD, changes=RECORD.changes[:1]), SCALED, now=0.0)["autoscaling"]
    }
    after = {"autoscaling": scaling_sections(RECORD, SCALED, now=0.0)["autoscaling"]}
    (event,) = events(before, after)
    assert (event.reason, event.message) == ("ScaledUp", "2 → 3 replicas: full")
    (event,) = events(before, after, recommends=True)
    assert (event.reason, event.message) == (
        "ScaleUpRecommended",
        "recommended 2 → 3 replicas (mode Recommend, not applied): full",
    )


def test_scaling_event_contains_the_numbers() -> None:
    change = Change(time=1.0, from_replicas=2, to_replicas=1, reason="Bounds", message="2 → 1: 2 is outside")
    (event,) = events({}, scaling_sections(ScalingRecord(changes=(change,)), SCALED, now=0.0))
    assert (event.reason, event.message) == ("ScaledDown", "2 → 1 replicas: 2 is outside")


@pytest.mark.parametrize(
    ("reported", "problem"),
    [
        (None, None),
        ({"type": "Autoscaling", "reason": "Enforcing", "message": "between 1 and 3 replicas"}, None),
        ({"type": "Ready", "reason": "Serving", "message": STALE.message}, None),
        ({"type": "Autoscaling", "reason": STALE.reason, "message": STALE.message}, STALE),
        ({"type": "Autoscaling", "reason": "x", "message": STALE.message}, None),
        ({"type": "Autoscaling"}, None),
    ],
)
def test_metrics_problem_is_read_from_its_condition(
    reported: dict[str, str] | None, problem: MetricsProblem | None
) -> None:
    assert last_metrics_problem({} if reported is None else {"conditions": [reported]}) == problem


NEW_STATUS: dict[str, Any] = {
    "replicas": 0,
    "readyReplicas": 0,
    "desiredReplicas": 2,
    "conditions": [{"type": "ModelLoaded", "status": "False", "reason": "NoReplica"}],
}


@pytest.mark.parametrize(
    ("change", "minor"),
    [
        ({"replicas": 2, "currentRevision": "1"}, True),
        ({"conditions": [{"type": "ModelLoaded", "status": "False", "reason": "Loading"}]}, True),
        ({"conditions": [{"type": "ModelLoaded", "status": "True", "reason": "Loaded"}]}, False),
        ({"conditions": [{"type": "Ready", "status": "True", "reason": "Serving"}]}, False),
        ({"conditions": []}, False),
        ({"replicas": 2, "readyReplicas": 1}, False),
        ({"desiredReplicas": 3}, False),
        ({"servedName": {"name": "m"}}, False),
        ({"model": {"download": {"percent": 3}}}, False),
    ],
)
def test_only_figures_of_pods_that_appear_are_minor(change: dict[str, Any], minor: bool) -> None:
    assert is_minor(NEW_STATUS, NEW_STATUS | change) is minor
