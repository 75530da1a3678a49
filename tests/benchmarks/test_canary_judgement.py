"""The judgement of canaries in simulated runs: hardly a false alarm, hardly a bad canary promoted."""

import pytest

from benchmarks.operator.canary_judgement import KINDS, Kind, row, simulate

RUNS = {"same": 200, "1 error in 100": 200}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_at_most_two_percent_of_the_verdicts_are_wrong(kind: Kind) -> None:
    found = row(kind, runs=RUNS.get(kind.name, 30), tick_seconds=30.0)
    assert found.wrong <= 0.02 * found.runs
    assert found.undecided <= 0.02 * found.runs
    assert found.most_requests <= (40_000 if kind.is_good else 15_000)


def test_run_is_a_function_of_its_seed() -> None:
    assert simulate(KINDS[3], seed=3) == simulate(KINDS[3], seed=3)
    assert simulate(KINDS[3], seed=3) != simulate(KINDS[3], seed=4)


def test_canary_at_the_limit_is_decided_late() -> None:
    """A canary that is slower by the limit itself is decided by ``onInconclusive`` in most runs."""
    border = Kind(name="border", is_good=False, factor=1.15)
    requests = sorted(simulate(border, seed=seed, tick_seconds=120.0).requests for seed in range(10))
    assert requests[0] > 4000 and requests[4] > 10_000
