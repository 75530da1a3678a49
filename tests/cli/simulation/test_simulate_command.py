"""``quire simulate`` for users: its output, its files, and its error messages."""

import json
import re
from pathlib import Path

import pytest

from quire_cli import app as cli
from quire_cli.simulation import speed
from quire_cli.simulation.fleet import Crash, ScrapeOutage, SlowReplicas
from quire_operator.capacity import judge
from quire_operator.capacity.fit import Footprint

ROOT = Path(__file__).parents[3]
SLICE = ROOT / "benchmarks/traces/azure_llm_2023_code_slice.csv"
POLICY = """
apiVersion: quire.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: {source: hf://example/none}
  resources: {limits: {nvidia.com/gpu: 1}}
  autoscaling: {minReplicas: 1, maxReplicas: 8}
"""
CAPACITY = """
status:
  capacity: {kvTokens: 120000, prefillTokensPerSecond: 8000, stepMicroseconds: 20000, decodeNanosecondsPerToken: 200000,
    meanPromptTokens: 2000, meanOutputTokens: 30}
"""
BY_HAND = ["--prefill-rate", "8000", "--step-time", "20ms", "--decode-time", "0.2ms", "--kv-tokens", "120000"]


@pytest.fixture
def policy(tmp_path):
    def write(text=POLICY + CAPACITY, name="chat.yaml"):
        file = tmp_path / name
        file.write_text(text)
        return str(file)

    return write


def run(*arguments, capsys=None):
    """Run the command and return exit code and output."""
    try:
        cli.main(["simulate", *map(str, arguments)])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    said = capsys.readouterr()
    return code, " ".join((said.out + said.err).split())


