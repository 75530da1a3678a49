"""How long replicas take to start, learnt from those that were watched doing it.

Under ``autoscaler.decide``; part of ``history``. A burst has to be borne for so long by what there is. Counted is the
time from the look that first saw a replica to the look that first saw it ready, all by the operator's own clock; no
other one is believed. Not counted: a replica that was starting already when watching began, one that becomes ready
again, and one that never does.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from quire_operator.domain.autoscaling.observation import ReplicaObservation, ReplicaPhase

USUAL_SECONDS = 120.0
"""What is assumed until one was watched: weights from a disk nearby."""
MAX_SECONDS = 1800.0
"""A replica that took longer waited for a machine; demand half an hour ahead is nobody's to know."""
_REMEMBERED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUps:
    """The last few, and the replicas that are starting."""

    seconds: tuple[float, ...] = ()
    """Oldest first."""
    since: Mapping[str, float | None] = field(default_factory=dict)
    """Since when each replica there is was seen starting; None where that is unknown or over."""
    before: float | None = None
    """What was learnt in an earlier life."""

    @property
    def usual(self) -> float:
        """Rather one of the longer ones; that one alone took long says nothing."""
        earlier = () if self.before is None else (min(self.before, MAX_SECONDS),)
        known = (*earlier, *self.seconds)[-_REMEMBERED:]
        return sorted(known)[3 * (len(known) - 1) // 4] if known else USUAL_SECONDS

    @property
    def learnt(self) -> float | None:
        """None where that is but an assumption."""
        return self.usual if self.seconds or self.before is not None else None

    def seen(self, replicas: Iterable[ReplicaObservation], *, is_first: bool, now: float) -> "StartUps":
        """``is_first``: what was before is unknown."""
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
