"""What ``benchmarks/autoscaling/validate.py`` makes of what it sees: a calibration, curves and their distance."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from quire_operator.domain.observation import ReplicaSample

FOLDER = Path(__file__).parents[3] / "benchmarks/autoscaling"


@pytest.fixture
def validate(monkeypatch):
    """The script, as a module; its neighbours are found as when it is run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import validate

    yield validate
    for name in ("validate", "curves", "real_fleet"):
        sys.modules.pop(name, None)


@dataclass
class SeenFleet:
    looks: list = field(default_factory=list)


def sample(time, *, steps, prompt, generated, running=3.0):
    return ReplicaSample(
        time=time,
        waiting=0.0,
        running=running,
        queued_prompt_tokens=0.0,
        kv_tokens_used=0.0,
        kv_tokens_capacity=3200.0,
        steps=steps,
        prompt_tokens=prompt,
        generation_tokens=generated,
        busy_seconds=0.0,
    )


def test_a_calibration_finds_the_speed_that_made_the_counters(validate):
    step, rate, decode = 0.02, 2000.0, 0.001
    fleet, time, totals = SeenFleet(), 1000.0, [0.0, 0.0, 0.0]
    for steps, prompt, generated in [(50, 0, 50), (40, 0, 300), (20, 3000, 20), (30, 1500, 250)] * 4:
        for _ in range(8):
            fleet.looks.append(
                validate.Look(time, {"r": sample(time, steps=totals[0], prompt=totals[1], generated=totals[2])})
            )
            totals = [a + b for a, b in zip(totals, (steps, prompt, generated), strict=True)]
            time += steps * step + prompt / rate + generated * decode
    model = validate.fitted(validate.busy_work(fleet), fleet)
    assert model.step_seconds == pytest.approx(step, rel=0.02)
    assert model.prefill_tokens_per_second == pytest.approx(rate, rel=0.02)
    assert model.decode_seconds_per_sequence == pytest.approx(decode, rel=0.02)
    assert model.kv_tokens == 3200
    assert validate.calibration_of(model)["kv_tokens"] == 3200


def test_idle_stretches_teach_nothing(validate):
    looks = [
        validate.Look(float(t), {"r": sample(float(t), steps=10.0 * t, prompt=0, generated=0, running=t % 2)})
        for t in range(10)
    ]
    assert validate.busy_work(SeenFleet(looks)) == []


def test_curves_are_means_of_bins_and_the_error_is_their_distance(validate):
    seen = [(0.0, 2.0, 10.0, 1.0), (5.0, 4.0, 30.0, 1.0), (12.0, 8.0, 50.0, 2.0)]
    real = validate.curves(seen, [(1.0, 0.5), (2.0, 1.5)], 15.0)
    assert (real.waiting, real.kv_percent, real.ttft) == ([3.0, 8.0], [20.0, 50.0], [1.0, 0.0])
    assert validate.error([1.0, 3.0], [2.0, 3.0]) == 0.25
    assert validate.error([0.0], [0.0]) == 0.0


def test_the_part_of_the_trace_is_told_in_durations(validate):
    import argparse

    part = validate.part_of(argparse.Namespace(start="90s", duration="5m", speed=2.0))
    assert (part.start_seconds, part.duration_seconds, part.speed) == (90.0, 300.0, 2.0)
    with pytest.raises(SystemExit, match="durations such as"):
        validate.part_of(argparse.Namespace(start="soon", duration="5m", speed=1.0))
