"""One tick over all LLMDeployments: metrics in one call, persisted before acting, retried after failures."""

import asyncio
from dataclasses import replace

import pytest

from quire_operator.api import AutoscalingMode
from quire_operator.autoscaling.autoscale import Autoscaler, Subject
from quire_operator.autoscaling.decide import decide
from quire_operator.autoscaling.demand import Reason
from quire_operator.autoscaling.history import ScalingNotDone, ScalingRecord
from quire_operator.autoscaling.observation import GatewayRequests, ReplicaAddress, ReplicaPhase


class SetClock:
    def __init__(self) -> None:
        self.time = 1_000_000.0

    def __call__(self) -> float:
        return self.time


class ToldMetrics:
    """Metrics with chosen current values for each replica."""

    def __init__(self, clock: SetClock, kit) -> None:
        self.clock, self.kit = clock, kit
        self.figures: dict[str, dict[str, float]] = {}
        self.held: dict[str, int] | None = {}
        self.in_flight: dict[str, int] = {}
        self.complete = True
        self.asked: list[list[str]] = []
        self.gateways_asked = 0

    async def samples(self, replicas):
        self.asked.append([replica.name for replica in replicas])
        told = {name: self.kit.ready(name, **figures).observed(self.clock()) for name, figures in self.figures.items()}
        return {name: observation.sample for name, observation in told.items()}

    async def gateway_requests(self):
        self.gateways_asked += 1
        if self.held is None:
            return None
        return GatewayRequests(held=self.held, in_flight=self.in_flight, is_complete=self.complete)


