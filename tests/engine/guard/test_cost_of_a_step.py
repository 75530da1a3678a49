"""The cost of a step and of a streamed token has not grown.

Counts, and ratios to a loop of the same kind, are compared with ``bounds.json``. No absolute time is compared, so a
busy machine does not change the result.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from quire_guard import bounds

ROOT = Path(__file__).resolve().parents[3]
RECORDED = bounds.read()
# This takes half a minute, and longer on a busy machine, which is no failure.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="session")
def measured() -> bounds.Measures:
    """Return the measures of a separate process, in which no other test has filled caches or set threads."""
    folders = (ROOT / "tests/support", ROOT, os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if str(folder))}
    done = subprocess.run(
        [sys.executable, "-m", "quire_guard"], env=environment, capture_output=True, text=True, timeout=590
    )
    assert done.returncode == 0, done.stderr
    found: bounds.Measures = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("kind", "name"), bounds.names(RECORDED.measures))
def test_step_costs_stay_within_recorded_bounds(measured: bounds.Measures, kind: str, name: str) -> None:
    problem = bounds.excess(kind, name, measured[kind][name], RECORDED)
    assert problem is None, problem


def test_every_measurement_has_a_bound(measured: bounds.Measures) -> None:
    assert sorted(bounds.names(measured)) == sorted(bounds.names(RECORDED.measures)), f"renew: {bounds.RENEW}"


def test_cost_grows_with_scheduled_sequences_only(
    measured: bounds.Measures,
) -> None:
    counts = measured["counts"]
    few = counts["scheduler: instructions per sequence, 1 to 64"]
    many = counts["scheduler: instructions per sequence, 64 to 256"]
    assert many <= 1.02 * few
    # One check per step whether the first waiting sequence may run, however many wait.
    assert measured["exact"]["scheduler: more instructions with 1,000 waiting"] < few


def test_runner_model_and_kernels_visit_no_sequence_in_python(measured: bounds.Measures) -> None:
    assert measured["exact"]["step: more Python calls in runner, model and kernels at 64"] <= 0
    assert measured["exact"]["step: more torch operators at 64"] <= 0


def test_warm_engine_compiles_no_kernels(measured: bounds.Measures) -> None:
    assert measured["exact"]["steady engine: numba compilations"] == 0
