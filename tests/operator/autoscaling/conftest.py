"""The autoscaler of one LLMDeployment, tick by tick: chosen metrics of replicas, and the decisions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from quire_operator.api import (
    Autoscaling,
    AutoscalingMode,
    LatencyTarget,
    ScaleDown,
    ScaleToZero,
    ScaleUp,
    ScalingTargets,
    Schedule,
)
from quire_operator.autoscaling.decide import Decision, decide
from quire_operator.autoscaling.decision_context import Policy
from quire_operator.autoscaling.history import History
from quire_operator.autoscaling.observation import (
    Histogram,
    Observation,
    ReplicaObservation,
    ReplicaPhase,
    ReplicaSample,
)

KV_TOKENS = 10_000.0
UP = ScaleUp.steps(window_seconds=0.0, max_percent=100, max_step=4, period_seconds=15.0)
TO_ZERO = ScaleToZero()
DOWN = ScaleDown.steps(window_seconds=300.0, max_step=1, period_seconds=60.0)


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A replica with chosen metrics; its sample is ``age`` seconds old at the tick."""

    name: str
    phase: ReplicaPhase = ReplicaPhase.READY
    age: float | None = 0.0
    """None means that it has no sample."""
    figures: Mapping[str, object] = field(default_factory=dict)

    def observed(self, now: float) -> ReplicaObservation:
        sample = None
        if self.age is not None:
            gauges = {"waiting": 0.0, "running": 0.0, "queued_prompt_tokens": 0.0, "kv_tokens_used": 0.0}
            figures = {**gauges, "kv_tokens_capacity": KV_TOKENS, **self.figures}
            sample = ReplicaSample(time=now - self.age, **figures)
        return ReplicaObservation(name=self.name, phase=self.phase, sample=sample)


class Story:
    """A deployment whose replicas exist as soon as they are requested, unless a test says otherwise."""

    def __init__(self, *, current: int | None = 1, history: History | None = None, **rules: object) -> None:
        self.policy = policy(**rules)
        self.target = current
        self.time = 1_000_000.0
        self.history = History() if history is None else history
        self.decisions: list[Decision] = []

    def tick(
        self,
        *replicas: Replica,
        after: float = 15.0,
        held: int | None = None,
        in_flight: int | None = None,
        rolling_out: bool = False,
    ) -> Decision:
        """Run one tick and apply its decision."""
        self.time += after
        seen = tuple(replica.observed(self.time) for replica in replicas)
        observation = Observation(
            replicas=seen, target=self.target, held_requests=held, in_flight_requests=in_flight, rolling_out=rolling_out
        )
        decision = decide(self.policy, observation, self.history, self.time)
        self.history = decision.history
        if decision.enforced:
            self.target = decision.desired
        self.decisions.append(decision)
        return decision

    def ticks(self, count: int, *replicas: Replica, **looks: object) -> list[Decision]:
        return [self.tick(*replicas, **looks) for _ in range(count)]

    def restart(self) -> None:
        """Restart the operator with the persisted record."""
        self.history = History.restored(self.history.record)


def policy(
    *,
    min_replicas: int = 1,
    max_replicas: int = 10,
    max_sequences: int = 10,
    mode: AutoscalingMode = AutoscalingMode.ENFORCE,
    queue_depth: int | None = None,
    kv_usage_percent: int | None = None,
    percentile: int = 95,
    up: ScaleUp = UP,
    down: ScaleDown = DOWN,
    to_zero: ScaleToZero = TO_ZERO,
    schedules: tuple[Schedule, ...] = (),
) -> Policy:
    targets = ScalingTargets(
        queue_depth=queue_depth,
        kv_usage_percent=kv_usage_percent,
        time_to_first_token=LatencyTarget(percentile=percentile, threshold_seconds=1.0),
    )
    rules = Autoscaling(
        mode=mode,
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        metrics_source=None,
        targets=targets,
        scale_up=up,
        scale_down=down,
        scale_to_zero=to_zero,
        schedules=schedules,
    )
    return Policy(autoscaling=rules, max_sequences=max_sequences)


def ready(name: str, *, age: float | None = 0.0, **figures: object) -> Replica:
    return Replica(name=name, age=age, figures=figures)


def loading(name: str) -> Replica:
    return Replica(name=name, phase=ReplicaPhase.LOADING, age=None)


def fleet(count: int, **figures: float) -> list[Replica]:
    """Return ready replicas with equal metrics."""
    return [ready(f"r{n}", **figures) for n in range(count)]


def waits(*, quick: float, late: float) -> Histogram:
    """Return first tokens that waited less and more than the threshold of one second."""
    return Histogram(bounds=(0.5, 1.0, 2.0, float("inf")), counts=(quick, quick, quick + late, quick + late))


@dataclass(frozen=True)
class Kit:
    """The functions above, because test modules cannot import each other."""

    story: Callable[..., Story] = Story
    policy: Callable[..., Policy] = policy
    replica: Callable[..., Replica] = Replica
    ready: Callable[..., Replica] = ready
    loading: Callable[..., Replica] = loading
    fleet: Callable[..., list[Replica]] = fleet
    waits: Callable[..., Histogram] = waits


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()