def test_simulate_reports_the_result_and_decisions(policy, tmp_path, capsys):
    out, plot = tmp_path / "run.json", tmp_path / "plots" / "run.png"
    code, said = run("--trace", SLICE, "--policy", policy(), "--json", out, "--plot", plot, capsys=capsys)
    assert code == 0
    assert "source: status.capacity in" in said and "120,000 KV tokens" in said
    assert "of 1,000 requests: first token at most 2 s after the end of an immediate prefill" in said
    assert "1 → " in said and "replicas (" in said, "changes with their reasons"
    document = json.loads(out.read_text())
    assert len(document["requests"]) == document["summary"]["requests"] == 1000
    assert document["engine"]["prefill_tokens_per_second"] == 8000
    assert document["summary"]["changes"] == sum(d["desired"] != d["current"] for d in document["decisions"])
    assert all(r["first_token"] >= r["arrival"] + r["own_prefill_seconds"] - 1e-9 for r in document["requests"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_speed_flags_take_precedence_over_status(policy, capsys):
    _, said = run("--trace", SLICE, "--policy", policy(), "--prefill-rate", 4000, "--duration", "1m", capsys=capsys)
    assert "4,000 prompt tokens/s" in said and "source: the options, then status.capacity" in said


def test_engine_speed_is_read_from_a_calibration_file(policy, tmp_path, capsys):
    engine = tmp_path / "engine.json"
    figures = {"prefill_tokens_per_second": 5000, "step_seconds": 0.01, "decode_seconds_per_sequence": 0}
    engine.write_text(json.dumps({**figures, "kv_tokens": 50000}))
    _, said = run("--trace", SLICE, "--policy", policy(POLICY), "--engine", engine, "--duration", "1m", capsys=capsys)
    assert "5,000 prompt tokens/s, 10.00 ms per step" in said and "50,000 KV tokens" in said


def test_infinite_speed_is_simulated_and_null_in_the_results(policy, tmp_path, capsys):
    """``status.capacity`` has 0 prompt tokens per second if the times of steps do not depend on prompts."""
    out = tmp_path / "run.json"
    free = POLICY + CAPACITY.replace("prefillTokensPerSecond: 8000", "prefillTokensPerSecond: 0")
    code, said = run("--trace", SLICE, "--policy", policy(free), "--duration", "1m", "--json", out, capsys=capsys)
    assert code == 0 and "inf prompt tokens/s" in said
    document = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert document["engine"]["prefill_tokens_per_second"] is None


def test_speed_of_a_local_model_can_be_estimated(tmp_path, capsys):
    demo = ROOT / "examples/demo.yaml"
    code, said = run("--trace", SLICE, "--policy", demo, "--duration", "1m", "--scale-input", 0.1, capsys=capsys)
    assert code == 0 and "KV tokens; source: an estimate for this machine" in said
    assert "21,840 KV" in said or "10,912 KV" in said  # in bfloat16, or in float32 on a CPU without it


def test_trace_is_cut_and_scaled(policy, tmp_path, capsys):
    out = tmp_path / "run.json"
    bends = ["--start", "30s", "--duration", "5m", "--speed", "2", "--scale-output", "2", "--max-output-tokens", "20"]
    run("--trace", SLICE, "--policy", policy(), *bends, "--json", out, capsys=capsys)
    requests = json.loads(out.read_text())["requests"]
    assert 0 < len(requests) < 1000 and all(0 <= r["arrival"] <= 150 for r in requests)
    assert max(r["output_tokens"] for r in requests) == 20


def test_no_decisions_are_printed_with_decisions_0(policy, capsys):
    _, said = run("--trace", SLICE, "--policy", policy(), "--decisions", 0, "--duration", "4m", capsys=capsys)
    assert re.search(r"(all|of) \d+ changes", said) is None and "TimeToFirstToken needs" not in said


def test_recommend_mode_is_simulated_as_enforced(policy, capsys):
    text = POLICY.replace("{minReplicas", "{mode: Recommend, minReplicas") + CAPACITY
    _, said = run("--trace", SLICE, "--policy", policy(text), capsys=capsys)
    assert "The mode is Recommend" in said and "1 → " in said


def test_mooncake_trace_is_read(policy, tmp_path, capsys):
    trace = tmp_path / "mooncake.jsonl"
    row = {"timestamp": 0, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 3]}
    trace.write_text("\n".join(json.dumps({**row, "timestamp": 2000 * n}) for n in range(20)))
    _, said = run("--trace", trace, "--policy", policy(), capsys=capsys)
    assert "100.00% of 20 requests" in said and "64.9% of the prompt tokens were cached" in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--trace", "absent.csv"], "the trace absent.csv cannot be read: No such file or directory"),
        (["--policy", "absent.yaml"], "absent.yaml does not exist"),
        (["--name", "other"], "has no LLMDeployment other it has: chat"),
        (["--start", "3h"], "has no requests in the range of --start and --duration"),
        (["--warm-up", "3h"], "--warm-up leaves nothing to score"),
        (["--fault", "flood@3m"], '"flood@3m" is not a fault such as crash@10m'),
        (["--fault", "crash@soon"], '"crash@soon" is not a fault'),
        (["--fault", "slow@1m+1mx1.2.3"], '"slow@1m+1mx1.2.3" is not a fault'),
        (["--fault", "slow@1m+1mx0"], '"slow@1m+1mx0" is not a fault'),
        (["--scale-input", "inf"], '"inf" is not a number from 0.0001 to 10000'),
        (["--scale-output", "nan"], '"nan" is not a number from 0.0001 to 10000'),
        (["--speed", "0.0005"], '"0.0005" is not a number from 0.001 to 10000'),
        (["--startup-delay", "soon"], '"soon" is not a duration'),
        (["--engine", "absent.json"], "the calibration file absent.json cannot be read"),
        (["--initial-replicas", "9"], "--initial-replicas 9 is more than maxReplicas"),
        (["--json", "/proc/none/run.json"], "/proc/none/run.json cannot be written"),
        (["--plot", "run.doc"], "--plot run.doc should end in .png, .svg or .pdf"),
        (["--kv-tokens", "3"], "should be greater than or equal to 16"),
    ],
)
def test_invalid_arguments_are_reported(policy, arguments, expected, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    given = {"--trace": str(SLICE), "--policy": policy(), **dict([arguments])}
    code, said = run(*[word for pair in given.items() for word in pair], capsys=capsys)
    assert code == 2
    assert expected in said.replace("│ ", "").replace(" │", "")
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (POLICY.replace("  autoscaling: {minReplicas: 1, maxReplicas: 8}\n", "  replicas: 3\n"), "no spec.autoscaling"),
        (POLICY + "---" + POLICY.replace("name: chat", "name: code"), "2 LLMDeployments: chat, code select one"),
        (POLICY.replace("maxReplicas: 8", "maxReplicas: 0"), "maxReplicas"),
        ("", "contains no document"),
    ],
)
def test_a_policy_that_can_not_be_simulated_is_refused(policy, text, expected, capsys):
    code, said = run("--trace", SLICE, "--policy", policy(text), *BY_HAND, capsys=capsys)
    assert code == 2 and expected in said


