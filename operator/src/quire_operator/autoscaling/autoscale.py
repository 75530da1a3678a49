"""The autoscaler's loop: ticks over all LLMDeployments, and requests for models without replicas in between.

A tick is metrics → observe → decide → persist → scale. In between, ``wake`` only checks whether a request waits for a
model without replicas.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Protocol

from quire_operator.autoscaling.decide import Decision, decide
from quire_operator.autoscaling.decision_context import Policy
from quire_operator.autoscaling.history import History, ScalingNotDone, ScalingRecord
from quire_operator.autoscaling.observation import (
    Clock,
    GatewayRequests,
    Observation,
    ReplicaAddress,
    ReplicaObservation,
    ReplicaPhase,
    ReplicaSample,
)
from quire_operator.autoscaling.scrape import MetricsSources

TICK_SECONDS = 15.0
WAKE_SECONDS = 0.5
"""A first request is noticed, and a first replica requested, within a second."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An LLMDeployment with autoscaling, in its current state."""

    key: str
    model: str
    """The served name, by which gateways count requests."""
    policy: Policy
    replicas: tuple[ReplicaAddress, ...]
    target: int | None
    """The number of replicas requested now; None if none was requested yet."""
    rolling_out: bool = False
    record: ScalingRecord | None = None
    """The persisted record; read only at this process's first tick for the LLMDeployment."""
    uid: str = ""
    """Distinguishes it from an earlier one with this key; empty if keys are not reused."""

    @property
    def hangs_on_gateways(self) -> bool:
        """True if the gateways' requests matter: it may scale to zero, or no replica could report demand."""
        may_sleep = self.policy.autoscaling.may_reach_zero
        return may_sleep or not any(replica.phase is ReplicaPhase.READY for replica in self.replicas)


class Fleet(Protocol):
    """The LLMDeployments that autoscale, by key: those of a cluster, or the one of ``quire up``."""

    def subjects(self) -> Sequence[Subject]:
        """Return all of them."""
        ...

    def sleeping(self) -> Sequence[Subject]:
        """Return those without replicas that may get one. If this is empty, no gateway is polled."""
        ...

    def note(self, decisions: Mapping[str, Decision]) -> None:
        """Store the decisions of a tick for all of them, or of a wake for some."""
        ...

    async def persist(self, key: str, record: ScalingRecord) -> None:
        """Store the record so that it outlives this process, before ``scale``.

        Raises ``ScalingNotDone`` if a later attempt may succeed, as ``scale`` does.
        """
        ...

    async def scale(self, key: str, *, replicas: int, victims: Sequence[str]) -> None:
        """Set the number of replicas. ``victims`` are the replicas to remove first, in this order."""
        ...


@dataclass(frozen=True, slots=True)
class _Memory:
    uid: str
    history: History
    persisted: ScalingRecord | None
    """The record that is surely persisted; None if that is unknown."""


class Autoscaler:
    """The autoscaler of all LLMDeployments, with the history of each between ticks."""

    def __init__(self, *, metrics: MetricsSources, target: Fleet, clock: Clock) -> None:
        self._metrics, self._target, self._clock = metrics, target, clock
        self._memory: dict[str, _Memory] = {}
        self._acting: set[str] = set()
        """The keys whose decision is being applied; no other decision is made for them meanwhile."""
        self._woken: set[str] = set()
        """The keys with a decision since the current tick started, so that its metrics about them are outdated."""

    async def tick(self, subjects: Sequence[Subject]) -> dict[str, Decision]:
        """Decide for every subject, persist what changed, then scale. Return the decisions by key.

        The autoscaler forgets keys that are not among the subjects.
        """
        self._woken.clear()
        samples, gateway = await asyncio.gather(
            self._metrics.samples([replica for subject in subjects for replica in subject.replicas]),
            self._gateway_requests(subjects),
        )
        self._memory = {s.key: self._memory_of(s) for s in subjects}
        return await self._decide([s for s in subjects if s.key not in self._woken], samples, gateway)

    async def wake(self, subjects: Sequence[Subject]) -> dict[str, Decision]:
        """Decide for those of these subjects without replicas for which a request waits."""
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
        now = self._clock()
        decisions: dict[str, Decision] = {}
        for subject in subjects:
            if subject.key in self._acting:
                continue
            try:
                observation = observe(subject, samples, gateway)
                decisions[subject.key] = decide(subject.policy, observation, self._memory[subject.key].history, now)
            except Exception:  # a bug of ours must not stop the scaling of others
                _log.exception("%s: decision failed", subject.key)
        await asyncio.gather(*(self._carry_out(key, decision) for key, decision in decisions.items()))
        return decisions

    async def _carry_out(self, key: str, decision: Decision) -> None:
        """Persist and scale. What fails is not recorded as done, so that the next tick decides it again."""
        before = self._memory[key]
        persisted = before.persisted
        self._acting.add(key)
        try:
            if decision.record != persisted:
                persisted = None  # until it is certain: a write that fails may have been stored
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


async def keep_scaling(
    autoscaler: Autoscaler,
    fleet: Fleet,
    *,
    tick_seconds: float = TICK_SECONDS,
    decided: Callable[[Decision], None] = lambda decision: None,
    ticked: Callable[[float], None] = lambda seconds: None,
) -> None:
    """Run until cancelled. ``decided`` is called with every decision, ``ticked`` with the duration of each tick."""

    async def tick() -> None:
        started = monotonic()
        tell(await autoscaler.tick(fleet.subjects()))
        ticked(monotonic() - started)

    async def wake() -> None:
        if sleeping := fleet.sleeping():
            tell(await autoscaler.wake(sleeping))

    def tell(decisions: Mapping[str, Decision]) -> None:
        fleet.note(decisions)
        for decision in decisions.values():
            decided(decision)

    async with asyncio.TaskGroup() as group:
        group.create_task(_for_ever(tick, tick_seconds))
        group.create_task(_for_ever(wake, min(tick_seconds, WAKE_SECONDS)))


async def _for_ever(look: Callable[[], Awaitable[None]], period: float) -> None:
    while True:
        await asyncio.sleep(period)
        try:
            await look()
        except Exception:  # a bug of ours; the next tick tries again
            _log.exception("autoscaler tick failed")
