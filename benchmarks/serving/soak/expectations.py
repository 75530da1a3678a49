"""The expectations of a soak, as functions of what was observed."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.serving.livez_probe import Answers
from benchmarks.serving.soak.clients import Cut, PoisonAnswer, Tally
from benchmarks.serving.soak.memory import Sample
from benchmarks.serving.soak.servers import HANG_SECONDS, Death

Verdict = Literal["held", "failed", "not judged"]

GAP_MS = 100
MEMORY_GROWTH = 0.05
MEMORY_GROWTH_MIB = 4
"""The growth that is allowed in addition to the relative one, for small processes."""
MEMORY_SECONDS = 300
"""The shortest soak whose second half is not part of the warm-up."""
MAX_DEATHS = 2
_LOST_TWICE = "502 replica_failed"
_AROUND_DEATH_SECONDS = HANG_SECONDS + 15
"""The time from a death until the streams of that engine have ended: a hang must be noticed first."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The observations of a whole soak."""

    seconds: float
    tally: Tally
    deaths: Sequence[Death]
    num_engine_restarts: int
    num_server_restarts: int
    num_preemptions: int
    left: dict[str, float]
    """The requests and blocks in use at the end, by name; zero each if nothing leaks."""
    probes: Sequence[Answers]
    memory: Sequence[Sample]


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """An expectation with what was found."""

    name: str
    found: str
    verdict: Verdict


def judge(observed: Observed) -> list[Expectation]:
    """Return every expectation with its verdict."""
    return [*_answers(observed), *_deaths(observed), *_end(observed), _gap(observed.probes), *_memory(observed)]


def memory_medians(samples: Sequence[Sample], seconds: float) -> dict[str, tuple[float, float]]:
    """Return the median MiB of a process of each role in the second and in the last quarter of the time."""
    quarters: dict[str, tuple[list[float], list[float]]] = {}
    for sample in samples:
        second, last = quarters.setdefault(sample.role, ([], []))
        place = int(4 * sample.seconds / seconds)
        if place == 1:
            second.append(sample.mib)
        elif place == 3:
            last.append(sample.mib)
    return {
        role: (statistics.median(second), statistics.median(last))
        for role, (second, last) in quarters.items()
        if second and last
    }


def _held(name: str, found: str, held: bool) -> Expectation:
    return Expectation(name=name, found=found, verdict="held" if held else "failed")


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number} × {name}" for name, number in counts.most_common()) or "none"


def _answers(observed: Observed) -> Iterator[Expectation]:
    tally = observed.tally
    server_errors = Counter({name: count for name, count in tally.errors.items() if name.startswith("5")})
    # A harmless request that was on both engines that a poisonous one ended fails with it.
    unexplained_errors = server_errors - Counter({_LOST_TWICE: server_errors.total() * (len(observed.deaths) > 1)})
    name = "harmless requests get no 5xx, unless two engines died with them"
    yield _held(name, _listed(server_errors), not unexplained_errors)
    others = (tally.errors - server_errors) + tally.broken
    yield _held("harmless requests get no other error", _listed(others), not others)
    unexplained = [cut for cut in tally.cuts if not _is_explained(cut, observed.deaths)]
    found = f"{len(tally.cuts)} cut, {len(unexplained)} of them elsewhere"
    yield _held("streams end early only on a poisoned engine", found, not unexplained)
    tenants = ", ".join(f"{name} {count}" for name, count in sorted(tally.tenants.items()))
    yield _held("both tenants are served", tenants or "neither", len(tally.tenants) == 2)
    yield _held("clients cancel", str(tally.num_cancelled), tally.num_cancelled > 0)


def _is_explained(cut: Cut, deaths: Sequence[Death]) -> bool:
    # A death is known up to a second late.
    return any(
        death.replica == cut.replica and -1 <= cut.seconds - death.seconds + 1 <= _AROUND_DEATH_SECONDS
        for death in deaths
    )


def _deaths(observed: Observed) -> Iterator[Expectation]:
    poisons = observed.tally.poisons
    answers = Counter(f"{poison.kind}: {poison.status} {poison.code}" for poison in poisons)
    yield _held(
        "each poisonous request is answered with 502", _listed(answers), bool(poisons) and _all_refused(poisons)
    )
    deaths = len(observed.deaths)
    found = f"{deaths} deaths from {len(poisons)} requests"
    yield _held(f"a poisonous request ends at most {MAX_DEATHS} engines", found, deaths <= MAX_DEATHS * len(poisons))
    # The last restart before a server is started again is not counted, because that server gave up instead.
    others = observed.num_engine_restarts + observed.num_server_restarts - deaths
    yield _held("no engine dies for another reason (--check-integrity)", str(others), others == 0)


def _all_refused(poisons: Sequence[PoisonAnswer]) -> bool:
    return all((poison.status, poison.code) == (502, "replica_failed") for poison in poisons)


def _end(observed: Observed) -> Iterator[Expectation]:
    yield _held("requests are preempted", f"{observed.num_preemptions:,}", observed.num_preemptions > 0)
    left = ", ".join(f"{name} {value:g}" for name, value in observed.left.items() if value)
    yield _held("nothing is in use at the end", left or "nothing", not left)


def _gap(probes: Sequence[Answers]) -> Expectation:
    longest = max(probes, key=lambda answers: answers.longest_ms)
    over, late = sum(each.num_over_100_ms for each in probes), max(each.late_ms for each in probes)
    found = (
        f"{longest.longest_ms:.0f} ms ({longest.server}), {over} over {GAP_MS} ms; the probe itself {late:.0f} ms late"
    )
    name = f"/livez has no gap over {GAP_MS} ms"
    if longest.longest_ms > GAP_MS and late > GAP_MS / 2:
        return Expectation(name=name, found=f"{found}: the machine is too busy", verdict="not judged")
    return _held(name, found, longest.longest_ms <= GAP_MS)


def _memory(observed: Observed) -> Iterator[Expectation]:
    for role, (second, last) in memory_medians(observed.memory, observed.seconds).items():
        name, found = f"memory of a process is flat: {role}", f"{second:.1f} → {last:.1f} MiB"
        if observed.seconds < MEMORY_SECONDS:
            found += f": a soak under {MEMORY_SECONDS // 60} minutes is warm-up"
            yield Expectation(name=name, found=found, verdict="not judged")
        else:
            yield _held(name, found, last <= second * (1 + MEMORY_GROWTH) + MEMORY_GROWTH_MIB)