def test_one_of_several_deployments_can_be_chosen(policy, capsys):
    text = POLICY + "---" + POLICY.replace("name: chat", "name: code")
    code, said = run(
        "--trace", SLICE, "--policy", policy(text), *BY_HAND, "--name", "code", "--duration", "1m", capsys=capsys
    )
    assert code == 0 and "code under azure" in said


def test_unknown_engine_speed_names_the_flags(policy, tmp_path, capsys):
    text = POLICY.replace("hf://example/none", f"file://{tmp_path}/absent")
    code, said = run("--trace", SLICE, "--policy", policy(text), capsys=capsys)
    assert code == 2 and "the speed of an engine of chat is not known" in said and "--prefill-rate" in said


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "is not a JSON object"),
        ("{", "is not JSON"),
        ('{"speed": 3}', '"speed" is not known'),
        ('{"step_seconds": "fast"}', '"step_seconds" must be a number > 0, got "fast"'),
        ('{"kv_tokens": 0}', '"kv_tokens" must be a number > 0, got 0'),
        ('{"kv_tokens": 5.5}', "a KV cache of 5 tokens is smaller than a block of 16"),
        ('{"step_seconds": NaN}', '"step_seconds" must be a number > 0, got NaN'),
    ],
)
def test_invalid_calibration_file_is_refused(policy, tmp_path, text, problem, capsys):
    file = tmp_path / "engine.json"
    file.write_text(text)
    code, said = run("--trace", SLICE, "--policy", policy(), "--engine", file, capsys=capsys)
    assert code == 2 and problem in said


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            '{"timestamp": NaN, "input_length": 3, "output_length": 1}',
            'line 2 of the trace: "{\\"timestamp\\": NaN',
        ),
        ('{"timestamp": 1, "input_length": 1e999, "output_length": 1}', "line 2 of the trace"),
        ('{"timestamp": 1, "input_length": 3, "output_length": 1, "hash_ids": [[1]]}', "line 2 of the trace"),
        ('{"timestamp": 1, "output_length": 1}', "is not JSON such as"),
    ],
)
def test_invalid_trace_is_refused_with_the_line(policy, tmp_path, line, problem, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 3, "output_length": 1}\n' + line)
    code, said = run("--trace", trace, "--policy", policy(), capsys=capsys)
    assert code == 2 and problem in said


def test_trace_with_a_wrong_clock_is_refused_early(policy, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"timestamp": {at}, "input_length": 3, "output_length": 1}}\n' for at in (0, 1e15)))
    code, said = run("--trace", trace, "--policy", policy(), capsys=capsys)
    assert code == 2 and "11,574,074 days; at most 366" in said and "check that its times are in milliseconds" in said


