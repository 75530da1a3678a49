"""The autoscaler's history: in memory from tick to tick, and the small part that is persisted.

``History`` is a value: ``autoscaling.decide`` gets one and returns the next. ``ScalingRecord`` is the part in
``status.autoscaling`` and ``status.capacity`` (or the local state file), which is restored after a restart.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from quire_operator.autoscaling.observation import ReplicaObservation, ReplicaPhase, ReplicaSample
from quire_operator.autoscaling.ramp import RampEstimator
from quire_operator.autoscaling.rates import Evidence, Rates
from quire_operator.autoscaling.ttft_correction import TtftCorrection
from quire_operator.autoscaling.variance import Variance

USUAL_SECONDS = 120.0
"""The assumed start-up time until one was observed: weights on a local disk."""
MAX_SECONDS = 1800.0
"""The cap of a start-up time. A replica that took longer waited for a node, and later demand is unknown."""
_REMEMBERED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUps:
    """The last start-up times, and the replicas that are starting."""

    seconds: tuple[float, ...] = ()
    """The oldest first."""
    since: Mapping[str, float | None] = field(default_factory=dict)
    """The time since when each replica was seen starting; None if that is unknown or over."""
    before: float | None = None
    """The persisted start-up time of an earlier process."""

    @property
    def usual(self) -> float:
        """The typical start-up time: a high quantile, which ignores the single longest one."""
        earlier = () if self.before is None else (min(self.before, MAX_SECONDS),)
        known = (*earlier, *self.seconds)[-_REMEMBERED:]
        return sorted(known)[3 * (len(known) - 1) // 4] if known else USUAL_SECONDS

    @property
    def learnt(self) -> float | None:
        """The typical start-up time; None if it is only assumed."""
        return self.usual if self.seconds or self.before is not None else None

    def seen(self, replicas: Iterable[ReplicaObservation], *, is_first: bool, now: float) -> "StartUps":
        """Return the start-ups after a tick. ``is_first`` means that earlier phases are unknown."""
        since: dict[str, float | None] = {}
        took: list[float] = []
        for replica in replicas:
            began = self.since.get(replica.name)
            match replica.phase:
                case ReplicaPhase.PENDING | ReplicaPhase.LOADING:
                    is_new = not is_first and replica.name not in self.since
                    since[replica.name] = now if is_new else began
                case ReplicaPhase.READY:
                    since[replica.name] = None
                    if began is not None and now > began:
                        took.append(min(now - began, MAX_SECONDS))
                case ReplicaPhase.DRAINING:
                    since[replica.name] = None
        return replace(self, seconds=(*self.seconds, *took)[-_REMEMBERED:], since=since)


MAX_CHANGES = 10
MAX_GAP_SECONDS = 120.0
"""The longest gap between ticks within one period of observed demand."""
_TOLERANCE = 0.1
"""The relative difference from which newly learned values are written."""
_RATES_SECONDS = 60.0


class ScalingNotDone(Exception):
    """A decision could not be persisted or applied now; the next tick tries again."""


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
    """The persisted part of the history, written before a decision is applied. Equal records need no write."""

    desired_replicas: int | None = None
    """The last decision; None before the first."""
    changes: tuple[Change, ...] = ()
    """The last ``MAX_CHANGES`` changes, the oldest first."""
    rates: Rates | None = None
    rates_time: float = 0.0
    start_up_seconds: int | None = None
    """The start-up time of replicas; None until one was observed."""

    def with_change(self, change: Change) -> "ScalingRecord":
        """Return the record after a change. An unapplied change that is decided again is not recorded twice."""
        last = self.changes[-1] if self.changes else None
        same = last is not None and (last.from_replicas, last.to_replicas) == (change.from_replicas, change.to_replicas)
        same = same and self.desired_replicas == change.to_replicas
        changes = self.changes if same else (*self.changes, change)[-MAX_CHANGES:]
        return replace(self, desired_replicas=change.to_replicas, changes=changes)

    def with_rates(self, rates: Rates | None, now: float) -> "ScalingRecord":
        """Return the record with new rates if they differ enough for a write and the last write was a while ago."""
        if rates is None:
            return self
        if self.rates is not None:
            recent = 0 <= now - self.rates_time < _RATES_SECONDS
            if recent or rates.is_near(self.rates, tolerance=_TOLERANCE):
                return self
        return replace(self, rates=rates, rates_time=now)

    def with_start_up(self, seconds: float | None) -> "ScalingRecord":
        """Return the record with another start-up time if it differs enough for a write."""
        known = self.start_up_seconds
        if seconds is None or (known is not None and math.isclose(seconds, known, rel_tol=_TOLERANCE, abs_tol=1.0)):
            return self
        return replace(self, start_up_seconds=max(1, round(seconds)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The number of replicas that the demand of one tick requires."""

    time: float
    up: float
    """The need if replicas without metrics are empty."""
    down: float
    """The need if replicas without metrics or not ready are full."""


