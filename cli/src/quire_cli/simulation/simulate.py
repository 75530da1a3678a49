"""``simulate(requests, scenario, scaler) -> Run``: arrivals, scrapes, ticks and faults in their order.

The loop over ``fleet`` and ``gateway``; it knows no law of scaling. All randomness (start-up delays, the phase of
scrapes, ties) comes from the scenario's seed.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count

from quire_cli.simulation.fleet import SimulatedFleet
from quire_cli.simulation.gateway import Gateway
from quire_cli.simulation.run import DecisionPoint, RequestResult, SimulatedRun, TimelinePoint
from quire_cli.simulation.scaler import Scaler
from quire_cli.simulation.scenario import Crash, Scenario, ScrapeOutage, SlowReplicas
from quire_cli.simulation.sequence import Sequence as EngineSequence
from quire_cli.simulation.traces import Request
from quire_operator.domain.autoscaling.observation import Observation, ReplicaObservation, ReplicaSample

Progress = Callable[[float], None]
"""A function that is called with the simulated time every now and then."""


def simulate(
    requests: Sequence[Request], scenario: Scenario, scaler: Scaler, *, progress: Progress = lambda _: None
) -> SimulatedRun:
    """Simulate these requests, in any order, until the last has ended or the time is up."""
    return _Simulation(requests, scenario, scaler, progress).run()


class _Simulation:
    def __init__(self, requests: Sequence[Request], scenario: Scenario, scaler: Scaler, progress: Progress) -> None:
        self._scenario, self._scaler, self._progress = scenario, scaler, progress
        self._sequences = [
            EngineSequence(request, order=order, prefix_block_tokens=scenario.prefix_block_tokens)
            for order, request in enumerate(sorted(requests, key=lambda request: request.time))
        ]
        self._last_arrival = self._sequences[-1].arrival if self._sequences else 0.0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._ids = count()
        self._gateway = Gateway(seed=scenario.seed, hold_seconds=scenario.hold_seconds)
        self._fleet = SimulatedFleet(scenario, later=self._later, changed=self._discover)
        self._samples: dict[str, ReplicaSample] = {}
        self._scrape_phase = random.Random(f"scrapes {scenario.seed}").random() * scaler.scrape_seconds
        self._last_scrape = -1.0
        self._decisions: list[DecisionPoint] = []
        self._timeline: list[TimelinePoint] = []
        self._worst_queue = 0

    def run(self) -> SimulatedRun:
        self._discover(0.0)
        self._plan()
        horizon = self._last_arrival + self._scenario.settle_seconds
        arrivals = iter(self._sequences)
        coming = next(arrivals, None)
        while True:
            event = self._events[0] if self._events else None
            if coming is not None and (event is None or coming.arrival < event[0]):
                self._arrive(coming)
                coming = next(arrivals, None)
                continue
            if event is None or event[0] > horizon or (coming is None and self._is_over(event[0])):
                break
            heappop(self._events)
            self._fleet.advance(event[0])
            event[2](event[0])
        self._fleet.advance(horizon)
        return self._result()

    # --- what happens when ---

    def _later(self, time: float, action: Callable[[float], None]) -> None:
        heappush(self._events, (time, next(self._ids), action))

    def _plan(self) -> None:
        for fault in self._scenario.faults:
            match fault:
                case Crash():
                    self._later(fault.time, self._fleet.crash)
                case SlowReplicas():
                    self._later(fault.start, partial(self._fleet.slow_down, fault))
                case ScrapeOutage():
                    pass  # looked up at each scrape
        if self._scenario.timeline_seconds is not None:
            self._later(0.0, self._note)
        self._later_tick(1)

    def _is_over(self, now: float) -> bool:
        """No request is under way any more."""
        self._fleet.advance(now)
        return not self._fleet.unfinished and not self._gateway.held

    def _arrive(self, sequence: EngineSequence) -> None:
        now = sequence.arrival
        due = self._gateway.next_scrape(now)
        if due is not None:
            self._fleet.advance(due)
            self._gateway.scrape(due)
        self._fleet.advance(now)
        if now >= self._scenario.scored_from:
            self._worst_queue = max(self._worst_queue, self._fleet.waiting + len(self._gateway.held))
        self._gateway.send(sequence, now)
        self._fleet.set_paces(now)
        if self._gateway.held and self._gateway.held[-1] is sequence:
            self._later(now + self._scenario.hold_seconds, self._gateway.give_up)
            if self._scenario.wake_seconds is not None:
                self._later(now + self._scenario.wake_seconds, self._wake)

    def _discover(self, now: float) -> None:
        self._gateway.discover([replica.engine for replica in self._fleet.ready], now)

    # --- the scaler ---

    def _later_tick(self, number: int) -> None:
        """And the scrape that it will see, the last one before it."""
        time = number * self._scaler.period_seconds
        every = self._scaler.scrape_seconds
        scrape = time if every <= 0 else (time - self._scrape_phase) // every * every + self._scrape_phase
        if scrape > self._last_scrape and scrape >= 0:
            self._last_scrape = scrape
            self._later(scrape, self._scrape)
        self._later(time, lambda now: self._tick(number, now))

    def _scrape(self, now: float) -> None:
        outages = (fault for fault in self._scenario.faults if isinstance(fault, ScrapeOutage))
        is_out = any(outage.start <= now < outage.start + outage.seconds for outage in outages)
        self._samples = {} if is_out else self._fleet.samples(now)

    def _tick(self, number: int, now: float) -> None:
        self._decide(now)
        if self._scenario.timeline_seconds is None:
            self._timeline.append(self._point(now))
        self._progress(now)
        self._later_tick(number + 1)

    def _wake(self, now: float) -> None:
        """Evaluate between ticks, because a request waits for a first replica."""
        if self._fleet.asked == 0 and self._gateway.held:
            self._decide(now)

    def _decide(self, now: float) -> None:
        fleet, scenario = self._fleet, self._scenario
        scaling = self._scaler.decide(self._observe(), now)
        desired = min(max(scaling.replicas, scenario.min_replicas), scenario.max_replicas)
        self._decisions.append(
            DecisionPoint(
                time=now, current=fleet.asked, desired=desired, reason=scaling.reason, message=scaling.message
            )
        )
        if desired != fleet.asked:
            fleet.scale(desired, scaling.victims, now)

    def _observe(self) -> Observation:
        """As the operator sees it, who asks the gateways only where it hangs on them."""
        fleet, held = self._fleet, len(self._gateway.held)
        asked = self._scenario.min_replicas == 0 or not fleet.ready
        return Observation(
            replicas=tuple(
                ReplicaObservation(name=replica.name, phase=replica.phase, sample=self._samples.get(replica.name))
                for replica in fleet.replicas
            ),
            target=fleet.asked,
            held_requests=held if asked else None,
            in_flight_requests=fleet.unfinished if asked else None,
        )

    # --- what came of it ---

    def _note(self, now: float) -> None:
        """Add a point to the timeline, and schedule the next one."""
        assert self._scenario.timeline_seconds is not None
        self._timeline.append(self._point(now))
        self._later(len(self._timeline) * self._scenario.timeline_seconds, self._note)

    def _point(self, now: float) -> TimelinePoint:
        fleet, gauges = self._fleet, self._fleet.gauges(now)
        return TimelinePoint(
            time=now,
            asked=fleet.asked,
            ready=len(fleet.ready),
            held=len(self._gateway.held),
            waiting=gauges.waiting,
            running=gauges.running,
            kv_usage=gauges.kv_blocks / fleet.kv_blocks if fleet.kv_blocks else 0.0,
        )

    def _result(self) -> SimulatedRun:
        engine = self._scenario.engine
        return SimulatedRun(
            requests=tuple(
                RequestResult(
                    arrival=sequence.arrival,
                    prompt_tokens=sequence.prompt_tokens,
                    output_tokens=sequence.output_tokens,
                    outcome=sequence.outcome,
                    replica=sequence.replica,
                    first_token=sequence.first_token,
                    finish=sequence.finish,
                    own_prefill_seconds=engine.prefill_seconds(sequence.prompt_tokens)
                    if sequence.own_prefill_seconds is None
                    else sequence.own_prefill_seconds,
                    cached_tokens=sequence.cached,
                    preemptions=sequence.preemptions,
                )
                for sequence in self._sequences
            ),
            decisions=tuple(self._decisions),
            timeline=tuple(self._timeline),
            holding=self._fleet.holding(),
            scored_from=self._scenario.scored_from,
            scored_until=self._last_arrival,
            worst_queue=self._worst_queue,
        )
