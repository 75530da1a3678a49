"""The start-up time of replicas, learned from observed start-ups.

Part of ``autoscaler.decide`` and of ``history``. The existing replicas have to bear a burst for this long. The time
runs from the tick that first saw a replica to the tick that first saw it ready, by the operator's clock only. A replica
that was already starting at the first tick, one that becomes ready again, and one that never becomes ready do not
count.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from quire_operator.domain.autoscaling.observation import ReplicaObservation, ReplicaPhase

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