@dataclass(frozen=True, slots=True)
class LateCount:
    """A number of measured latencies, and how many of them were above a threshold."""

    total: float = 0.0
    late: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The arrivals and first tokens of all replicas between two ticks."""

    time: float
    seconds: float
    requests: float
    prompt_tokens: float
    """Prompt tokens that were not in the prefix cache."""
    first_tokens: float
    late_first_tokens: float
    """First tokens that waited over firstTokenWait beyond their own prefill."""
    whole_first_tokens: LateCount = LateCount()
    """First tokens against totalTimeToFirstToken; zero without that target."""
    token_gaps: LateCount = LateCount()
    """Times between tokens against interTokenLatency; zero without that target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A change of replicas that was applied."""

    time: float
    from_replicas: int
    to_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The state of one LLMDeployment's autoscaler between ticks."""

    record: ScalingRecord = ScalingRecord()
    idle_since: float | None = None
    """The first of the latest ticks in a row that needed no replica; None if one is needed or after a restart."""
    last_tick: float | None = None
    """None before the first tick of this process."""
    settled_since: float | None = None
    """The time since when no replica is starting; None while one is."""
    needs: tuple[Need, ...] = ()
    """The needs within the longer stabilization window."""
    flows: tuple[Flow, ...] = ()
    """The flows within the longest period of ``Tuning``."""
    moves: tuple[Move, ...] = ()
    """The moves within the longer period of the step limits."""
    samples: Mapping[str, ReplicaSample] = field(default_factory=dict)
    """The last valid sample of each live replica, with which the next counters are compared."""
    evidence: Evidence = Evidence()
    """The sums from which the rates are learned."""
    rates: Rates | None = None
    """The rates that were learned last."""
    variance: Variance = Variance()
    """The variance of the arriving work."""
    start_ups: StartUps = StartUps()
    """The start-up times of replicas."""
    ramp: RampEstimator = RampEstimator()
    """The rise of the work while a replica starts."""
    ttft_correction: TtftCorrection = TtftCorrection()
    """The factor learned from late first tokens."""

    @classmethod
    def restored(cls, record: ScalingRecord) -> "History":
        """Return the history after a restart: the persisted part, without knowledge of demand."""
        moves = tuple(
            Move(time=change.time, from_replicas=change.from_replicas, to_replicas=change.to_replicas)
            for change in record.changes
        )
        return cls(record=record, moves=moves, rates=record.rates, start_ups=StartUps(before=record.start_up_seconds))

    def forgetting_gaps(self, now: float) -> "History":
        """Return the history without demand if the last tick was so long ago that the demand in between is unknown."""
        if self.last_tick is None or 0 <= now - self.last_tick <= MAX_GAP_SECONDS:
            return self
        return History.restored(self.record)

    def by_the_clock(self, now: float) -> "History":
        """Return the history with moves in the future counted as made now.

        Another clock made them, or this one was set back. Otherwise the step limits would hold for as long as the
        clocks differ.
        """
        if all(move.time <= now for move in self.moves):
            return self
        return replace(self, moves=tuple(replace(move, time=min(move.time, now)) for move in self.moves))
