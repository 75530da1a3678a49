"""Replicas follow the load by the metrics that a real Prometheus scrapes from real pods: 1 → 2 → 3 → 2 → 1 in one ramp.

During the ramp, Prometheus is unavailable for two minutes (QUIRE_OUTAGE_SECONDS for less), the leading operator is
killed, and replicas are removed while they stream (`e2e_support.scaling.ramp`). Each test checks one aspect of the
recording.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from e2e_support.release import Release
from e2e_support.results import Report
from e2e_support.run import MakeSpace
from e2e_support.scaling import looks as seen
from e2e_support.scaling.looks import AUTOSCALING, recorded_decisions
from e2e_support.scaling.ramp import TICK_SECONDS, At, Play, Ramp
from e2e_support.target import Target
from e2e_support.waiting import until

OUTAGE_SECONDS = float(os.environ.get("QUIRE_OUTAGE_SECONDS", "120"))
SCRAPE_SECONDS = 5.0
"""The permitted age of metrics: an interval, and a slow scrape."""
WRITE_SECONDS = 10.0
"""The time to apply a decision and to observe it, on a busy machine."""
REACTION_SECONDS = TICK_SECONDS + SCRAPE_SECONDS + WRITE_SECONDS
TAKEOVER_SECONDS = 20.0
"""The value in charts/quire/values.yaml."""
UP, DOWN = ((1, 2), (2, 3)), ((3, 2), (2, 1))

pytestmark = [pytest.mark.needs("prometheus"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ramp(target: Target, release: Release, make_space: MakeSpace, gateway_url: str) -> Iterator[Ramp]:
    with make_space("autoscaling") as space:
        play = Play(target, release, space, gateway_url)
        yield play.run(outage_seconds=OUTAGE_SECONDS)


def test_every_request_of_the_ramp_is_answered_correctly(ramp: Ramp, report: Report) -> None:
    traffic = ramp.result
    traffic.assert_all_right(at_least=100)
    assert len(traffic.by_replica()) == 3, "each replica answered some"
    report.count_requests(len(traffic.records))


def test_replicas_follow_the_load_up_and_down_once(ramp: Ramp, report: Report) -> None:
    desired = seen.desired_steps(ramp.looks)
    assert [step.value for step in desired] == [1, 2, 3, 2, 1]
    ready = [step.value for step in seen.ready_steps(ramp.looks)]
    assert max(ready) == 3 and ready[-1] == 1, f"ready replicas went {ready}"
    two, _, fewer, one = (step.time for step in desired[1:])
    up, down = ramp.times[At.LOAD_UP], ramp.times[At.LOAD_DOWN]
    assert two - up < REACTION_SECONDS
    both = seen.first_at(ramp.looks, lambda look: look.ready == 2, since=two)
    assert both is not None
    report.figure("load increase to another replica requested", two - up)
    report.figure("replica requested to Ready", both - two)
    report.figure("load decrease to first replica removed", fewer - down)
    report.figure("load decrease to one replica left", one - down)


def test_decisions_are_stored_and_reported_with_figures(ramp: Ramp) -> None:
    history = ramp.final["status"]["autoscaling"]["history"]
    assert [(change["from"], change["to"]) for change in history] == [*UP, *DOWN]
    for change in history[:2]:
        assert change["reason"] in ("Concurrency", "ArrivingWork", "TimeToFirstToken")
        assert float(change["inputs"]["needUp"]) > change["from"]
        assert f"{change['reason']} needs " in change["message"]
    for change in history[2:]:
        assert change["reason"] == "DemandFell"
        assert float(change["inputs"]["needDown"]) <= change["to"]
        assert "replicas were needed in the last 15s" in change["message"]
    scalings = [event for event in ramp.events if event.reason in ("ScaledUp", "ScaledDown")]
    assert [event.reason for event in scalings] == ["ScaledUp", "ScaledUp", "ScaledDown", "ScaledDown"]
    for change, event in zip(history, scalings, strict=True):
        way = f"{change['from']} → {change['to']}"
        assert event.message == f"{way} replicas: {change['message'].removeprefix(f'{way}: ')}"


def test_quire_explain_shows_the_same_to_a_cluster_user(ramp: Ramp) -> None:
    words = " ".join(ramp.words.split())
    assert "1 requested, 1 ready, 0 starting; between 1 and 3" in words
    assert "from Prometheus: recent for 1 of 1 ready replicas" in words
    assert "when one fewer was enough all through 15s, by at most 1 per 15s" in words
    for move in ("1 → 2", "2 → 3", "3 → 2", "2 → 1"):
        assert move in words, f"{move} is not among the decisions:\n{ramp.words}"
    assert "DemandFell" in words and "Demand per signal now, in replicas" in words


def test_the_metrics_of_the_operator_agree(ramp: Ramp) -> None:
    page, labels = ramp.final_metrics, ramp.labels
    assert page is not None
    figures = {
        name: page.total(f"{AUTOSCALING}{name}_replicas", **labels) for name in ("desired", "current", "min", "max")
    }
    assert figures == {"desired": 1, "current": 1, "min": 1, "max": 3}
    assert page.total("quire_operator_decisions_total", reason="DemandFell") >= 2
    assert page.total(f"{AUTOSCALING}input", **labels, input="fresh") == 1
    assert page.values(f"{AUTOSCALING}metrics_age_seconds", **labels)[0] < 2 * TICK_SECONDS + SCRAPE_SECONDS


@pytest.mark.needs("machine")
def test_prometheus_records_the_same_history(ramp: Ramp, target: Target) -> None:
    """The server that the operator reads also scrapes the metrics of its decisions."""
    machine, namespace = target.machine, ramp.deployment.namespace
    assert machine is not None
    # The last decision is scraped a moment after it was made.
    until(
        lambda: recorded_decisions(machine, namespace) == [1, 2, 3, 2, 1],
        what="1, 2, 3, 2, 1",
        seconds=60,
        explain=lambda: str(recorded_decisions(machine, namespace)),
    )


@pytest.mark.needs("machine")
def test_replicas_stay_without_prometheus_with_a_reason(ramp: Ramp, report: Report) -> None:
    down, back = ramp.times[At.PROMETHEUS_DOWN], ramp.times[At.PROMETHEUS_UP]
    blind = seen.during(ramp.looks, down, back)
    assert [step.value for step in seen.desired_steps(blind)] == [2], "no figure is no reason to change anything"
    reported = seen.first_at(blind, lambda look: look.reason("Autoscaling") == "PrometheusUnavailable", since=down)
    assert reported is not None
    said = [look.conditions["Autoscaling"] for look in blind if look.time >= reported]
    assert all("holding the number of replicas" in condition.message for condition in said)
    assert "PrometheusUnavailable" in {event.reason for event in ramp.events if event.type == "Warning"}
    report.figure("Prometheus stopped to condition set", reported - down)


@pytest.mark.needs("machine")
def test_quire_explain_lists_missing_metrics(ramp: Ramp) -> None:
    now: Mapping[str, Any] = ramp.blind["now"]
    assert (now["from"], now["to"], now["reason"]) == (2, 2, "MetricsStale")
    assert now["metrics"]["source"] == "Prometheus" and now["metrics"]["problem"]
    assert "reported metrics in the last 45 s" in now["message"]
    assert "PrometheusUnavailable" in {notice["reason"] for notice in ramp.blind["notices"]}
    words = " ".join(ramp.blind_words.split())
    assert "no answer: " in words and "Autoscaling: PrometheusUnavailable" in words
    page = ramp.blind_metrics
    assert page is not None and page.total("quire_operator_prometheus_errors_total") >= 2


@pytest.mark.needs("machine")
def test_scaling_resumes_when_prometheus_returns(ramp: Ramp, report: Report) -> None:
    back = ramp.times[At.PROMETHEUS_UP]
    three = seen.first_at(ramp.looks, lambda look: look.desired == 3, since=back)
    assert three is not None and three - back < 2 * REACTION_SECONDS  # it has to start, too
    assert seen.first_at(ramp.looks, lambda look: look.reason("Autoscaling") == "Enforcing", since=back) is not None
    report.figure("Prometheus restored to next replica requested", three - back)


def test_another_operator_continues_after_a_kill(ramp: Ramp, report: Report) -> None:
    before, after = ramp.leaders
    assert before.uid != after.uid
    killed, leads = ramp.times[At.LEADER_KILLED], ramp.times[At.LEADER_NEW]
    assert leads - killed < TAKEOVER_SECONDS + WRITE_SECONDS
    two = seen.first_at(ramp.looks, lambda look: look.desired == 2, since=0.0)
    assert two is not None
    high = seen.during(ramp.looks, two, ramp.times[At.LOAD_DOWN])[1:]
    assert seen.lowest(seen.desired_steps(high)) == 2, "never fewer while the load is high"
    report.figure("operator killed to another operator leading", leads - killed)


def test_no_stream_is_cut_when_replicas_are_removed(ramp: Ramp, report: Report) -> None:
    assert ramp.streams is not None
    ramp.streams.assert_all_right()
    streams = ramp.streams.records
    report.count_requests(len(streams))
    gone = [ending for ending in seen.endings(ramp.looks) if ending.seen > ramp.times[At.LOAD_DOWN]]
    assert len(gone) == 2
    spared, longest = 0, 0.0
    for ending in gone:
        there = [stream for stream in streams if stream.replica == f"{ramp.deployment.namespace}/{ending.pod}"]
        assert all(stream.started < ending.seen + 1 for stream in there), "nothing new goes to a replica that ends"
        streaming = [stream for stream in there if stream.ended > ending.seen]
        assert ending.gone is not None and all(stream.ended < ending.gone for stream in streaming)
        spared += len(streaming)
        longest = max(longest, ending.gone - ending.seen)
    assert spared, "some were under way on them"
    report.figure("streams running on removed replicas", spared, "")
    report.figure("replica terminating to gone, with long streams", longest)
