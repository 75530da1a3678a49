"""``simulate``: replicas that start, serve, crash and end, the gateway before them, and the autoscaler above them.

Routing is the policy of the real gateway, and scaling that of the operator or another ``Scaler``. There is no clock and
no I/O, and all randomness (start-up delays, the phase of scrapes, ties) comes from the scenario's seed: the same
arguments give the same run.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Protocol, TypeAlias

from quire_cli.simulation.engine import Engine, EngineModel
from quire_cli.simulation.engine import Sequence as EngineSequence
from quire_cli.simulation.results import DecisionPoint, HoldingStep, Outcome, SimulatedRun, TimelinePoint
from quire_cli.simulation.traces import MOONCAKE_BLOCK_TOKENS, Request
from quire_common.contract.gateway import SCRAPE_SECONDS
from quire_common.routing import Candidate, Hold, Load, PrefillRate, PrefixIndex, Rate, pick
from quire_operator.autoscaling.decide import decide
from quire_operator.autoscaling.decision_context import Policy
from quire_operator.autoscaling.history import History
from quire_operator.autoscaling.observation import Observation, ReplicaObservation, ReplicaPhase, ReplicaSample

TICK_SECONDS = 15.0
_PENDING_SHARE = 0.1
"""The share of the start-up delay until there is a node with the image."""
_UP = (ReplicaPhase.READY, ReplicaPhase.DRAINING)
_GOES_FIRST = (ReplicaPhase.PENDING, ReplicaPhase.LOADING, ReplicaPhase.READY)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeOutage:
    """The metrics of no replica can be read for a while; the replicas continue to serve."""

    start: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """The busiest ready replica dies: its requests fail, and it is ready again after a start-up delay."""

    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowReplicas:
    """The steps of the ``count`` oldest replicas take ``factor`` times as long for a while."""

    start: float
    seconds: float
    factor: float
    count: int = 1


Fault: TypeAlias = ScrapeOutage | Crash | SlowReplicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The input of a simulation besides requests and autoscaler."""

    engine: EngineModel
    startup_delay_seconds: float
    """The time from the request for a replica until it is ready."""
    min_replicas: int = 1
    max_replicas: int
    initial_replicas: int = 1
    """Ready from the beginning."""
    startup_jitter: float = 0.1
    """Start-up delays vary by up to this share, both ways."""
    drain_seconds: float = 120.0
    """The time a removed replica has to finish its requests; the rest then fails."""
    hold_seconds: float = 120.0
    """The time the gateway holds a request while no replica is ready."""
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    scored_from: float = 0.0
    """The end of the warm-up, which counts neither in attainment nor in replica-hours."""
    wake_seconds: float | None = None
    """The delay of an extra evaluation if a request is held at zero replicas; None: no extra evaluation."""
    settle_seconds: float = 600.0
    """The time to wait for unfinished requests after the last arrival."""
    prefix_block_tokens: int = MOONCAKE_BLOCK_TOKENS
    """The prompt tokens of one of ``Request.prefix_blocks``."""
    timeline_seconds: float | None = None
    """The time between points of the timeline; None adds one at each evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The decision of an autoscaler. ``victims`` are removed first; a ReplicaSet's order decides about the rest."""

    replicas: int
    victims: tuple[str, ...] = ()
    reason: str = ""
    message: str = ""


class Scaler(Protocol):
    """An autoscaler, which may have a memory. One instance serves one run."""

    @property
    def period_seconds(self) -> float:
        """The time between two evaluations."""

    @property
    def scrape_seconds(self) -> float:
        """The time between scrapes; an evaluation uses the last one. 0 scrapes at each evaluation."""

    def decide(self, observation: Observation, now: float) -> Scaling: ...


