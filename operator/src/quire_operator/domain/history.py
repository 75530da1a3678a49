"""What the autoscaler remembers: in memory from tick to tick, and the small part that outlives a restart.

``History`` is a value: ``autoscaler.decide`` takes one and returns the next. ``ScalingRecord`` is what goes to
``status.autoscaling`` (or the local state file) and comes back after a restart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire_operator.domain.observation import ReplicaSample
from quire_operator.domain.rates import Evidence, Rates

MAX_DECISIONS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A decision that changed, or would change, the number of replicas."""

    time: float
    from_replicas: int
    to_replicas: int
    reason: str
    message: str
    inputs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRecord:
    """``status.autoscaling`` and ``status.capacity``: what is persisted before it is acted upon."""

    desired_replicas: int | None = None
    """The last decision; None before the first."""
    changes: tuple[Change, ...] = ()
    """The last ``MAX_DECISIONS`` changes, oldest first."""
    rates: Rates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """How many replicas one tick's demand asked for."""

    time: float
    up: float
    """With missing replicas counted as empty."""
    down: float
    """With missing and unready replicas counted as full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What flowed through all replicas between two ticks."""

    time: float
    seconds: float
    requests: float = 0.0
    prompt_tokens: float = 0.0
    """Uncached prompt tokens that arrived."""
    first_tokens: float = 0.0
    late_first_tokens: float = 0.0
    """Those that waited beyond the threshold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The memory of one LLMDeployment's autoscaler."""

    record: ScalingRecord = ScalingRecord()
    needs: tuple[Need, ...] = ()
    """Of the longest stabilisation window; empty before the first tick."""
    flows: tuple[Flow, ...] = ()
    samples: Mapping[str, ReplicaSample] = field(default_factory=dict)
    """The last good sample of each live replica: what the next counters are compared with."""
    evidence: Evidence | None = None
    """What the rates are learnt from."""

    @classmethod
    def restored(cls, record: ScalingRecord) -> "History":
        """After a restart: what was persisted, and no memory of demand."""
        return cls(record=record)
