"""Stability under constant load for any engine: replicas that process a steady stream, with all their counters.

The model is a fluid: requests arrive at one rate and are shared evenly. A replica is busy according to the three costs
that ``rates`` learns, queues the rest, and reports gauges, counters and waits like an engine.
"""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire_operator.api import AutoscalingMode, ScaleDown
from quire_operator.autoscaling.decide import decide
from quire_operator.autoscaling.history import History
from quire_operator.autoscaling.observation import (
    Histogram,
    Observation,
    ReplicaObservation,
    ReplicaPhase,
    ReplicaSample,
)

START = 1_000_000.0
TICK = 15.0
SOME = settings(max_examples=settings.default.max_examples // 4)  # an example is hours of ticks


class Replica:
    """An engine with its queue and counters."""

    def __init__(self, born: float) -> None:
        self.born = born
        self.queued = self.arrived = self.served = self.steps = self.busy = self.late = self.running = 0.0


class Plant:
    def __init__(
        self,
        *,
        per_second: float,
        prompt: float,
        output: float,
        slots: int,
        step: float,
        prefill: float,
        decode: float,
        late_above: float = math.inf,
    ) -> None:
        """Above ``late_above`` requests/s per replica, first tokens are late, and no other metric shows it."""
        self.late_above = late_above
        self.per_second, self.prompt, self.output, self.slots = per_second, prompt, output, slots
        self.step, self.prefill, self.decode = step, prefill, decode
        self.kv_tokens = slots * (prompt + output) * 2
        self.replicas: list[Replica] = []

    def resize(self, count: int, now: float) -> None:
        self.replicas = self.replicas[:count] + [Replica(now) for _ in range(count - len(self.replicas))]

    def run(self, now: float, startup: float) -> Observation:
        """Run one tick and return the observation at its end."""
        up = [replica for replica in self.replicas if now - replica.born >= startup]
        for replica in up:
            self._work(replica, self.per_second * TICK / len(up))
        seen = tuple(
            ReplicaObservation(
                name=f"r{number}",
                phase=ReplicaPhase.READY if replica in up else ReplicaPhase.LOADING,
                sample=self._sample(replica, now) if replica in up else None,
            )
            for number, replica in enumerate(self.replicas)
        )
        return Observation(replicas=seen, target=len(self.replicas), held_requests=0, in_flight_requests=0)

    def _work(self, replica: Replica, arrived: float) -> None:
        wait = max(0.0, replica.queued - self.slots) * self._cost(self.slots)
        replica.arrived += arrived
        replica.queued += arrived
        batch = min(self.slots, max(1.0, replica.queued))
        served = min(replica.queued, TICK / self._cost(batch))
        replica.queued -= served
        replica.served += served
        replica.late += served if wait > 1.0 or arrived > self.late_above * TICK else 0.0
        replica.steps += served * self.output / batch
        replica.busy += served * self._cost(batch)
        # Little's law gives the number of requests in progress.
        replica.running = min(self.slots, served / TICK * self.output * self.step + min(replica.queued, self.slots))

    def _cost(self, batch: float) -> float:
        return self.prompt * self.prefill + self.output * (self.step / batch + self.decode)

    def _sample(self, replica: Replica, now: float) -> ReplicaSample:
        waiting = max(0.0, replica.queued - replica.running)
        quick = replica.served - replica.late
        return ReplicaSample(
            time=now,
            waiting=waiting,
            running=replica.running,
            queued_prompt_tokens=waiting * self.prompt,
            kv_tokens_used=replica.running * (self.prompt + self.output / 2),
            kv_tokens_capacity=self.kv_tokens,
            arrived_requests=replica.arrived,
            arrived_prompt_tokens=replica.arrived * self.prompt,
            prompt_tokens=replica.served * self.prompt,
            generation_tokens=replica.served * self.output,
            finished_requests=replica.served,
            steps=replica.steps,
            busy_seconds=replica.busy,
            first_token_waits=Histogram(bounds=(1.0, 10.0, math.inf), counts=(quick, replica.served, replica.served)),
        )


plants = st.fixed_dictionaries(
    {
        "per_second": st.floats(0, 20),
        "prompt": st.floats(50, 4000),
        "output": st.floats(5, 400),
        "slots": st.integers(4, 128),
        "step": st.floats(0.005, 0.05),
        "prefill": st.floats(1e-6, 3e-4),
        "decode": st.floats(0, 5e-4),
    }
)


def lived(policy, plant: Plant, *, startup: float, first: int, ticks: int) -> list[int]:
    """Return the requested (or recommended) replicas tick by tick."""
    now, history = START, History()
    plant.resize(first, now - startup)
    desired = []
    for _ in range(ticks):
        decision = decide(policy, plant.run(now, startup), history, now)
        history = decision.history
        if decision.enforced:
            plant.resize(decision.desired, now)
        desired.append(decision.desired)
        now += TICK
    return desired


def changes(desired: list[int]) -> list[int]:
    return [b - a for a, b in zip(desired, desired[1:], strict=False) if a != b]


# Needs that end within a per mille of a whole number of replicas.
CLOSE_TO_WHOLE = {
    "per_second": 15.0,
    "prompt": 387.0,
    "output": 226.0,
    "slots": 45,
    "step": 0.03125,
    "prefill": 0.00010262454717506925,
    "decode": 0.00012453944860287382,
}


@SOME
@example(plant=CLOSE_TO_WHOLE, startup=0.0, first=3, minimum=0)
@example(plant={**CLOSE_TO_WHOLE, "prompt": 397.0, "slots": 46}, startup=0.0, first=3, minimum=0)
@given(plants, st.sampled_from([0.0, 30.0, 120.0, 420.0]), st.integers(1, 8), st.integers(0, 1))
def test_replicas_for_a_steady_stream_converge(kit, plant, startup, first, minimum):
    down = ScaleDown.steps(window_seconds=120, max_step=2, period_seconds=30)
    policy = kit.policy(min_replicas=minimum, max_replicas=8, max_sequences=plant["slots"], down=down)
    desired = lived(policy, Plant(**plant), startup=startup, first=first, ticks=280)
    assert len(changes(desired[180:])) <= 1, desired
    turns = changes(desired)
    assert sum((a > 0) != (b > 0) for a, b in zip(turns, turns[1:], strict=False)) <= 2, desired


@SOME
@given(plants, st.integers(1, 8))
def test_a_recommendation_for_a_steady_stream_does_not_swing(kit, plant, first):
    policy = kit.policy(max_replicas=8, max_sequences=plant["slots"], mode=AutoscalingMode.RECOMMEND)
    desired = lived(policy, Plant(**plant), startup=0.0, first=first, ticks=120)
    # No client follows the recommendation. It may rise more than once with a growing queue, but never turns back.
    turns = changes(desired[60:])
    assert not any((a > 0) != (b > 0) for a, b in zip(turns, turns[1:], strict=False)), desired


@pytest.mark.parametrize("startup", [0.0, 120.0])
@pytest.mark.parametrize(("short", "replicas"), [(1.1, 1), (1.1, 4), (1.5, 1), (1.5, 4)])
def test_replicas_that_accept_less_are_not_retried_repeatedly(kit, short, replicas, startup):
    """All learned costs say that fewer replicas are enough; only first tokens are late. One trial per hour is fine."""
    figures = {"prompt": 500.0, "output": 100.0, "slots": 32, "step": 0.02, "prefill": 1e-4, "decode": 2e-4}
    per_second = 0.5 * replicas / Plant(per_second=0.0, **figures)._cost(32)
    policy = kit.policy(
        max_replicas=16, max_sequences=32, down=ScaleDown.steps(window_seconds=120, max_step=2, period_seconds=30)
    )
    first = lived(policy, Plant(per_second=per_second, **figures), startup=startup, first=4, ticks=60)[-1]
    plant = Plant(per_second=per_second, late_above=per_second / first / short, **figures)
    desired = lived(policy, plant, startup=startup, first=4, ticks=360)
    fifty_minutes = desired[-200:]
    assert len(changes(fifty_minutes)) <= 8, desired
