"""One tick of the autoscaler over all LLMDeployments: metrics → observe → decide → persist → scale.

Called every ``TICK_SECONDS`` by whoever owns the loop (the operator's process, ``quire up``); decides nothing itself.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quire_operator.domain.autoscaler import Decision, Policy, decide
from quire_operator.domain.history import History, ScalingRecord
from quire_operator.domain.observation import Observation, ReplicaObservation, ReplicaSample
from quire_operator.ports import Clock, Metrics, ReplicaAddress, ScaleTarget, ScalingNotDone

TICK_SECONDS = 15.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One LLMDeployment that autoscales, as its cluster sees it now."""

    key: str
    model: str
    """The served name, by which the gateways count held requests."""
    policy: Policy
    replicas: tuple[ReplicaAddress, ...]
    target: int | None
    """Replicas asked for now; None before anybody asked."""
    rolling_out: bool = False
    record: ScalingRecord | None = None
    """What was persisted; read only at this process's first tick for this key."""


@dataclass(frozen=True, slots=True)
class _Memory:
    history: History
    persisted: ScalingRecord | None


class Autoscaler:
    """Holds the memory of each LLMDeployment between ticks."""

    def __init__(self, *, metrics: Metrics, target: ScaleTarget, clock: Clock) -> None:
        self._metrics, self._target, self._clock = metrics, target, clock
        self._memory: dict[str, _Memory] = {}

    async def tick(self, subjects: Sequence[Subject]) -> dict[str, Decision]:
        """Decide for every subject, persist what changed, then scale; by key. Forgets keys that are not among them."""
        samples, held = await asyncio.gather(
            self._metrics.samples([replica for subject in subjects for replica in subject.replicas]),
            self._metrics.held_requests(),
        )
        now = self._clock.now()
        self._memory = {s.key: self._memory.get(s.key) or _remembered(s) for s in subjects}
        decisions = {
            s.key: decide(s.policy, observe(s, samples, held), self._memory[s.key].history, now) for s in subjects
        }
        await asyncio.gather(*(self._carry_out(key, decision) for key, decision in decisions.items()))
        return decisions

    async def _carry_out(self, key: str, decision: Decision) -> None:
        """Persist, then act. What could not be done is not remembered as done, so the next tick decides it anew."""
        before = self._memory[key]
        persisted = before.persisted
        try:
            if decision.record != persisted:
                await self._target.persist(key, decision.record)
                persisted = decision.record
            if decision.is_change and decision.enforced:
                _log.info("%s: %s", key, decision.message)
                await self._target.scale(key, replicas=decision.desired, victims=decision.victims)
        except ScalingNotDone as error:
            _log.warning("%s: %s: not done, to be tried again: %s", key, decision.message, error)
            undone = replace(decision.history, moves=before.history.moves, record=persisted or before.history.record)
            self._memory[key] = _Memory(history=undone, persisted=persisted)
        else:
            self._memory[key] = _Memory(history=decision.history, persisted=persisted)


def observe(subject: Subject, samples: Mapping[str, ReplicaSample], held: Mapping[str, int] | None) -> Observation:
    """What is known of one LLMDeployment at this tick."""
    return Observation(
        replicas=tuple(
            ReplicaObservation(name=replica.name, phase=replica.phase, sample=samples.get(replica.name))
            for replica in subject.replicas
        ),
        target=subject.target,
        held_requests=None if held is None else held.get(subject.model, 0),
        rolling_out=subject.rolling_out,
    )


def _remembered(subject: Subject) -> _Memory:
    record = subject.record
    return _Memory(history=History() if record is None else History.restored(record), persisted=record)
