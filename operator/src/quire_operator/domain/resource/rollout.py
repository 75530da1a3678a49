"""spec.rollout and spec.drain: how replicas are replaced, and how long one that goes may finish what it streams."""

from dataclasses import dataclass
from enum import StrEnum

from quire_operator.domain.resource.fields import Fields

_NONE = (0, "0%")


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
    progress_deadline_seconds: float | None
    """None: as long as this model may take to start."""

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


def _read_deadline(fields: Fields) -> float | None:
    if not fields.has("progressDeadline"):
        return None
    return fields.duration("progressDeadline", default=600.0, minimum=10.0)


def read_drain(fields: Fields) -> Drain:
    drain = Drain(timeout_seconds=fields.duration("timeout", default=120.0, maximum=3600.0))
    fields.done()
    return drain
