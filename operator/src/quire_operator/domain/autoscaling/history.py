"""What the autoscaler remembers: in memory from tick to tick, and the small part that outlives a restart.

``History`` is a value: ``autoscaler.decide`` takes one and returns the next. ``ScalingRecord`` is what goes to
``status.autoscaling`` and ``status.capacity`` (or the local state file) and comes back after a restart.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from quire_operator.domain.autoscaling.observation import ReplicaSample
from quire_operator.domain.autoscaling.ramp import RampEstimator
from quire_operator.domain.autoscaling.rates import Evidence, Rates
from quire_operator.domain.autoscaling.startups import StartUps
from quire_operator.domain.autoscaling.ttft_correction import TtftCorrection
from quire_operator.domain.autoscaling.variance import Variance

MAX_CHANGES = 10
MAX_GAP_SECONDS = 120.0
"""Ticks further apart than this do not make one stretch of observed demand."""
_TOLERANCE = 0.1
"""What was learnt anew is worth a write from such a difference on."""
_RATES_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A decision for another number of replicas."""

    time: float
    from_replicas: int
    to_replicas: int
    reason: str
    message: str
    inputs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRecord:
    """What is persisted, and before it is acted upon. Equal records need no write."""

    desired_replicas: int | None = None
    """The last decision; None before the first."""
    changes: tuple[Change, ...] = ()
    """The last ``MAX_CHANGES``, oldest first."""
    rates: Rates | None = None
    rates_time: float = 0.0
    start_up_seconds: int | None = None
    """How long replicas take to start; None until one was watched."""

    def with_change(self, change: Change) -> "ScalingRecord":
        """Its decision becomes the last; one that is the same still, as nobody acted upon it, is not told twice."""
        last = self.changes[-1] if self.changes else None
        same = last is not None and (last.from_replicas, last.to_replicas) == (change.from_replicas, change.to_replicas)
        same = same and self.desired_replicas == change.to_replicas
        changes = self.changes if same else (*self.changes, change)[-MAX_CHANGES:]
        return replace(self, desired_replicas=change.to_replicas, changes=changes)

    def with_rates(self, rates: Rates | None, now: float) -> "ScalingRecord":
        """New rates, if they differ enough to be worth a write and the last write was a while ago."""
        if rates is None:
            return self
        if self.rates is not None:
            recent = 0 <= now - self.rates_time < _RATES_SECONDS
            if recent or rates.is_near(self.rates, tolerance=_TOLERANCE):
                return self
        return replace(self, rates=rates, rates_time=now)

    def with_start_up(self, seconds: float | None) -> "ScalingRecord":
        """Another start-up, if it differs enough for a write; it is learnt only when a replica becomes ready."""
        known = self.start_up_seconds
        if seconds is None or (known is not None and math.isclose(seconds, known, rel_tol=_TOLERANCE, abs_tol=1.0)):
            return self
        return replace(self, start_up_seconds=max(1, round(seconds)))


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
    """What came in, and how first tokens fared, between two ticks, all replicas together."""

    time: float
    seconds: float
    requests: float
    prompt_tokens: float
    """Uncached ones."""
    first_tokens: float
    late_first_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A change of replicas that was carried out."""

    time: float
    from_replicas: int
    to_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The memory of one LLMDeployment's autoscaler."""

    record: ScalingRecord = ScalingRecord()
    idle_since: float | None = None
    """The first of the ticks up to now at which no replica was needed; None if one is needed, or after a restart."""
    last_tick: float | None = None
    """None before the first tick of this process."""
    settled_since: float | None = None
    """Since when no replica is starting; None while one is."""
    needs: tuple[Need, ...] = ()
    """Of the longer stabilisation window."""
    flows: tuple[Flow, ...] = ()
    """Of as long as ``Tuning`` looks back."""
    moves: tuple[Move, ...] = ()
    """Of the longer period of the step limits."""
    samples: Mapping[str, ReplicaSample] = field(default_factory=dict)
    """The last good sample of each live replica: what the next counters are compared with."""
    evidence: Evidence = Evidence()
    """What the rates are learnt from."""
    rates: Rates | None = None
    """As they were learnt last."""
    variance: Variance = Variance()
    """How much arriving work varies."""
    start_ups: StartUps = StartUps()
    """How long replicas take to start."""
    ramp: RampEstimator = RampEstimator()
    """How far work rises meanwhile."""
    ttft_correction: TtftCorrection = TtftCorrection()
    """What late first tokens taught."""

    @classmethod
    def restored(cls, record: ScalingRecord) -> "History":
        """After a restart: what was persisted, and no memory of demand."""
        moves = tuple(
            Move(time=change.time, from_replicas=change.from_replicas, to_replicas=change.to_replicas)
            for change in record.changes
        )
        return cls(record=record, moves=moves, rates=record.rates, start_ups=StartUps(before=record.start_up_seconds))

    def forgetting_gaps(self, now: float) -> "History":
        """Without its memory of demand if the last tick was so long ago that what came between is unknown."""
        if self.last_tick is None or 0 <= now - self.last_tick <= MAX_GAP_SECONDS:
            return self
        return History.restored(self.record)

    def by_the_clock(self, now: float) -> "History":
        """Moves in the future were made by another clock, or before this one was set back: they count as made now.

        Else the step limits would hold for as long as the two clocks are apart.
        """
        if all(move.time <= now for move in self.moves):
            return self
        return replace(self, moves=tuple(replace(move, time=min(move.time, now)) for move in self.moves))
