"""How many replicas: ``decide(policy, observation, history, now) -> Decision``, a function of values.

Called by ``autoscale`` once a tick, in the cluster, locally and in the simulator alike. It knows neither Kubernetes nor
where the figures come from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from quire_operator.domain.history import History, ScalingRecord
from quire_operator.domain.observation import Observation


class Mode(StrEnum):
    ENFORCE = "Enforce"
    RECOMMEND = "Recommend"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimit:
    """How fast replicas may change: the larger of ``max_percent`` and ``max_step`` within ``period_seconds``."""

    window_seconds: float
    max_step: int
    period_seconds: float
    max_percent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a person asked for: ``spec.autoscaling`` and what else of the spec bears on it."""

    min_replicas: int
    max_replicas: int
    max_sequences: int
    """Sequences one replica runs at once (``engine.maxSequences``)."""
    mode: Mode = Mode.ENFORCE
    queue_depth: float | None = None
    kv_usage_percent: float | None = None
    first_token_percentile: float | None = 95.0
    first_token_threshold_seconds: float = 1.0
    scale_up: StepLimit = StepLimit(window_seconds=0.0, max_percent=100, max_step=4, period_seconds=15.0)
    scale_down: StepLimit = StepLimit(window_seconds=300.0, max_step=1, period_seconds=60.0)
    sample_max_age_seconds: float = 45.0


class Reason(StrEnum):
    """Why the decision is what it is: one word, for status, events and metrics."""

    WORK = "ArrivingWork"
    KV_DEMAND = "KVDemand"
    CONCURRENCY = "Concurrency"
    QUEUE_DEPTH = "QueueDepth"
    KV_USAGE = "KVUsage"
    FIRST_TOKEN_SLO = "TimeToFirstToken"
    HELD_REQUESTS = "HeldRequests"
    STEADY = "Steady"
    DEMAND_FELL = "DemandFell"
    IDLE = "Idle"
    WINDOW = "ScaleDownWindow"
    RESTARTED = "Restarted"
    METRICS_STALE = "MetricsStale"
    METRICS_PARTIAL = "MetricsPartial"
    ROLLING_OUT = "RollingOut"
    BOUNDS = "Bounds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many replicas there should be, why, and what to remember."""

    time: float
    current: int
    desired: int
    reason: Reason
    message: str
    """One sentence with its numbers."""
    inputs: Mapping[str, float]
    victims: tuple[str, ...] = ()
    """On the way down: the replicas that lose least, as many as go."""
    enforced: bool = True
    """False in Recommend mode: decided and explained, not to be acted upon."""
    history: History

    @property
    def changes(self) -> bool:
        return self.desired != self.current

    @property
    def record(self) -> ScalingRecord:
        return self.history.record


def decide(policy: Policy, observation: Observation, history: History, now: float) -> Decision:
    """One tick of one LLMDeployment."""
    raise NotImplementedError
