"""Calibration of the simulator's engine, and the replay's clock: what can be judged without an engine."""

from datetime import UTC, datetime

import pytest

from calibration import LOADS, Calibration, busy_work, fitted, pace, requests_for, share_in_steps
from loads import busy_seconds
from quire_cli.simulation.scenario import EngineModel, Request
from quire_operator.domain.autoscaling.observation import ReplicaSample
from real_fleet import Look, later_startup_seconds
from validate import curves, error, main, speed_for

STEP, PREFILL, DECODE = 0.002, 1 / 20_000, 0.0001


def looks_at(seconds: float, *, every: float = 0.25, batch: float = 8.0, prompts: float = 0.3, replicas: int = 1):
    """Replicas that are busy all the time, ``prompts`` of it with prompts; their steps take 95 % of it."""
    looks, number = [], 0
    while (time := number * every) <= seconds:
        decoding = time * (1 - prompts)
        steps = decoding / (STEP + batch * DECODE)
        sample = ReplicaSample(
            time=time,
            waiting=0.0,
            running=batch,
            queued_prompt_tokens=0.0,
            kv_tokens_used=0.0,
            kv_tokens_capacity=3200.0,
            prompt_tokens=time * prompts / PREFILL,
            generation_tokens=steps * batch,
            steps=steps,
            busy_seconds=0.95 * time,
        )
        looks.append(Look(time, {f"r{n}": sample for n in range(replicas)}))
        number += 1
    return looks


def test_speed_of_a_quick_engine_is_found_from_a_few_seconds_of_each_load():
    kinds = [{"batch": 1.0, "prompts": 0.0}, {"batch": 5.0, "prompts": 0.01}, {"batch": 16.0, "prompts": 0.05}]
    kinds += [{"batch": 16.0, "prompts": 0.9}, {"batch": 16.0, "prompts": 0.5}]
    assert len(kinds) == len(LOADS)
    work = [part for kind in kinds for part in busy_work(looks_at(8.0, **kind))]
    model = fitted(work, 3200.0)
    assert model.step_seconds == pytest.approx(STEP, rel=0.02)
    assert 1 / model.prefill_tokens_per_second == pytest.approx(PREFILL, rel=0.02)
    assert model.decode_seconds_per_sequence == pytest.approx(DECODE, rel=0.02)
    assert pace(model, work) == pytest.approx(1.0, abs=0.01)


def test_only_stretches_in_which_all_were_busy_at_each_look_count():
    busy = looks_at(4.0, replicas=2)
    assert len(busy_work(busy)) == 2 * 2
    assert share_in_steps(busy) == pytest.approx(0.95)
    one_gone = [Look(look.time, dict(list(look.samples.items())[: 1 + (look.time < 1.0)])) for look in busy]
    assert {work.busy_seconds for work in busy_work(one_gone)} == {1.5}
    assert busy_work([*busy[:4], Look(1.0, {}), *busy[5:9]]) == []


def test_too_little_is_no_calibration():
    with pytest.raises(SystemExit, match="busy for 5 stretches"):
        fitted(busy_work(looks_at(8.0)), 3200.0)
    with pytest.raises(SystemExit, match="never saw all replicas busy"):
        pace(fitted(busy_work(looks_at(30.0)), 3200.0), [])


@pytest.mark.parametrize(
    ("tried", "took", "expected"), [(80, 0.5, 1280), (80, 8.0, 80), (80, 60.0, 80), (2, 0.0, 16_000), (80, 0.0, 20_000)]
)
def test_a_load_lasts_as_long_on_a_quick_engine_as_on_a_slow_one(tried, took, expected):
    assert requests_for(8.0, tried=tried, took=took) == expected


def test_the_clock_of_the_trace_is_set_by_what_the_fleet_can_do():
    model = EngineModel(
        prefill_tokens_per_second=10_000.0, step_seconds=0.01, decode_seconds_per_sequence=0.0, kv_tokens=4000
    )
    calibration = Calibration(model=model, slowdown=(1.0, 1.6), startup_seconds=1.0, windows=20, share_in_steps=0.9)
    requests = [Request(float(second), 500, 10) for second in range(101)]
    alone = speed_for(0.8, requests, calibration, 1)
    assert busy_seconds(requests, model) / (100 / alone) == pytest.approx(0.8, rel=0.01)
    # Two that share the cores do 1.25 times as much as one.
    assert speed_for(0.8, requests, calibration, 2) == pytest.approx(alone * 2 / 1.6, rel=0.01)


def test_curves_are_means_of_bins_and_the_error_is_their_distance():
    seen = [(0.0, 2.0, 10.0, 1.0), (5.0, 4.0, 30.0, 1.0), (12.0, 8.0, 50.0, 2.0)]
    real = curves(seen, [(1.0, 0.5), (2.0, 1.5)], 15.0)
    assert (real.waiting, real.kv_percent, real.ttft) == ([3.0, 8.0], [20.0, 50.0], [1.0, 0.0])
    assert error([1.0, 3.0], [2.0, 3.0]) == 0.25
    assert error([0.0], [0.0]) == 0.0


@pytest.mark.parametrize(("option", "value"), [("--start", "soon"), ("--duration", "5 parsecs"), ("--load", "0")])
def test_wrong_durations_and_loads_are_refused_by_name(option: str, value: str, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["validate.py", "--trace", "nowhere.csv", option, value])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert option in capsys.readouterr().err


def told(process: str, phase: str, second: float) -> dict[str, str]:
    time = datetime.fromtimestamp(second, tz=UTC).isoformat()
    return {"event": "phase", "process": process, "phase": phase, "time": time}


def test_start_ups_are_those_of_replicas_that_came_later():
    events = [told("gateway", "Loading", 0), told("a", "Pending", 0), told("a", "Loading", 1), told("a", "Ready", 21)]
    assert later_startup_seconds(events) is None
    events += [told("b", "Pending", 30), told("c", "Pending", 31), told("b", "Loading", 31), told("b", "Ready", 56)]
    events += [told("c", "Ready", 65), told("b", "Draining", 80), told("b", "Pending", 90), told("b", "Ended", 91)]
    assert later_startup_seconds(events) == pytest.approx((26 + 34) / 2)