def test_trace_of_one_request_is_simulated(policy, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 7, "input_length": 3, "output_length": 1}')
    code, said = run("--trace", trace, "--policy", policy(), "--plot", tmp_path / "one.png", capsys=capsys)
    assert code == 0 and "100.00% of 1 requests" in said


def test_trace_shorter_than_a_tick_has_replicas(policy, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"timestamp": {at}, "input_length": 3, "output_length": 1}}\n' for at in (0, 5000)))
    code, said = run("--trace", trace, "--policy", policy(), capsys=capsys)
    assert code == 0 and "1.0 replicas on average, 1 at most" in said


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("crash@90s", Crash(time=90.0)),
        ("outage@10m", ScrapeOutage(start=600.0, seconds=300.0)),
        ("outage@10m+1m", ScrapeOutage(start=600.0, seconds=60.0)),
        ("slow@10m+1mx4", SlowReplicas(start=600.0, seconds=60.0, factor=4.0)),
    ],
)
def test_faults_are_read(text, fault):
    from quire_cli.simulation.command import _fault

    assert _fault(text) == fault


def test_all_known_gpus_can_be_estimated():
    assert {gpu.name for gpu in judge.GPUS} == set(speed.GPUS)


def test_estimate_is_limited_by_compute_and_bandwidth():
    needs = Footprint(
        dtype="bfloat16",
        parameters=8 * 10**9,
        weight_bytes=16 * 10**9,
        workspace_bytes=0,
        swap_bytes=0,
        kv_groups={},
    )
    guess = speed.estimated(needs, speed.GPUS["H100 80GB"], kv_tokens=400_000, max_model_length=8192)
    assert 20_000 < guess.prefill_tokens_per_second < 40_000
    assert 0.005 < guess.step_seconds < 0.01
    shared = speed.GPUS["H100 80GB"].times(2)
    halved = speed.estimated(needs, shared, kv_tokens=400_000, max_model_length=8192)
    assert halved.step_seconds == pytest.approx(guess.step_seconds / 2)
    staged = speed.estimated(needs, shared, kv_tokens=400_000, max_model_length=8192, stages=2)
    assert staged.step_seconds == pytest.approx(guess.step_seconds)
    assert staged.prefill_tokens_per_second == halved.prefill_tokens_per_second


SCHEDULED = POLICY.replace(
    "maxReplicas: 8}",
    'maxReplicas: 8, schedules: [{cron: "10 8 * * *", timeZone: Europe/Berlin, duration: 15m, minReplicas: 6}]}',
)


def test_simulation_follows_schedules_from_its_clock(policy, tmp_path, capsys):
    """The window opens 10 minutes after the start; with a start-up of 60 s, replicas are requested before that."""
    out = tmp_path / "run.json"
    code, _ = run(
        *("--trace", SLICE, "--policy", policy(SCHEDULED + CAPACITY), "--startup-delay", "60s", "--json", out),
        *("--clock", "2026-03-02T08:00:00+01:00", "--speed", "0.3"),
        capsys=capsys,
    )
    assert code == 0
    found = json.loads(out.read_text())
    asked = {d["time"]: d["desired"] for d in found["decisions"]}
    window = {time: desired for time, desired in asked.items() if 600 <= time < 1500}
    assert window and min(window.values()) >= 6
    assert min(asked.values()) == 1
    assert max(point["ready"] for point in found["timeline"] if point["time"] < 400) < 6
    assert min(point["ready"] for point in found["timeline"] if 630 <= point["time"] < 1500) >= 6
    assert "Schedule" in {d["reason"] for d in found["decisions"]}


@pytest.mark.parametrize("clock", ["", "--clock=yesterday", "--clock=2026-03-02T08:00:00"])
def test_schedules_need_a_clock_with_an_offset(policy, clock, capsys):
    code, said = run("--trace", SLICE, "--policy", policy(SCHEDULED + CAPACITY), *clock.split(), capsys=capsys)
    assert code != 0 and "2026-03-02T07:30:00+01:00" in said
