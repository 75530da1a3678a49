"""The bounds at a time: ``bounds_at(rules, now, start_up_seconds) -> Bounds``, pure.

``autoscaling.decide``, ``plan.target`` and the status all use this function, so that they agree. Of several
schedules whose windows are open, the first in the list wins as a whole. The minimum rises before its time, by as long
as replicas take to start, so that they are ready when the window opens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from quire_operator.api.fields import clock_time
from quire_operator.api.scaling import Autoscaling, Schedule
from quire_operator.autoscaling.history import MAX_SECONDS, USUAL_SECONDS, ScalingRecord

MARGIN_SECONDS = 30.0
"""A part of the lead: two ticks, at one of which the replicas are requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleInForce:
    """A schedule that sets the bounds, or for which replicas start already."""

    index: int
    schedule: Schedule
    min_replicas: int
    max_replicas: int
    since: float | None = None
    """When its window opens; None if it is open."""
    end: float
    """When it stops setting the bounds."""

    @property
    def path(self) -> str:
        return f"autoscaling.schedules[{self.index}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The fewest and the most replicas at one time."""

    min_replicas: int
    max_replicas: int
    schedule: ScheduleInForce | None = None
    """Also set while replicas start for it; None while the spec's own bounds apply."""
    ahead_at: float | None = None
    """When a higher minimum applies, for which replicas start already; None if they need not."""
    next_change: float | None = None
    """When the bounds may be others; None if they never are."""

    @property
    def why(self) -> str | None:
        """Return why these are the bounds, to stand in a sentence; None if the spec alone says so."""
        schedule = self.schedule
        if self.ahead_at is not None:
            whose = "" if schedule is None or schedule.since is None else f" by {schedule.path}"
            return f"minReplicas is {self.min_replicas} from {clock_time(self.ahead_at)}{whose}, and replicas take time"
        return None if schedule is None else f"{schedule.path} applies until {clock_time(schedule.end)}"

    def clamp(self, replicas: int) -> int:
        """Return the number of replicas within the bounds that is nearest."""
        return max(self.min_replicas, min(replicas, self.max_replicas))


def bounds_at(rules: Autoscaling, now: float, *, start_up_seconds: float | None) -> Bounds:
    """Return the bounds at ``now``. ``start_up_seconds`` is what was learned; None takes an assumption."""
    if not rules.schedules:
        return Bounds(min_replicas=rules.min_replicas, max_replicas=rules.max_replicas)
    lead = min(USUAL_SECONDS if start_up_seconds is None else start_up_seconds, MAX_SECONDS) + MARGIN_SECONDS
    bounds = _without_lead(rules, now)
    changes = sorted(_changes(rules, now, until=now + lead))
    next_change = min((change if change <= now + lead else change - lead for change in changes), default=None)
    for change in changes:
        if change > now + lead:
            break
        coming = _without_lead(rules, change)
        if coming.min_replicas > bounds.min_replicas:
            bounds = replace(
                bounds,
                min_replicas=coming.min_replicas,
                max_replicas=max(bounds.max_replicas, coming.min_replicas),
                schedule=bounds.schedule or _from(coming.schedule, change),
                ahead_at=change,
            )
    return replace(bounds, next_change=next_change)


def _from(schedule: ScheduleInForce | None, start: float) -> ScheduleInForce | None:
    return None if schedule is None else replace(schedule, since=start)


def recorded_bounds(rules: Autoscaling, record: ScalingRecord | None, now: float) -> Bounds:
    """Return the bounds at ``now``, with the start-up time that was persisted."""
    return bounds_at(rules, now, start_up_seconds=None if record is None else record.start_up_seconds)


def _without_lead(rules: Autoscaling, now: float) -> Bounds:
    """Return what the spec and the schedule that is in force say."""
    for index, schedule in enumerate(rules.schedules):
        end = schedule.open_until(now)
        if end is None:
            continue
        before = (earlier.next_start(now) for earlier in rules.schedules[:index])
        least, most = rules.bounds_of(schedule)
        in_force = ScheduleInForce(
            index=index,
            schedule=schedule,
            min_replicas=least,
            max_replicas=most,
            end=min(start for start in (*before, end) if start is not None),
        )
        return Bounds(min_replicas=least, max_replicas=most, schedule=in_force)
    return Bounds(min_replicas=rules.min_replicas, max_replicas=rules.max_replicas)


def _changes(rules: Autoscaling, now: float, *, until: float) -> Iterator[float]:
    """Yield when windows open and close after ``now``: of each schedule up to ``until``, and the first one later."""
    for schedule in rules.schedules:
        time = now
        while time <= until:
            end, start = schedule.open_until(time), schedule.next_start(time)
            change = end if end is not None else start
            if change is None:
                break
            yield change
            time = change
