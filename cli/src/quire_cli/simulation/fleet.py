"""The replicas: requested, starting, serving, crashing, draining and removed.

Under ``simulate``, which owns the clock: every method gets the time, and ``later`` schedules a call.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, nextafter

from quire_cli.simulation.engine import Engine, Gauges
from quire_cli.simulation.run import HoldingStep, Outcome
from quire_cli.simulation.scenario import Scenario, SlowReplicas
from quire_operator.domain.autoscaling.observation import ReplicaPhase, ReplicaSample

_PENDING_SHARE = 0.1
"""The share of the start-up delay until there is a node with the image."""
_UP = (ReplicaPhase.READY, ReplicaPhase.DRAINING)
_GOES_FIRST = (ReplicaPhase.PENDING, ReplicaPhase.LOADING, ReplicaPhase.READY)

Later = Callable[[float, Callable[[float], None]], None]
"""Takes a time, and what to do then."""


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    name: str
    number: int
    engine: Engine
    phase: ReplicaPhase
    phase_since: float
    slow_factor: float = 1.0


class SimulatedFleet:
    """The replicas; ``changed`` is called when the set of ready replicas changes."""

    def __init__(self, scenario: Scenario, *, later: Later, changed: Callable[[float], None]) -> None:
        self.asked = scenario.initial_replicas
        self.replicas: list[SimulatedReplica] = []
        """Oldest first."""
        self._scenario = scenario
        self._later = later
        self._changed = changed
        self._rng = random.Random(f"fleet {scenario.seed}")
        self._born = 0
        self._holding: list[tuple[float, int]] = []
        self._busy = 0
        for _ in range(scenario.initial_replicas):
            self._add(0.0, ReplicaPhase.READY)

    # --- state ---

    @property
    def ready(self) -> list[SimulatedReplica]:
        return [replica for replica in self.replicas if replica.phase is ReplicaPhase.READY]

    @property
    def waiting(self) -> int:
        return sum([len(replica.engine.waiting) for replica in self.replicas])

    @property
    def unfinished(self) -> int:
        return sum([replica.engine.num_unfinished for replica in self.replicas])

    def gauges(self, now: float) -> Gauges:
        """Return the gauges of all replicas together, as a scrape shows them."""
        each = [replica.engine.gauges(now) for replica in self.replicas]
        return Gauges(
            waiting=sum(gauges.waiting for gauges in each),
            running=sum(gauges.running for gauges in each),
            queued_tokens=sum(gauges.queued_tokens for gauges in each),
            kv_blocks=sum(gauges.kv_blocks for gauges in each),
            prefilling_tokens=sum(gauges.prefilling_tokens for gauges in each),
        )

    @property
    def kv_blocks(self) -> int:
        """The KV blocks of the running replicas."""
        return sum(replica.engine.kv.num_blocks for replica in self.replicas if replica.phase in _UP)

    def samples(self, now: float) -> dict[str, ReplicaSample]:
        """Return what a scrape of all running engines reads."""
        return {replica.name: replica.engine.sample(now) for replica in self.replicas if replica.phase in _UP}

    def holding(self) -> tuple[HoldingStep, ...]:
        """Return the number of replicas that use hardware over time."""
        steps: dict[float, int] = {}
        count = 0
        for time, change in sorted(self._holding):
            count += change
            steps[time] = count
        return tuple(HoldingStep(time, replicas) for time, replicas in steps.items())

    # --- time ---

    def advance(self, now: float) -> None:
        if self._scenario.slowdown:
            self._advance_together(now)
        for replica in self.replicas:
            if replica.engine.next_time <= now:
                replica.engine.advance(now)
        self._let_drained_go()

    def _advance_together(self, now: float) -> None:
        """Engines that share cores: one event after the other, for each may change the others' pace."""
        while True:
            engines = (replica.engine for replica in self.replicas)
            first = min(engines, key=lambda engine: engine.next_time, default=None)
            if first is None or first.next_time >= now:
                return
            time = first.next_time
            first.advance(min(now, nextafter(time, inf)))
            self.set_paces(time)

    def set_paces(self, now: float) -> None:
        """Where engines share cores: after one became busy or idle."""
        slowdown = self._scenario.slowdown
        if not slowdown:
            return
        busy = sum(
            replica.engine.num_unfinished > 0 or replica.phase is ReplicaPhase.LOADING for replica in self.replicas
        )
        if busy != self._busy:
            self._busy = busy
            for replica in self.replicas:
                self._set_pace(replica, now)

    def _set_pace(self, replica: SimulatedReplica, now: float) -> None:
        slowdown = self._scenario.slowdown
        shared = slowdown[min(self._busy, len(slowdown)) - 1] if slowdown and self._busy else 1.0
        replica.engine.set_factor(replica.slow_factor * shared, now)

    def _let_drained_go(self) -> None:
        for replica in [r for r in self.replicas if r.phase is ReplicaPhase.DRAINING]:
            if not replica.engine.num_unfinished:
                self._remove(replica, max(replica.phase_since, replica.engine.idle_since))

    # --- scaling ---

    def scale(self, replicas: int, victims: Sequence[str], now: float) -> None:
        """Request a number of replicas; if surplus replicas are removed, the victims go first."""
        self.asked = replicas
        staying = [replica for replica in self.replicas if replica.phase is not ReplicaPhase.DRAINING]
        for _ in range(replicas - len(staying)):
            self._add(now, ReplicaPhase.PENDING)
        leaving = sorted(staying, key=lambda replica: _leaves(replica, victims))[: max(0, len(staying) - replicas)]
        for replica in leaving:
            self._drain(replica, now)
        if leaving:
            self._let_drained_go()
            self._changed(now)

    def _add(self, now: float, phase: ReplicaPhase) -> None:
        number, self._born = self._born, self._born + 1
        replica = SimulatedReplica(
            name=f"replica-{number}", number=number, engine=self._engine(number, now), phase=phase, phase_since=now
        )
        self.replicas.append(replica)
        self._holding.append((now, 1))
        if phase is not ReplicaPhase.READY:
            self._start(replica, now, pending_share=_PENDING_SHARE)

    def _engine(self, number: int, now: float) -> Engine:
        scenario = self._scenario
        return Engine(
            scenario.engine, name=f"replica-{number}", prefix_block_tokens=scenario.prefix_block_tokens, now=now
        )

    def _start(self, replica: SimulatedReplica, now: float, *, pending_share: float) -> None:
        """Have it load a share of its start-up delay later, and ready at the end of it."""
        scenario = self._scenario
        jitter = self._rng.uniform(1.0 - scenario.startup_jitter, 1.0 + scenario.startup_jitter)
        delay = scenario.startup_delay_seconds * jitter
        self._later(now + delay * pending_share, lambda time: self._enter(replica, ReplicaPhase.LOADING, time))
        self._later(now + delay, lambda time: self._enter(replica, ReplicaPhase.READY, time))

    def _enter(self, replica: SimulatedReplica, phase: ReplicaPhase, now: float) -> None:
        """Enter the next phase of a start, unless the replica was removed meanwhile."""
        if replica not in self.replicas or replica.phase is ReplicaPhase.DRAINING:
            return
        replica.phase, replica.phase_since = phase, now
        if phase is ReplicaPhase.READY:
            self._changed(now)
        self.set_paces(now)

    def _drain(self, replica: SimulatedReplica, now: float) -> None:
        serves = replica.phase is ReplicaPhase.READY
        replica.phase, replica.phase_since = ReplicaPhase.DRAINING, now
        if serves:
            self._later(now + self._scenario.drain_seconds, lambda time: self._end(replica, time))

    def _end(self, replica: SimulatedReplica, now: float) -> None:
        """End a replica whose drain time is over."""
        if replica in self.replicas:
            _fail_all(replica.engine)
            self._remove(replica, now)

    def _remove(self, replica: SimulatedReplica, now: float) -> None:
        self.replicas.remove(replica)
        self._holding.append((now, -1))

    # --- faults ---

    def crash(self, now: float) -> None:
        """Crash the busiest ready replica, which then loads its model again."""
        victim = max(self.ready, key=lambda replica: replica.engine.num_unfinished, default=None)
        if victim is None:
            return
        _fail_all(victim.engine)
        victim.engine = self._engine(victim.number, now)
        victim.phase, victim.phase_since = ReplicaPhase.LOADING, now
        self._set_pace(victim, now)
        self._start(victim, now, pending_share=0.0)
        self._changed(now)
        self.set_paces(now)

    def slow_down(self, fault: SlowReplicas, now: float) -> None:
        """Slow down the oldest replicas until the fault is over."""
        slowed = self.replicas[: fault.count]
        for replica in slowed:
            replica.slow_factor *= fault.factor
            self._set_pace(replica, now)
        self._later(now + fault.seconds, lambda time: self._recover(slowed, fault, time))

    def _recover(self, slowed: Sequence[SimulatedReplica], fault: SlowReplicas, now: float) -> None:
        for replica in slowed:
            replica.slow_factor /= fault.factor
            self._set_pace(replica, now)


def _leaves(replica: SimulatedReplica, victims: Sequence[str]) -> tuple[int, int, int]:
    """Victims first, in their order; then, as a ReplicaSet has it, those not ready, then the youngest."""
    place = victims.index(replica.name) if replica.name in victims else len(victims)
    return place, _GOES_FIRST.index(replica.phase), -replica.number


def _fail_all(engine: Engine) -> None:
    for sequence in (*engine.running, *engine.waiting):
        sequence.outcome = Outcome.FAILED
