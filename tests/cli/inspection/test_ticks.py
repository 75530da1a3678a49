"""The log of decisions: equal ticks are one stretch, the newest tick is complete, and a file keeps the log."""

import json
from datetime import UTC, datetime

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specs import valid_spec

from quire_operator.api import MetricsSource
from quire_operator.app.telemetry import Server, Telemetry
from quire_operator.autoscaling.decide import decide
from quire_operator.autoscaling.decision_context import Policy
from quire_operator.autoscaling.history import History
from quire_operator.autoscaling.observation import (
    Observation,
    ReplicaObservation,
    ReplicaPhase,
    ReplicaSample,
)
from quire_operator.autoscaling.ticks import (
    DemandTerm,
    Log,
    MetricsState,
    Tick,
    noted,
    read_log,
    tick_of,
)


def tick(second: int, *, to: int = 2, reason: str = "Steady", was: int = 2) -> Tick:
    return Tick(
        time=datetime.fromtimestamp(second, UTC),
        from_replicas=was,
        to_replicas=to,
        reason=reason,
        message=f"said at {second}",
        enforced=True,
        inputs={"ready": 2.0},
        terms=(DemandTerm(reason="KVDemand", need=0.5, detail="few"),),
        metrics=MetricsState(source=MetricsSource.PODS, oldest_seconds=0.5),
    )


def log_of(*ticks: Tick, limit: int = 10) -> Log:
    log: Log = ()
    for each in ticks:
        log = noted(log, each, limit=limit)
    return log


def test_equal_ticks_form_one_stretch_with_the_newest_text() -> None:
    log = log_of(tick(0), tick(15), tick(30, reason="Starting"), tick(45), tick(60))
    assert [(s.since.timestamp(), s.ticks, s.last.reason, s.last.message) for s in log] == [
        (0, 2, "Steady", "said at 15"),
        (30, 1, "Starting", "said at 30"),
        (45, 2, "Steady", "said at 60"),
    ]


def test_same_reason_with_other_replicas_is_a_new_stretch() -> None:
    assert len(log_of(tick(0, to=3, reason="ArrivingWork"), tick(15, to=4, was=3, reason="ArrivingWork"))) == 2


@given(st.lists(st.sampled_from(["Steady", "Starting", "MetricsStale"]), max_size=40), st.integers(1, 5))
def test_bounded_log_ends_with_the_last_tick_and_is_readable(reasons: list[str], limit: int) -> None:
    log = log_of(*(tick(15 * i, reason=reason) for i, reason in enumerate(reasons)), limit=limit)
    assert len(log) <= limit
    assert all(not stretch.last.terms for stretch in log[:-1])
    if reasons:
        assert (log[-1].last.reason, bool(log[-1].last.terms)) == (reasons[-1], True)
    assert read_log(json.loads(json.dumps(msgspec.to_builtins(log)))) == log


@pytest.mark.parametrize("written", [None, 1, "x", {"a": 1}, [{"since": "soon"}], [{"ticks": 1}]])
def test_data_of_another_version_is_ignored(written: object) -> None:
    assert read_log(written) == ()


def test_decision_is_reported_with_all_terms_and_their_age() -> None:
    policy = Policy.of(valid_spec(autoscaling={"maxReplicas": 3, "targets": {"queueDepth": 4}}))
    assert policy is not None
    sample = ReplicaSample(
        time=98.0,
        waiting=8,
        running=1,
        queued_prompt_tokens=100,
        kv_tokens_used=10,
        kv_tokens_capacity=1000,
    )
    seen = Observation(replicas=(ReplicaObservation(name="a", phase=ReplicaPhase.READY, sample=sample),), target=1)
    told = tick_of(decide(policy, seen, History(), 100.0), source=MetricsSource.PROMETHEUS, problem=None)
    assert (told.from_replicas, told.to_replicas, told.reason) == (1, 2, "QueueDepth")
    needs = [term.need for term in told.terms]
    assert needs == sorted(needs, reverse=True) and needs[0] == 2.0
    assert told.metrics is not None and told.metrics.oldest_seconds == 2.0


async def test_operator_serves_decisions_of_one_deployment() -> None:
    log = log_of(tick(0), tick(15, reason="Starting"))
    server = Server(
        Telemetry(),
        problem=lambda: None,
        ready=lambda: True,
        refresh=lambda: None,
        decisions=lambda key: log if key == "prod/chat" else (),
    )
    port = await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            async with session.get("/decisions/prod/chat") as answer:
                assert read_log(await answer.json()) == log
            async with session.get("/decisions/prod/other") as answer:
                assert answer.status == 404
    finally:
        await server.stop()
