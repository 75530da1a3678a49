"""One tick of the autoscaler over all LLMDeployments: metrics → observe → decide → persist → scale.

Called every ``TICK_SECONDS`` by whoever owns the loop (``scaling_loop``); between ticks ``wake`` looks only whether a
request waits for a model that has no replica. Decides nothing itself.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quire_operator.domain.autoscaling.autoscaler import Decision, Policy, decide
from quire_operator.domain.autoscaling.gateway_contract import GatewayRequests
from quire_operator.domain.autoscaling.history import History, ScalingRecord
from quire_operator.domain.autoscaling.observation import Observation, ReplicaObservation, ReplicaPhase, ReplicaSample
from quire_operator.ports import Clock, Metrics, ReplicaAddress, ScaleTarget, ScalingNotDone

TICK_SECONDS = 15.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One LLMDeployment that autoscales, as its cluster sees it now."""

    key: str
    model: str
    """The served name, by which the gateways count requests."""
    policy: Policy
    replicas: tuple[ReplicaAddress, ...]
    target: int | None
    """Replicas asked for now; None before anybody asked."""
    rolling_out: bool = False
    record: ScalingRecord | None = None
    """What was persisted; read only at this process's first tick for it."""
    uid: str = ""
    """Tells it from an earlier one of this key, whose memory is not its own; empty where keys are not used again."""

    @property
    def hangs_on_gateways(self) -> bool:
        """Whether it matters what the gateways hold: it may go to zero, or nobody else could know what is asked."""
        may_sleep = self.policy.autoscaling.may_reach_zero
        return may_sleep or not any(replica.phase is ReplicaPhase.READY for replica in self.replicas)


@dataclass(frozen=True, slots=True)
class _Memory:
    uid: str
    history: History
    persisted: ScalingRecord | None


class Autoscaler:
    """Holds the memory of each LLMDeployment between ticks."""

    def __init__(self, *, metrics: Metrics, target: ScaleTarget, clock: Clock) -> None:
        self._metrics, self._target, self._clock = metrics, target, clock
        self._memory: dict[str, _Memory] = {}
        self._acting: set[str] = set()
        """Keys whose decision is being carried out: nobody else decides for them meanwhile."""
        self._woken: set[str] = set()
        """Keys decided for since the tick under way began: what it was told of them is old."""

    async def tick(self, subjects: Sequence[Subject]) -> dict[str, Decision]:
        """Decide for every subject, persist what changed, then scale; by key. Forgets keys that are not among them."""
        self._woken.clear()
        samples, gateway = await asyncio.gather(
            self._metrics.samples([replica for subject in subjects for replica in subject.replicas]),
            self._gateway_requests(subjects),
        )
        self._memory = {s.key: self._memory_of(s) for s in subjects}
        return await self._decide([s for s in subjects if s.key not in self._woken], samples, gateway)

    async def wake(self, subjects: Sequence[Subject]) -> dict[str, Decision]:
        """Decide for those among these, which have no replica, that somebody waits for."""
        gateway = await self._metrics.gateway_requests()
        if gateway is None:
            return {}
        waited_for = [s for s in subjects if gateway.held.get(s.model, 0) > 0]
        for subject in waited_for:
            self._memory[subject.key] = self._memory_of(subject)
            self._woken.add(subject.key)
        return await self._decide(waited_for, {}, gateway)

    def _memory_of(self, subject: Subject) -> _Memory:
        known = self._memory.get(subject.key)
        return known if known is not None and known.uid == subject.uid else _remembered(subject)

    async def _gateway_requests(self, subjects: Sequence[Subject]) -> GatewayRequests | None:
        wanted = any(subject.hangs_on_gateways for subject in subjects)
        return await self._metrics.gateway_requests() if wanted else None

    async def _decide(
        self, subjects: Sequence[Subject], samples: Mapping[str, ReplicaSample], gateway: GatewayRequests | None
    ) -> dict[str, Decision]:
        now = self._clock.now()
        decisions: dict[str, Decision] = {}
        for subject in subjects:
            if subject.key in self._acting:
                continue
            try:
                observation = observe(subject, samples, gateway)
                decisions[subject.key] = decide(subject.policy, observation, self._memory[subject.key].history, now)
            except Exception:  # our bug; it must not stop the others' scaling
                _log.exception("%s: decision failed", subject.key)
        await asyncio.gather(*(self._carry_out(key, decision) for key, decision in decisions.items()))
        return decisions

    async def _carry_out(self, key: str, decision: Decision) -> None:
        """Persist, then act. What could not be done is not remembered as done, so the next tick decides it anew."""
        before = self._memory[key]
        persisted = before.persisted
        self._acting.add(key)
        try:
            if decision.record != persisted:
                await self._target.persist(key, decision.record)
                persisted = decision.record
            if decision.is_change and decision.enforced:
                _log.info("%s: %s", key, decision.message)
                await self._target.scale(key, replicas=decision.desired, victims=decision.victims)
        except ScalingNotDone as error:
            _log.warning("%s: %s: not applied, will be retried: %s", key, decision.message, error)
            undone = replace(decision.history, moves=before.history.moves, record=persisted or before.history.record)
            self._memory[key] = _Memory(uid=before.uid, history=undone, persisted=persisted)
        else:
            self._memory[key] = _Memory(uid=before.uid, history=decision.history, persisted=persisted)
        finally:
            self._acting.discard(key)


def observe(subject: Subject, samples: Mapping[str, ReplicaSample], gateway: GatewayRequests | None) -> Observation:
    """What is known of one LLMDeployment at this tick."""
    asked = gateway if subject.hangs_on_gateways else None
    return Observation(
        replicas=tuple(
            ReplicaObservation(name=replica.name, phase=replica.phase, sample=samples.get(replica.name))
            for replica in subject.replicas
        ),
        target=subject.target,
        held_requests=None if asked is None else asked.held.get(subject.model, 0),
        in_flight_requests=None if asked is None or not asked.is_complete else asked.in_flight.get(subject.model, 0),
        rolling_out=subject.rolling_out,
    )


def _remembered(subject: Subject) -> _Memory:
    record = subject.record
    history = History() if record is None else History.restored(record)
    return _Memory(uid=subject.uid, history=history, persisted=record)