class QuireScaler:
    """The operator's ``decide``. ``epoch`` is the Unix time of the simulation's start, for schedules."""

    period_seconds = TICK_SECONDS

    def __init__(self, policy: Policy, *, scrape_seconds: float = 0.0, epoch: float = 0.0) -> None:
        self.scrape_seconds = scrape_seconds
        self._policy, self._epoch = policy, epoch
        self._history = History()

    def decide(self, observation: Observation, now: float) -> Scaling:
        if self._epoch:
            observation = replace(observation, replicas=tuple(map(self._dated, observation.replicas)))
        decision = decide(self._policy, observation, self._history, now + self._epoch)
        self._history = decision.history
        reason, message = decision.reason.value, decision.message
        if not decision.enforced:
            return Scaling(replicas=decision.current, reason=reason, message=message)
        return Scaling(replicas=decision.desired, victims=decision.victims, reason=reason, message=message)

    def _dated(self, replica: ReplicaObservation) -> ReplicaObservation:
        """Return the replica with the time of its sample in Unix time."""
        sample = replica.sample
        return replica if sample is None else replace(replica, sample=replace(sample, time=sample.time + self._epoch))


@dataclass(slots=True, eq=False)
class _Replica:
    number: int
    engine: Engine
    phase: ReplicaPhase
    phase_since: float
    slow_factor: float = 1.0

    @property
    def name(self) -> str:
        return self.engine.name

    def leaves(self, victims: Sequence[str]) -> tuple[int, int, int]:
        """Return its place among removed replicas: victims in their order, unready ones, the youngest."""
        place = victims.index(self.name) if self.name in victims else len(victims)
        return place, _GOES_FIRST.index(self.phase), -self.number


class _Backend:
    """The gateway's knowledge of one replica."""

    def __init__(self, engine: Engine, now: float) -> None:
        self.engine = engine
        self.sent_tokens = 0.0
        """Uncached prompt tokens sent since the last scrape."""
        self._finishes, self._prefills = Rate(), PrefillRate()
        self.scrape(now)

    def scrape(self, now: float) -> None:
        engine, gauges = self.engine, self.engine.gauges(now)
        self.sent_tokens = 0.0
        self._load = Load(
            running=gauges.running,
            waiting=gauges.waiting,
            max_running=engine.model.max_sequences,
            kv_usage=gauges.kv_blocks / engine.kv.num_blocks,
            finished_per_second=self._finishes.update(engine.counters.finished_requests, now),
            in_flight=engine.num_unfinished,
            pending_tokens=engine.pending_prefill_tokens(),
            prefill_tokens_per_second=self._prefills.update(
                engine.counters.computed_prompt_tokens, engine.busy_seconds(now)
            ),
        )

    def candidate(self, prefix_share: float) -> Candidate:
        return Candidate(self.engine.name, self._load, self.engine.num_unfinished, self.sent_tokens, prefix_share)


class _Gateway:
    """A gateway in front of engines, which holds requests while no replica is ready."""

    def __init__(self, seed: int) -> None:
        self.held: deque[EngineSequence] = deque()
        self._rng = random.Random(f"gateway {seed}")
        self._prefixes = PrefixIndex()
        self._backends: dict[str, _Backend] = {}
        self._capacities: dict[str, int] = {}
        """Tokens in a replica's KV cache."""
        self._next_scrape = 0.0

    def due_scrape(self, now: float) -> float | None:
        """Return the time of the last scrape that is due by ``now``, or None if it has taken place."""
        return now - now % SCRAPE_SECONDS if now >= self._next_scrape else None

    def scrape(self, now: float) -> None:
        self._next_scrape = now - now % SCRAPE_SECONDS + SCRAPE_SECONDS
        for backend in self._backends.values():
            backend.scrape(now)

    def discover(self, ready: Sequence[Engine], now: float) -> None:
        """Send requests to these replicas and no others; held requests are sent at once."""
        known = self._backends
        kept = {name: backend for name, backend in known.items() if backend.engine in ready}
        self._backends = {engine.name: kept.get(engine.name) or _Backend(engine, now) for engine in ready}
        self._capacities = {engine.name: engine.kv.num_blocks * engine.kv.block_size for engine in ready}
        self._prefixes.forget(known.keys() - self._backends.keys())
        while self.held and self._backends:
            self.send(self.held.popleft(), now)

    def send(self, sequence: EngineSequence, now: float) -> None:
        """Send a request to replicas advanced to ``now``. It fails if every replica refuses it."""
        if not self._backends:
            self.held.append(sequence)
            return
        shares = self._prefixes.shares(sequence.prefix, self._capacities) if len(self._backends) > 1 else {}
        names = list(self._backends)
        while names:
            name = self._choose(names, sequence.prompt_tokens, shares)
            backend = self._backends[name]
            if not backend.engine.is_full_for(sequence):
                self._prefixes.record(sequence.prefix, name, sequence.prompt_tokens)
                backend.sent_tokens += sequence.prompt_tokens * (1.0 - shares.get(name, 0.0))
                backend.engine.add(sequence, now)
                return
            names.remove(name)
        sequence.result.outcome = Outcome.FAILED

    def _choose(self, names: Sequence[str], prompt_tokens: int, shares: Mapping[str, float]) -> str:
        if len(names) == 1:
            return names[0]
        candidates = [self._backends[name].candidate(shares.get(name, 0.0)) for name in names]
        choice = pick(candidates, prompt_tokens=prompt_tokens, tie_breaker=self._rng.random())
        assert not isinstance(choice, Hold)
        return choice.id


