"""The faults and their times, derived from the trace itself, so that one rule places the faults in any file.

none            no fault
scrape-outage   no metrics for 5 minutes, from the start of the steepest ramp of the scored part
crashed-pod     the busiest replica dies in the busiest minute of the scored part
slow-pods       the two oldest replicas take twice as long for the middle half of the scored part
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from benchmarks.autoscaling.loads import Load, jittered
from quire_cli.simulation.fleet import Crash, Fault, Scenario, ScrapeOutage, SlowReplicas
from quire_cli.simulation.traces import Request

STARTUP_DELAYS = (30.0, 120.0, 420.0)
TARGETS = (0.95, 0.99)
SEEDS = (0, 1, 2)
MIN_REPLICAS = 1
MAX_REPLICAS = 48
INITIAL_REPLICAS = 4

OUTAGE_SECONDS = 300.0
SLOW_COUNT, SLOW_FACTOR = 2, 2.0
_BIN_SECONDS = 10.0
_RAMP_SECONDS = 120.0


class FaultKind(StrEnum):
    NONE = "none"
    SCRAPE_OUTAGE = "scrape-outage"
    CRASHED_POD = "crashed-pod"
    SLOW_PODS = "slow-pods"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row without its target."""

    load: Load
    startup_delay_seconds: float
    fault: FaultKind

    @property
    def title(self) -> str:
        return f"{self.load.name}, a start-up of {self.startup_delay_seconds:.0f} s, fault: {self.fault.value}"

    def requests(self, seed: int) -> tuple[Request, ...]:
        return jittered(self.load, seed)

    def scenario(self, seed: int) -> Scenario:
        return Scenario(
            engine=self.load.engine,
            startup_delay_seconds=self.startup_delay_seconds,
            min_replicas=MIN_REPLICAS,
            max_replicas=MAX_REPLICAS,
            initial_replicas=INITIAL_REPLICAS,
            faults=faults_of(self.load, self.fault),
            seed=seed,
            scored_from=self.load.scored_from,
        )

    def static(self, replicas: int, seed: int) -> Scenario:
        """Return the scenario with a fixed number of replicas from the start."""
        return replace(self.scenario(seed), min_replicas=replicas, max_replicas=replicas, initial_replicas=replicas)


def cases(
    load: Load, *, delays: Sequence[float] = STARTUP_DELAYS, faults: Sequence[FaultKind] = tuple(FaultKind)
) -> list[Case]:
    """Return every delay with every fault."""
    return [Case(load=load, startup_delay_seconds=delay, fault=fault) for delay in delays for fault in faults]


def faults_of(load: Load, kind: FaultKind) -> tuple[Fault, ...]:
    start, end = load.scored_from, load.span_seconds
    match kind:
        case FaultKind.NONE:
            return ()
        case FaultKind.SCRAPE_OUTAGE:
            return (ScrapeOutage(start=steepest_ramp(load), seconds=OUTAGE_SECONDS),)
        case FaultKind.CRASHED_POD:
            return (Crash(time=busiest(load)),)
        case FaultKind.SLOW_PODS:
            quarter = (end - start) / 4
            return (SlowReplicas(start=start + quarter, seconds=2 * quarter, factor=SLOW_FACTOR, count=SLOW_COUNT),)


def steepest_ramp(load: Load) -> float:
    """Return the time at which the next two minutes require most more than the last two, if the outage fits."""
    bins = _binned(load)
    width = round(_RAMP_SECONDS / _BIN_SECONDS)
    first = int(load.scored_from // _BIN_SECONDS)
    last = int((load.span_seconds - OUTAGE_SECONDS) // _BIN_SECONDS)
    candidates = range(first, max(first, last) + 1)
    rise = {at: sum(bins[at : at + width]) - sum(bins[max(0, at - width) : at]) for at in candidates}
    return max(load.scored_from, max(candidates, key=lambda at: rise[at]) * _BIN_SECONDS)


def busiest(load: Load) -> float:
    """Return the middle of the scored minute with the most prompt tokens."""
    bins = _binned(load)
    width = round(60.0 / _BIN_SECONDS)
    first = int(load.scored_from // _BIN_SECONDS)
    sums = {at: sum(bins[at : at + width]) for at in range(first, len(bins))}
    return (max(sums, key=lambda at: sums[at]) + width / 2) * _BIN_SECONDS


def _binned(load: Load) -> list[float]:
    """Return the prompt tokens that arrive in each 10 s."""
    bins = [0.0] * (int(load.span_seconds // _BIN_SECONDS) + 1)
    for request in load.requests:
        bins[int(request.time // _BIN_SECONDS)] += request.prompt_tokens
    return bins
