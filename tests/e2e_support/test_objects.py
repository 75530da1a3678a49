"""Typed views of Kubernetes objects, and the diagnosis of events that did not occur."""

from datetime import UTC, datetime
from typing import Any

from e2e_support import objects
from e2e_support.explaining import Facts, explained

METADATA = {"name": "chat-1", "namespace": "n", "uid": "u", "labels": {"pod-template-hash": "abc"}}
CRASHING = {
    "metadata": METADATA,
    "spec": {"nodeName": "node-1"},
    "status": {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}],
        "containerStatuses": [
            {
                "name": "engine",
                "ready": False,
                "restartCount": 2,
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 20s"}},
                "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}},
            }
        ],
    },
}


def test_crashing_pod_shows_current_and_last_state() -> None:
    pod = objects.pod(CRASHING)
    assert (pod.node, pod.ip, pod.restarts, pod.revision) == ("node-1", "10.0.0.1", 2, "abc")
    assert not pod.is_ready and not pod.is_serving and not pod.is_ending
    assert pod.states == (
        "engine waiting (CrashLoopBackOff: back-off 20s)",
        "engine ended before (OOMKilled: code 137)",
    )


def test_unschedulable_pod_shows_the_scheduler_message() -> None:
    message = "0/2 nodes are available: 2 Insufficient cpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    pod = objects.pod({"metadata": METADATA, "spec": {}, "status": {"phase": "Pending", "conditions": [condition]}})
    assert pod.node is None
    assert pod.states == (f"Unschedulable: {message}",)


def test_a_ready_pod_that_ends_serves_no_more() -> None:
    body: dict[str, Any] = {"metadata": METADATA, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    assert objects.pod(body).is_serving
    ending = objects.pod({**body, "metadata": {**METADATA, "deletionTimestamp": "2026-01-01T00:00:00Z"}})
    assert ending.is_ready and not ending.is_serving


def test_completed_init_container_is_not_shown() -> None:
    done = {"name": "fetch", "ready": False, "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    failed = {"name": "fetch", "ready": False, "state": {"terminated": {"exitCode": 1, "message": "no such model\n"}}}
    told = [
        objects.pod({"metadata": METADATA, "status": {"initContainerStatuses": [state]}}).states
        for state in (done, failed)
    ]
    assert told == [(), ("fetch terminated (code 1: no such model)",)]


def test_conditions_are_found_by_type() -> None:
    said = {
        "type": "Ready",
        "status": "True",
        "reason": "Serving",
        "message": "1 of 1",
        "lastTransitionTime": "2026-01-02T03:04:05Z",
        "observedGeneration": 3,
    }
    ready = objects.conditions({"status": {"conditions": [said]}})["Ready"]
    assert ready.is_true and ready.generation == 3
    assert ready.changed == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert objects.conditions({}) == {}


def test_events_of_both_kinds_have_a_time_and_a_count() -> None:
    about = {"involvedObject": {"kind": "Pod", "name": "p"}, "type": "Warning", "reason": "BackOff", "message": "m"}
    old = objects.event({**about, "lastTimestamp": "2026-01-01T00:00:02Z", "count": 4})
    new = objects.event({**about, "eventTime": "2026-01-01T00:00:01.5Z", "lastTimestamp": None, "series": None})
    assert (old.count, new.count) == (4, 1)
    assert objects.in_order([old, new]) == [new, old]


def test_kwok_nodes_are_recognized_by_their_annotation() -> None:
    status = {
        "conditions": [{"type": "Ready", "status": "True"}],
        "addresses": [{"type": "InternalIP", "address": "1"}],
    }
    real = objects.node({"metadata": {"name": "node-1"}, "status": status})
    fake = objects.node({"metadata": {"name": "f", "annotations": {"kwok.x-k8s.io/node": "fake"}}, "status": status})
    assert (real.ip, real.is_ready, real.is_schedulable, real.is_fake) == ("1", True, True, False)
    assert fake.is_fake
    assert not objects.node({"metadata": {"name": "n"}, "spec": {"unschedulable": True}}).is_schedulable


def test_an_explanation_shows_all_facts_and_conditions_last() -> None:
    said = {
        "type": "Ready",
        "status": "False",
        "reason": "OutOfMemory",
        "message": "killed",
        "lastTransitionTime": "2026-01-02T03:04:05Z",
    }
    event = objects.event({"reason": "BackOff", "type": "Warning", "message": "again\n", "count": 3})
    facts = Facts(
        conditions=tuple(objects.conditions({"status": {"conditions": [said]}}).values()),
        pods=(objects.pod(CRASHING),),
        events=(event,),
        operator_log=tuple(f"line {number}" for number in range(40)),
    )
    lines = explained(facts).splitlines()
    assert lines[-1] == "  Ready=False OutOfMemory: killed"
    assert "  chat-1 on node-1: Running, not ready, 2 restarts" in lines
    assert sum(line.startswith("  line ") for line in lines) == 12
    assert any("Warning BackOff" in line and "(3 times): again" in line for line in lines)


def test_explanation_without_facts_shows_none() -> None:
    text = explained(Facts(conditions=(), pods=(), events=(), operator_log=()))
    assert "no operator has written a status" in text
    assert text.count("none") == 4
