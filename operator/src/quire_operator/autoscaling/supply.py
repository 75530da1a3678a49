"""The replicas that exist, and their metrics that can be trusted."""

from collections.abc import Mapping
from dataclasses import dataclass

from quire_operator.autoscaling.observation import (
    Observation,
    ReplicaObservation,
    ReplicaPhase,
    ReplicaSample,
    is_sane,
    without_duplicates,
)

SAMPLE_SECONDS = 45.0
"""Older samples do not describe the present: three scrapes of 15 s."""
_SKEW_SECONDS = 30.0
"""The largest difference by which a sample's clock may be ahead."""

_LOSES_LEAST = (ReplicaPhase.PENDING, ReplicaPhase.LOADING, ReplicaPhase.READY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    current: int
    """The number of replicas requested."""
    replicas: tuple[ReplicaObservation, ...]
    """The replicas that do not drain; draining ones are neither supply nor demand."""
    ready: int
    starting: int
    """The replicas that are requested but not ready, whether they exist or not."""
    fresh: Mapping[str, ReplicaSample]
    """The samples of ready replicas that are recent enough for a decision."""
    oldest_sample: float | None
    """The time of the oldest among the newest samples of the ready replicas; None without samples."""

    @property
    def missing(self) -> int:
        """The number of ready replicas without a recent sample."""
        return self.ready - len(self.fresh)

    @property
    def is_stale(self) -> bool:
        """True if most ready replicas have no recent sample, so that no decision is possible."""
        return self.ready > 0 and len(self.fresh) * 2 < self.ready

    def victims(self, count: int) -> tuple[str, ...]:
        """Return the replicas with the least loss.

        They are those that are not ready, then those with the fewest sequences, the least KV usage and the last name.
        """
        ranked = sorted(sorted((r.name for r in self.replicas), reverse=True), key=self._loss)
        return tuple(ranked[:count])

    def _loss(self, name: str) -> tuple[int, float, float]:
        replica = next(r for r in self.replicas if r.name == name)
        sample = self.fresh.get(name)
        if sample is None:
            return _LOSES_LEAST.index(replica.phase), float("inf"), float("inf")
        return _LOSES_LEAST.index(replica.phase), sample.running + sample.waiting, sample.kv_tokens_used


def known_samples(observation: Observation, before: Mapping[str, ReplicaSample]) -> dict[str, ReplicaSample]:
    """Return the newest valid sample of each existing replica, from this tick or an earlier one."""
    known: dict[str, ReplicaSample] = {}
    for replica in without_duplicates(observation.replicas):
        sample, earlier = replica.sample, before.get(replica.name)
        if sample is not None and not is_sane(sample):
            sample = None
        newest = max((s for s in (earlier, sample) if s is not None), key=lambda s: s.time, default=None)
        if newest is not None:
            known[replica.name] = newest
    return known


def take_stock(observation: Observation, known: Mapping[str, ReplicaSample], now: float) -> Supply:
    """Return the counts of replicas and the samples that can be trusted."""
    replicas = tuple(r for r in without_duplicates(observation.replicas) if r.phase is not ReplicaPhase.DRAINING)
    current = len(replicas) if observation.target is None else observation.target
    ready = [r.name for r in replicas if r.phase is ReplicaPhase.READY]
    fresh = {name: known[name] for name in ready if name in known and _is_fresh(known[name], now)}
    return Supply(
        current=current,
        replicas=replicas,
        ready=len(ready),
        starting=max(len(replicas), current) - len(ready),
        fresh=fresh,
        oldest_sample=min((known[name].time for name in ready if name in known), default=None),
    )


def _is_fresh(sample: ReplicaSample, now: float) -> bool:
    return -_SKEW_SECONDS <= now - sample.time <= SAMPLE_SECONDS
