"""spec.rollout and spec.drain: how replicas are replaced, and how long one that goes may finish what it streams."""

from dataclasses import dataclass
from enum import StrEnum

from quire_operator.domain.resource.fields import Fields
from quire_operator.domain.resource.windows import RecurringWindow, read_window

_NONE = (0, "0%")
_MAX_WINDOWS = 16


class RolloutStrategy(StrEnum):
    ROLLING_UPDATE = "RollingUpdate"
    RECREATE = "Recreate"
    """For clusters with no spare GPU and no wish to roll one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    strategy: RolloutStrategy
    max_surge: int | str
    """A number or a percentage of the replicas, which Kubernetes rounds up."""
    max_unavailable: int | str
    """The same, rounded down; where both come to 0, Kubernetes allows one replica to be unavailable."""
    windows: tuple[RecurringWindow, ...] = ()
    """When a rollout may start; empty: at any time."""
    progress_deadline_seconds: float | None
    """None: as long as this model may take to start."""

    def next_window(self, now: float) -> float | None:
        """Return when the next window opens; None if a rollout may start now."""
        if not self.windows or any(window.open_until(now) is not None for window in self.windows):
            return None
        return min((start for window in self.windows if (start := window.next_start(now)) is not None), default=None)

    @property
    def surges(self) -> bool:
        """Return True if replicas are added before others are removed."""
        return self.max_surge not in _NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    timeout_seconds: float


def read_rollout(fields: Fields) -> Rollout:
    rollout = Rollout(
        strategy=fields.choice("strategy", RolloutStrategy, default=RolloutStrategy.ROLLING_UPDATE),
        max_surge=fields.count_or_percent("maxSurge", default=1),
        max_unavailable=fields.count_or_percent("maxUnavailable", default=0),
        windows=_read_windows(fields),
        progress_deadline_seconds=_read_deadline(fields),
    )
    if rollout.strategy is RolloutStrategy.RECREATE:
        for key in ("maxSurge", "maxUnavailable"):
            if fields.has(key):
                fields.problem(key, "is not used by strategy Recreate: remove it")
    elif not rollout.surges and rollout.max_unavailable in _NONE:
        fields.problem("maxUnavailable", "must be at least 1 while maxSurge is 0: otherwise no replica can be replaced")
    fields.done()
    return rollout


def _read_windows(fields: Fields) -> tuple[RecurringWindow, ...]:
    listed = fields.sections("windows")
    if len(listed) > _MAX_WINDOWS:
        fields.problem("windows", f"must have at most {_MAX_WINDOWS} entries, got {len(listed)}")
    found = []
    for each in listed:
        found.append(read_window(each))
        each.done()
    return tuple(window for window in found if window is not None)


def _read_deadline(fields: Fields) -> float | None:
    if not fields.has("progressDeadline"):
        return None
    return fields.duration("progressDeadline", default=600.0, minimum=10.0)


def read_drain(fields: Fields) -> Drain:
    drain = Drain(timeout_seconds=fields.duration("timeout", default=120.0, maximum=3600.0))
    fields.done()
    return drain