def simulate(
    requests: Sequence[Request], scenario: Scenario, scaler: Scaler, progress: Callable[[float], None] = lambda _: None
) -> SimulatedRun:
    """Simulate these requests, in any order, until the last has ended or the time is up.

    ``progress`` is called with the simulated time at each evaluation.
    """
    return _Simulation(requests, scenario, scaler, progress).run()


class _Simulation:
    def __init__(
        self, requests: Sequence[Request], scenario: Scenario, scaler: Scaler, progress: Callable[[float], None]
    ) -> None:
        self._scenario, self._scaler, self._progress = scenario, scaler, progress
        self._sequences = [
            EngineSequence(request, order=order, prefix_block_tokens=scenario.prefix_block_tokens)
            for order, request in enumerate(sorted(requests, key=lambda request: request.time))
        ]
        self._last_arrival = self._sequences[-1].arrival if self._sequences else 0.0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._ids, self._numbers = count(), count()
        self._gateway = _Gateway(scenario.seed)
        self._asked = scenario.initial_replicas
        self._replicas: list[_Replica] = []
        """Oldest first."""
        self._holding: list[tuple[float, int]] = []
        self._rng = random.Random(f"fleet {scenario.seed}")
        self._samples: dict[str, ReplicaSample] = {}
        self._scrape_phase = random.Random(f"scrapes {scenario.seed}").random() * scaler.scrape_seconds
        self._last_scrape = -1.0
        self._decisions: list[DecisionPoint] = []
        self._timeline: list[TimelinePoint] = []
        self._worst_queue = 0

    def run(self) -> SimulatedRun:
        for _ in range(self._scenario.initial_replicas):
            self._add_replica(0.0, ReplicaPhase.READY)
        self._discover(0.0)
        for fault in self._scenario.faults:
            match fault:
                case Crash():
                    self._later(fault.time, self._crash)
                case SlowReplicas():
                    self._later(fault.start, partial(self._slow_down, fault))
        if self._scenario.timeline_seconds is not None:
            self._later(0.0, self._note)
        self._later_tick(1)
        horizon = self._last_arrival + self._scenario.settle_seconds
        arrivals = deque(self._sequences)
        while True:
            event = self._events[0] if self._events else None
            if arrivals and (event is None or arrivals[0].arrival < event[0]):
                self._arrive(arrivals.popleft())
                continue
            if event is None or event[0] > horizon or (not arrivals and self._is_over(event[0])):
                break
            heappop(self._events)
            self._advance(event[0])
            event[2](event[0])
        self._advance(horizon)
        return SimulatedRun(
            requests=tuple(sequence.result for sequence in self._sequences),
            decisions=tuple(self._decisions),
            timeline=tuple(self._timeline),
            holding=self._holding_steps(),
            scored_from=self._scenario.scored_from,
            scored_until=self._last_arrival,
            worst_queue=self._worst_queue,
        )

    # --- the order of events ---

    def _later(self, time: float, action: Callable[[float], None]) -> None:
        heappush(self._events, (time, next(self._ids), action))

    def _advance(self, now: float) -> None:
        for replica in self._replicas:
            replica.engine.advance(now)
        self._remove_drained()

    def _is_over(self, now: float) -> bool:
        """Return whether no request is left."""
        self._advance(now)
        return not self._unfinished and not self._gateway.held

    @property
    def _unfinished(self) -> int:
        return sum([replica.engine.num_unfinished for replica in self._replicas])

    def _arrive(self, sequence: EngineSequence) -> None:
        now, held, scenario = sequence.arrival, self._gateway.held, self._scenario
        if (due := self._gateway.due_scrape(now)) is not None:
            self._advance(due)
            self._gateway.scrape(due)
        self._advance(now)
        if now >= scenario.scored_from:
            waiting = sum([len(replica.engine.waiting) for replica in self._replicas])
            self._worst_queue = max(self._worst_queue, waiting + len(held))
        self._gateway.send(sequence, now)
        if held and held[-1] is sequence:
            self._later(now + scenario.hold_seconds, self._give_up)
            if scenario.wake_seconds is not None:
                self._later(now + scenario.wake_seconds, self._wake)

    def _give_up(self, now: float) -> None:
        """Fail the requests that were held too long."""
        held = self._gateway.held
        while held and held[0].arrival + self._scenario.hold_seconds <= now:
            held.popleft().result.outcome = Outcome.FAILED

    @property
    def _ready(self) -> list[Engine]:
        return [replica.engine for replica in self._replicas if replica.phase is ReplicaPhase.READY]

    def _discover(self, now: float) -> None:
        self._gateway.discover(self._ready, now)

    # --- the autoscaler ---

    def _later_tick(self, number: int) -> None:
        """Schedule an evaluation, and the last scrape before it."""
        time = number * self._scaler.period_seconds
        every = self._scaler.scrape_seconds
        scrape = time if every <= 0 else (time - self._scrape_phase) // every * every + self._scrape_phase
        if scrape > self._last_scrape and scrape >= 0:
            self._last_scrape = scrape
            self._later(scrape, self._scrape)
        self._later(time, partial(self._tick, number))

    def _scrape(self, now: float) -> None:
        outages = [fault for fault in self._scenario.faults if isinstance(fault, ScrapeOutage)]
        if any(outage.start <= now < outage.start + outage.seconds for outage in outages):
            self._samples = {}
        else:
            self._samples = {each.name: each.engine.sample(now) for each in self._replicas if each.phase in _UP}

    def _tick(self, number: int, now: float) -> None:
        self._decide(now)
        if self._scenario.timeline_seconds is None:
            self._timeline.append(self._point(now))
        self._progress(now)
        self._later_tick(number + 1)

    def _wake(self, now: float) -> None:
        """Evaluate between ticks, because a request waits for a first replica."""
        if self._asked == 0 and self._gateway.held:
            self._decide(now)

    def _decide(self, now: float) -> None:
        scenario, current = self._scenario, self._asked
        scaling = self._scaler.decide(self._observe(), now)
        desired = min(max(scaling.replicas, scenario.min_replicas), scenario.max_replicas)
        self._decisions.append(
            DecisionPoint(time=now, current=current, desired=desired, reason=scaling.reason, message=scaling.message)
        )
        if desired != current:
            self._scale(desired, scaling.victims, now)

    def _observe(self) -> Observation:
        """Return what the operator sees. It asks the gateways only if the decision depends on them."""
        asks = self._scenario.min_replicas == 0 or not self._ready
        return Observation(
            replicas=tuple(
                ReplicaObservation(name=each.name, phase=each.phase, sample=self._samples.get(each.name))
                for each in self._replicas
            ),
            target=self._asked,
            held_requests=len(self._gateway.held) if asks else None,
            in_flight_requests=self._unfinished if asks else None,
        )

    # --- replicas ---

    def _scale(self, replicas: int, victims: Sequence[str], now: float) -> None:
        self._asked = replicas
        staying = [replica for replica in self._replicas if replica.phase is not ReplicaPhase.DRAINING]
        for _ in range(replicas - len(staying)):
            self._add_replica(now, ReplicaPhase.PENDING)
        leaving = sorted(staying, key=lambda replica: replica.leaves(victims))[: max(0, len(staying) - replicas)]
        for replica in leaving:
            if replica.phase is ReplicaPhase.READY:
                self._later(now + self._scenario.drain_seconds, partial(self._end, replica))
            replica.phase, replica.phase_since = ReplicaPhase.DRAINING, now
        if leaving:
            self._remove_drained()
            self._discover(now)

    def _add_replica(self, now: float, phase: ReplicaPhase) -> None:
        number = next(self._numbers)
        replica = _Replica(number, self._engine(number, now), phase, now)
        self._replicas.append(replica)
        self._holding.append((now, 1))
        if phase is ReplicaPhase.PENDING:
            self._start(replica, now, pending_share=_PENDING_SHARE)

    def _engine(self, number: int, now: float, factor: float = 1.0) -> Engine:
        tokens = self._scenario.prefix_block_tokens
        return Engine(
            self._scenario.engine, name=f"replica-{number}", prefix_block_tokens=tokens, now=now, factor=factor
        )

    def _start(self, replica: _Replica, now: float, *, pending_share: float) -> None:
        """Let it load after a share of its start-up delay, and be ready at the end of it."""
        jitter = self._rng.uniform(1.0 - self._scenario.startup_jitter, 1.0 + self._scenario.startup_jitter)
        delay = self._scenario.startup_delay_seconds * jitter
        self._later(now + delay * pending_share, partial(self._enter, replica, ReplicaPhase.LOADING))
        self._later(now + delay, partial(self._enter, replica, ReplicaPhase.READY))

    def _enter(self, replica: _Replica, phase: ReplicaPhase, now: float) -> None:
        """Enter the next phase of a start, unless the replica was removed meanwhile."""
        if replica not in self._replicas or replica.phase is ReplicaPhase.DRAINING:
            return
        replica.phase, replica.phase_since = phase, now
        if phase is ReplicaPhase.READY:
            self._discover(now)

    def _end(self, replica: _Replica, now: float) -> None:
        """End a replica whose drain time is over."""
        if replica in self._replicas:
            replica.engine.fail_all()
            self._remove(replica, now)

    def _remove_drained(self) -> None:
        for replica in [each for each in self._replicas if each.phase is ReplicaPhase.DRAINING]:
            if not replica.engine.num_unfinished:
                self._remove(replica, max(replica.phase_since, replica.engine.clock))

    def _remove(self, replica: _Replica, now: float) -> None:
        self._replicas.remove(replica)
        self._holding.append((now, -1))

    # --- faults ---

    def _crash(self, now: float) -> None:
        """Crash the busiest ready replica, which then loads its model again."""
        ready = [replica for replica in self._replicas if replica.phase is ReplicaPhase.READY]
        victim = max(ready, key=lambda replica: replica.engine.num_unfinished, default=None)
        if victim is None:
            return
        victim.engine.fail_all()
        victim.engine = self._engine(victim.number, now, victim.slow_factor)
        victim.phase, victim.phase_since = ReplicaPhase.LOADING, now
        self._start(victim, now, pending_share=0.0)
        self._discover(now)

    def _slow_down(self, fault: SlowReplicas, now: float) -> None:
        slowed = self._replicas[: fault.count]
        self._set_pace(slowed, fault.factor, now)
        self._later(now + fault.seconds, partial(self._set_pace, slowed, 1.0 / fault.factor))

    def _set_pace(self, replicas: Sequence[_Replica], factor: float, now: float) -> None:
        for replica in replicas:
            replica.slow_factor *= factor
            replica.engine.set_factor(replica.slow_factor, now)

    # --- the results ---

    def _note(self, now: float) -> None:
        """Add a point to the timeline, and schedule the next one."""
        assert self._scenario.timeline_seconds is not None
        self._timeline.append(self._point(now))
        self._later(len(self._timeline) * self._scenario.timeline_seconds, self._note)

    def _point(self, now: float) -> TimelinePoint:
        gauges = [replica.engine.gauges(now) for replica in self._replicas]
        blocks = sum(replica.engine.kv.num_blocks for replica in self._replicas if replica.phase in _UP)
        return TimelinePoint(
            time=now,
            asked=self._asked,
            ready=len(self._ready),
            held=len(self._gateway.held),
            waiting=sum(each.waiting for each in gauges),
            running=sum(each.running for each in gauges),
            kv_usage=sum(each.kv_blocks for each in gauges) / blocks if blocks else 0.0,
        )

    def _holding_steps(self) -> tuple[HoldingStep, ...]:
        steps: dict[float, int] = {}
        replicas = 0
        for time, change in sorted(self._holding):
            replicas += change
            steps[time] = replicas
        return tuple(HoldingStep(time, replicas) for time, replicas in steps.items())
