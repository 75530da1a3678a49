#!/usr/bin/env python3
"""Simulate canaries with the operator's own judgement and state machine, and count false alarms and missed ones.

    python -m benchmarks.operator.canary_judgement --runs 200 --json out/canary.json

Four stable replicas serve 20 requests per second whose rate swings; a latency grows with the requests that a replica
already has, and has a long tail. As in the gateway, latencies are recorded only at equal load per replica. No clock is
read: a run is a function of its seed. A false alarm is a good canary that is rolled back, a missed one is a bad canary
that is promoted.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path

import numpy as np

from quire_common.contract.gateway import INTER_TOKEN_LATENCY, TIME_TO_FIRST_TOKEN, CanaryRoute, bin_start
from quire_gateway.canary import Tracks as Router
from quire_operator.api import Canary
from quire_operator.api.rollout import equal_load
from quire_operator.canary.analysis import Track, Tracks, hang, judge
from quire_operator.canary.progress import Phase, Situation, advance

REPLICAS, REQUESTS_PER_SECOND, MEAN_LOAD = 4, 20.0, 6.0
_STABLE_ERRORS = 0.0005
_LONGEST_SECONDS = 6 * 3600.0
_EDGES = np.array([bin_start(number) for number in range(1, 321)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of canary, by what its spec changes."""

    name: str
    is_good: bool
    factor: float = 1.0
    """Its latency, as a multiple of the stable one."""
    factor_under_load: float = 1.0
    """The additional multiple while a replica has four or more requests."""
    errors: float = _STABLE_ERRORS
    hangs: bool = False
    """True if no request gets an answer."""


KINDS = (
    Kind(name="same", is_good=True),
    Kind(name="faster", is_good=True, factor=0.9),
    Kind(name="slower within the limit", is_good=True, factor=1.1),
    Kind(name="slow", is_good=False, factor=1.4),
    Kind(name="slow under load", is_good=False, factor_under_load=1.6),
    Kind(name="1 error in 100", is_good=False, errors=0.01),
    Kind(name="hangs", is_good=False, hangs=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    phase: str
    requests: int
    """The requests of the canary until then."""
    seconds: float


class _Counted:
    """The figures of one track, which grow from tick to tick."""

    def __init__(self) -> None:
        self.requests = self.errors = self.unanswered = 0
        self._counts = {name: np.zeros(321, int) for name in (TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY)}

    def add(self, rng: np.random.Generator, kind: Kind, *, requests: int, load: float, is_compared: bool) -> None:
        if kind.hangs:
            # As if each had waited for 30 seconds already.
            self.unanswered += requests
            return
        loads = rng.poisson(load, requests)
        factor = kind.factor * np.where(loads >= 4, kind.factor_under_load, 1.0)
        errors = rng.random(requests) < kind.errors
        self.requests += requests
        self.errors += int(errors.sum())
        if not is_compared:
            return
        for name, base, slope, spread in (
            (TIME_TO_FIRST_TOKEN, 0.08, 0.25, 0.5),
            (INTER_TOKEN_LATENCY, 0.02, 0.06, 0.2),
        ):
            latency = base * (1 + slope * loads) * factor * rng.lognormal(0.0, spread, requests)
            bins = np.searchsorted(_EDGES, latency[~errors], side="right")
            np.add.at(self._counts[name], bins, 1)

    def track(self) -> Track:
        latencies = {name: _nonzero(counts) for name, counts in self._counts.items()}
        return Track(requests=self.requests, errors=self.errors, unanswered=self.unanswered, latencies=latencies)


def _nonzero(row: "np.ndarray[tuple[int], np.dtype[np.int_]]") -> dict[int, int]:
    return {int(number): int(row[number]) for number in np.nonzero(row)[0]}


def simulate(kind: Kind, *, seed: int, tick_seconds: float = 15.0, policy: Canary | None = None) -> Outcome:
    """Return how a canary of this kind ends. The canary is judged at every tick, as in a cluster."""
    policy, rng = policy or Canary(), np.random.default_rng(seed)
    stable, canary, same = _Counted(), _Counted(), KINDS[0]
    now, swing = 0.0, 0.0
    record = advance(None, Situation(revision="old", differs=False), policy, now=now)
    while now < _LONGEST_SECONDS:
        found = Tracks(stable=stable.track(), canary=canary.track())
        situation = Situation(
            revision="new",
            differs=True,
            canary_ready=True,
            replicas=REPLICAS,
            failure=hang(found, record.weight_percent) if record.weight_percent else None,
            results=judge(policy, found),
            requests=canary.requests,
        )
        record = advance(record, situation, policy, now=now)
        if record.phase in (Phase.PROMOTING, Phase.ROLLED_BACK):
            requests = canary.requests + canary.unanswered
            return Outcome(phase=record.phase.value, requests=requests, seconds=now)
        # The rate wanders, as that of a service does over minutes.
        swing = 0.95 * swing + rng.normal(0.0, 0.1)
        level, weight = float(np.exp(swing)), record.weight_percent / 100
        total = rng.poisson(REQUESTS_PER_SECOND * level * tick_seconds)
        to_canary = round(total * weight)
        stable_load = MEAN_LOAD * level * (1 - weight)
        count = equal_load(record.current_step(policy).weight_percent, REPLICAS)[0]
        route = CanaryRoute(revision="new", weight_percent=record.weight_percent)
        is_equal = Router(route).is_equal_load(stable=REPLICAS, canary=count)
        stable.add(rng, same, requests=total - to_canary, load=stable_load, is_compared=is_equal)
        if to_canary:
            load = MEAN_LOAD * level * weight * REPLICAS / count
            canary.add(rng, kind, requests=to_canary, load=load, is_compared=is_equal)
        now += tick_seconds
    return Outcome(phase="Undecided", requests=canary.requests, seconds=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    kind: str
    is_good: bool
    runs: int
    promoted: int
    rolled_back: int
    undecided: int
    median_requests: int
    most_requests: int

    @property
    def wrong(self) -> int:
        """The false alarms, or the missed ones."""
        return self.rolled_back if self.is_good else self.promoted


def row(kind: Kind, *, runs: int, tick_seconds: float = 15.0) -> Row:
    """Return the result of so many runs, each with its own seed."""
    ends = [simulate(kind, seed=seed, tick_seconds=tick_seconds) for seed in range(runs)]
    phases = [end.phase for end in ends]
    requests = sorted(end.requests for end in ends)
    return Row(
        kind=kind.name,
        is_good=kind.is_good,
        runs=runs,
        promoted=phases.count(Phase.PROMOTING.value),
        rolled_back=phases.count(Phase.ROLLED_BACK.value),
        undecided=phases.count("Undecided"),
        median_requests=requests[len(requests) // 2],
        most_requests=requests[ceil(0.99 * len(requests)) - 1],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="runs of each kind of canary (default 200)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error("--runs: must be at least 1")
    rows = []
    titles = ("runs", "promoted", "rolled back", "undecided", "median req.", "p99 req.")
    print(f"{'canary':24}" + "".join(f"{title:>13}" for title in titles))
    for kind in KINDS:
        rows.append(found := row(kind, runs=options.runs))
        figures = (found.runs, found.promoted, found.rolled_back, found.undecided)
        numbers = (*figures, found.median_requests, found.most_requests)
        print(f"{found.kind:24}" + "".join(f"{number:13}" for number in numbers))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) | {"wrong": each.wrong} for each in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