class Ledger:
    """A scale target that records its calls and can fail."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.failing: set[str] = set()
        self.records: dict[str, ScalingRecord] = {}

    async def persist(self, key, record):
        self._fail("persist")
        self.records[key] = record
        self.calls.append(("persist", key, record.desired_replicas))

    async def scale(self, key, *, replicas, victims):
        self._fail("scale")
        self.calls.append(("scale", key, replicas, tuple(victims)))

    def _fail(self, what: str) -> None:
        if what in self.failing:
            raise ScalingNotDone("the API server is away")


class Bench:
    def __init__(self, kit) -> None:
        self.kit, self.clock, self.ledger = kit, SetClock(), Ledger()
        self.metrics = ToldMetrics(self.clock, kit)
        self.autoscaler = Autoscaler(metrics=self.metrics, target=self.ledger, clock=self.clock)
        self.targets: dict[str, int] = {}

    def subject(self, key: str = "ns/chat", *names: str, record: ScalingRecord | None = None, **rules) -> Subject:
        names = names or (f"{key}-0",)
        addresses = tuple(
            ReplicaAddress(name=name, phase=ReplicaPhase.READY, metrics_url=f"http://{name}/metrics") for name in names
        )
        return Subject(
            key=key,
            model=key.rpartition("/")[2],
            policy=self.kit.policy(**rules),
            replicas=addresses,
            target=self.targets.get(key, len(names)),
            record=record,
        )

    async def tick(self, *subjects: Subject):
        self.clock.time += 15
        return await self.autoscaler.tick(subjects)


@pytest.fixture
def bench(kit):
    return Bench(kit)


async def test_decision_is_persisted_before_it_is_applied(bench):
    bench.metrics.figures["ns/chat-0"] = {"running": 10.0, "waiting": 5.0}
    decisions = await bench.tick(bench.subject())
    assert decisions["ns/chat"].desired == 2
    assert bench.ledger.calls == [("persist", "ns/chat", 2), ("scale", "ns/chat", 2, ())]


async def test_quiet_ticks_write_nothing(bench):
    bench.metrics.figures["ns/chat-0"] = {"running": 1.0}
    for _ in range(20):
        await bench.tick(bench.subject())
    assert bench.ledger.calls == [("persist", "ns/chat", 1)]


async def test_equal_record_is_not_written_after_a_restart(bench):
    bench.metrics.figures["ns/chat-0"] = {"running": 1.0}
    await bench.tick(bench.subject(record=ScalingRecord(desired_replicas=1)))
    assert bench.ledger.calls == []


@pytest.mark.parametrize("failing", ["persist", "scale"])
async def test_failed_scaling_is_retried_at_the_next_tick(bench, failing):
    bench.metrics.figures["ns/chat-0"] = {"running": 10.0, "waiting": 5.0}
    bench.ledger.failing = {failing}
    await bench.tick(bench.subject())
    assert [call for call in bench.ledger.calls if call[0] == "scale"] == []

    bench.ledger.failing = set()
    await bench.tick(bench.subject())

    assert bench.ledger.calls[-1] == ("scale", "ns/chat", 2, ())
    assert len(bench.ledger.records["ns/chat"].changes) == 1


async def test_record_whose_write_failed_is_replaced_without_demand(bench):
    await bench.tick(bench.subject())
    bench.metrics.figures["ns/chat-0"] = {"running": 10.0, "waiting": 5.0}
    bench.ledger.failing = {"persist"}  # the server may have stored the 2 before the connection broke
    assert (await bench.tick(bench.subject()))["ns/chat"].desired == 2
    bench.metrics.figures["ns/chat-0"] = {"running": 1.0}
    bench.ledger.failing = set()
    assert (await bench.tick(bench.subject()))["ns/chat"].desired == 1
    assert bench.ledger.calls == [("persist", "ns/chat", 1), ("persist", "ns/chat", 1)]


async def test_failed_scale_up_does_not_use_up_the_step_limit(bench):
    bench.metrics.figures["ns/chat-0"] = {"running": 10.0, "waiting": 500.0}
    bench.ledger.failing = {"scale"}
    await bench.tick(bench.subject(max_replicas=5))
    bench.ledger.failing = set()
    bench.clock.time -= 14
    decision = (await bench.tick(bench.subject(max_replicas=5)))["ns/chat"]
    assert (decision.desired, decision.reason) == (5, Reason.CONCURRENCY)


async def test_failing_deployment_does_not_delay_others(bench, caplog):
    for key in ("ns/a", "ns/b"):
        bench.metrics.figures[f"{key}-0"] = {"running": 10.0, "waiting": 5.0}

    class HalfBroken(Ledger):
        async def persist(self, key, record):
            if key == "ns/a":
                raise ScalingNotDone("quota")
            await super().persist(key, record)

    ledger = HalfBroken()
    autoscaler = Autoscaler(metrics=bench.metrics, target=ledger, clock=bench.clock)
    bench.clock.time += 15
    await autoscaler.tick([bench.subject("ns/a"), bench.subject("ns/b")])
    assert ledger.calls[-1] == ("scale", "ns/b", 2, ())
    assert "ns/a: 1 → 2" in caplog.text and "quota" in caplog.text


async def test_recommendation_is_persisted_but_not_applied(bench):
    bench.metrics.figures["ns/chat-0"] = {"running": 10.0, "waiting": 5.0}
    decision = (await bench.tick(bench.subject(mode=AutoscalingMode.RECOMMEND)))["ns/chat"]
    assert (decision.desired, decision.enforced) == (2, False)
    assert bench.ledger.calls == [("persist", "ns/chat", 2)]


async def test_all_replicas_are_polled_in_one_call(bench):
    await bench.tick(bench.subject("ns/a", "x", "y"), bench.subject("ns/b", "z"))
    assert bench.metrics.asked == [["x", "y", "z"]]


async def test_held_requests_are_those_of_the_served_name(bench):
    bench.targets = {"ns/a": 0, "ns/b": 0}
    bench.metrics.held = {"a": 3}
    subjects = [bench.subject(key, min_replicas=0) for key in ("ns/a", "ns/b")]
    subjects = [Subject(key=s.key, model=s.model, policy=s.policy, replicas=(), target=0) for s in subjects]
    decisions = await bench.tick(*subjects)
    assert {key: d.desired for key, d in decisions.items()} == {"ns/a": 1, "ns/b": 0}


async def test_deleted_deployment_is_dropped(bench):
    bench.metrics.figures["ns/chat-0"] = {"running": 0.0}
    for _ in range(30):
        await bench.tick(bench.subject("ns/chat", "ns/chat-0", "ns/chat-1"))
    await bench.tick()
    decision = (await bench.tick(bench.subject("ns/chat", "ns/chat-0")))["ns/chat"]
    # A new one with that name starts without history.
    assert len(decision.history.needs) == 1


# --- between ticks ---


def asleep(bench, key: str = "ns/chat") -> Subject:
    subject = bench.subject(key, min_replicas=0)
    return Subject(key=key, model=subject.model, policy=subject.policy, replicas=(), target=0)


async def test_first_request_is_answered_between_ticks(bench):
    await bench.tick(asleep(bench, "ns/a"), asleep(bench, "ns/b"))
    bench.ledger.calls.clear()
    bench.metrics.held = {"a": 1}
    bench.clock.time += 1
    decisions = await bench.autoscaler.wake([asleep(bench, "ns/a"), asleep(bench, "ns/b")])
    assert {key: d.desired for key, d in decisions.items()} == {"ns/a": 1}
    assert bench.ledger.calls == [("persist", "ns/a", 1), ("scale", "ns/a", 1, ())]


async def test_wake_writes_nothing_without_waiting_requests(bench):
    for held in ({}, None):
        bench.metrics.held = held
        assert await bench.autoscaler.wake([asleep(bench)]) == {}
    assert bench.ledger.calls == []


async def test_deployment_with_a_decision_in_progress_is_skipped(bench):
    started, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Ledger):
        async def persist(self, key, record):
            started.set()
            await go_on.wait()
            await super().persist(key, record)

    ledger = Slow()
    autoscaler = Autoscaler(metrics=bench.metrics, target=ledger, clock=bench.clock)
    bench.metrics.held = {"chat": 1}
    first = asyncio.create_task(autoscaler.wake([asleep(bench)]))
    await started.wait()
    assert await autoscaler.wake([asleep(bench)]) == {}
    assert await autoscaler.tick([asleep(bench)]) == {}
    go_on.set()
    await first
    assert ledger.calls == [("persist", "ns/chat", 1), ("scale", "ns/chat", 1, ())]


async def test_gateways_are_polled_only_if_a_deployment_needs_them(bench):
    bench.metrics.figures["ns/chat-0"] = {"running": 1.0}
    bench.metrics.held, bench.metrics.in_flight = {"chat": 0}, {"chat": 1}
    decision = (await bench.tick(bench.subject()))["ns/chat"]
    assert (bench.metrics.gateways_asked, "heldRequests" in decision.inputs) == (0, False)
    decision = (await bench.tick(bench.subject(min_replicas=0)))["ns/chat"]
    assert (bench.metrics.gateways_asked, decision.inputs["inFlightRequests"]) == (1, 1)
    bench.metrics.complete = False
    decision = (await bench.tick(bench.subject(min_replicas=0)))["ns/chat"]
    assert "inFlightRequests" not in decision.inputs


async def test_decision_that_fails_does_not_stop_the_others(bench, monkeypatch, caplog):
    def broken(policy, observation, history, now):
        if observation.target == 7:
            raise ZeroDivisionError
        return decide(policy, observation, history, now)

    monkeypatch.setattr("quire_operator.autoscaling.autoscale.decide", broken)
    bench.targets = {"ns/a": 7}
    bench.metrics.figures["ns/b-0"] = {"running": 10.0, "waiting": 5.0}
    decisions = await bench.tick(bench.subject("ns/a"), bench.subject("ns/b"))
    assert {key: d.desired for key, d in decisions.items()} == {"ns/b": 2}
    assert "ns/a: decision failed" in caplog.text


async def test_recreated_deployment_starts_without_old_history(bench):
    bench.metrics.figures["ns/chat-0"] = {"running": 10.0, "waiting": 5.0}
    await bench.tick(replace(bench.subject(), uid="first"))
    bench.metrics.figures["ns/chat-0"] = {"running": 1.0}
    await bench.tick(replace(bench.subject(), uid="second"))
    assert bench.ledger.calls[-1] == ("persist", "ns/chat", 1)
    assert bench.ledger.records["ns/chat"].changes == ()
