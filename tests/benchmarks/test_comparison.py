"""What a comparison makes of its measurements: workloads, ratios of neighbours, goals, the floor's schedule."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.serving.comparison.floor import Measurements, floor_of, prompt_steps, sizes_of
from benchmarks.serving.comparison.plot import write_plot
from benchmarks.serving.comparison.process_tree import ServerError, running, session_rss_bytes
from benchmarks.serving.comparison.results import (
    Family,
    Measured,
    ReplicaChoice,
    Turn,
    as_document,
    rows,
    run_ratios,
    verdicts,
)
from benchmarks.serving.comparison.servers import int8_flags
from benchmarks.serving.comparison.table import limit_lines
from benchmarks.serving.comparison.turns import batch_measured, check
from benchmarks.serving.comparison.workloads import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    Workload,
    conversations,
    parse_workload,
    rounds_for,
)
from quire_cli.bench.summary import Objective, Outcome, summarise

SIXTEEN = parse_workload("256/64@16")
EIGHT = parse_workload("1024/128@8")


def measured(workload: Workload, rate: float, *, ttft: float | None = 0.2, itl: float | None = 0.04) -> Measured:
    return Measured(
        workload=workload,
        requests=32,
        seconds=8.0,
        total_tokens_per_second=rate,
        output_tokens_per_second=rate / 5,
        ttft_p50_seconds=ttft,
        itl_p50_seconds=itl,
        tpot_p50_seconds=itl,
    )


def turn(name: str, family: Family, run: int, *found: Measured, start: float | None = 10.0) -> Turn:
    return Turn(server=name, family=family, run=run, start_seconds=start, peak_rss_bytes=1 << 30, measured=tuple(found))


def test_a_workload_is_read_as_it_is_written() -> None:
    assert parse_workload(" 256/64@16 ") == Workload(input_tokens=256, output_tokens=64, concurrency=16)
    assert str(parse_workload("1024/128@8")) == "1024/128@8"


@pytest.mark.parametrize("text", ["", "256/64", "256/64@", "0/64@16", "a/b@c", "256/64@16@2", "-1/64@16"])
def test_no_workload_says_how_one_is_written(text: str) -> None:
    with pytest.raises(ValueError, match="such as 256/64@16"):
        parse_workload(text)


@pytest.mark.parametrize(
    ("seconds", "round_seconds", "rounds"), [(20, 4, 5), (20, 60, MIN_ROUNDS), (20, 0, MAX_ROUNDS), (20, 0.1, 100)]
)
def test_rounds_fill_the_time_there_is(seconds: float, round_seconds: float, rounds: int) -> None:
    assert rounds_for(seconds, round_seconds) == rounds


def test_prompts_are_of_the_length_asked_for_and_no_two_begin_alike() -> None:
    asked = conversations(SIXTEEN, rounds=3, vocabulary=49_152, seed=7)
    prompts = [conversation.turns[0].prompt_token_ids for conversation in asked]
    assert len(prompts) == 48 and {len(prompt) for prompt in prompts} == {256}
    assert len({prompt[:4] for prompt in prompts}) == 48
    assert all(0 < token < 49_152 for prompt in prompts for token in prompt)
    assert asked == conversations(SIXTEEN, rounds=3, vocabulary=49_152, seed=7)
    assert asked != conversations(SIXTEEN, rounds=3, vocabulary=49_152, seed=8)


def test_rows_are_medians_in_the_order_of_the_first_run() -> None:
    turns = [
        turn(name, family, run, measured(SIXTEEN, rate + run))
        for run in (1, 2, 3)
        for name, family, rate in (("quire", "quire", 300.0), ("vllm", "vllm", 100.0))
    ]
    found = rows(turns)
    assert [(row.server, row.total_tokens_per_second, row.spread, row.runs) for row in found] == [
        ("quire", 302.0, (301.0, 303.0), 3),
        ("vllm", 102.0, (101.0, 103.0), 3),
    ]


def test_ratios_are_of_neighbours_in_one_run() -> None:
    """The machine was half as fast in the second run: medians of each alone would compare different hours."""
    turns = [
        turn("quire", "quire", 1, measured(SIXTEEN, 400)),
        turn("vllm", "vllm", 1, measured(SIXTEEN, 200)),
        turn("quire", "quire", 2, measured(SIXTEEN, 200)),
        turn("vllm", "vllm", 2, measured(SIXTEEN, 100)),
        turn("quire", "quire", 3, measured(SIXTEEN, 500)),
    ]
    assert run_ratios(turns, "quire", "vllm", SIXTEEN) == [2.0, 2.0]
    assert run_ratios(turns, "quire", "vllm", EIGHT) == []


def found_goals(turns: list[Turn], **options: bool) -> dict[str, ReplicaChoice]:
    told = verdicts(turns, {"256/64@16": 500.0}, has_avx512_bf16=options.get("has_avx512_bf16", True))
    return {verdict.what: verdict for verdict in told}


@pytest.mark.parametrize(
    ("workload", "bf16", "goal"),
    [(SIXTEEN, True, 1.1), (SIXTEEN, False, 1.25), (EIGHT, True, 1.5), (EIGHT, False, 1.5)],
)
def test_the_goal_over_vllm_depends_on_workload_and_processor(workload: Workload, bf16: bool, goal: float) -> None:
    turns = [
        turn("quire", "quire", 1, measured(workload, goal * 100)),
        turn("vllm", "vllm", 1, measured(workload, 100)),
    ]
    found = found_goals(turns, has_avx512_bf16=bf16)[f"{workload}: total tokens/s over vllm"]
    assert found.goal == goal and found.met
    turns[0] = turn("quire", "quire", 1, measured(workload, goal * 100 - 1))
    assert not found_goals(turns, has_avx512_bf16=bf16)[f"{workload}: total tokens/s over vllm"].met


def test_every_goal_is_told_of_what_was_measured() -> None:
    turns = [
        turn("quire", "quire", 1, measured(SIXTEEN, 450, ttft=0.1, itl=0.05), start=4.0),
        turn("quire-int8", "quire-int8", 1, measured(SIXTEEN, 540)),
        turn("vllm", "vllm", 1, measured(SIXTEEN, 300), start=100.0),
        turn("vllm-f32", "vllm", 1, measured(SIXTEEN, 100), start=100.0),
        turn("llama.cpp", "llama.cpp", 1, measured(SIXTEEN, 250)),
        turn("transformers-static", "transformers", 1, measured(SIXTEEN, 80, ttft=None, itl=None), start=None),
    ]
    found = {what: (round(verdict.found, 3), verdict.met) for what, verdict in found_goals(turns).items()}
    assert found == {
        "256/64@16: total tokens/s over vllm": (1.5, True),
        "256/64@16: TTFT over vllm": (0.5, True),
        "256/64@16: ITL over vllm": (1.25, False),
        "256/64@16: total tokens/s over vllm-f32": (4.5, True),
        "256/64@16: TTFT over vllm-f32": (0.5, True),
        "256/64@16: ITL over vllm-f32": (1.25, False),
        "256/64@16: total tokens/s over llama.cpp": (1.8, False),
        "256/64@16: TTFT over llama.cpp": (0.5, True),
        "256/64@16: ITL over llama.cpp": (1.25, False),
        "256/64@16: share of the floor": (0.9, True),
        "256/64@16: total tokens/s with int8 over vllm": (1.8, True),
        "start to first token over vllm": (0.04, True),
        "start to first token over vllm-f32": (0.04, True),
    }


def test_without_peers_there_is_but_the_floor() -> None:
    assert list(found_goals([turn("quire", "quire", 1, measured(SIXTEEN, 300))])) == ["256/64@16: share of the floor"]


def test_a_floor_is_prompts_at_the_fastest_step_and_then_decode_steps() -> None:
    workload = Workload(input_tokens=256, output_tokens=3, concurrency=4)
    assert prompt_steps(workload) == [256, 1024]
    figures = Measurements(
        layers={4: 0.010, 256: 0.256, 1024: 0.512},
        head={4: 0.001},
        prompt_attention={256: 0.020},
        decode_attention=lambda total: total / 1e6,
    )
    floor = floor_of(workload, 100, figures)
    # 1,024 prompt tokens at 0.5 ms, two steps of 10 ms, three of the output layer's 1 ms.
    assert floor.linear_seconds == pytest.approx(0.512 + 0.020 + 0.003)
    # Four prompts of 20 ms; two steps over 4 * 257.5 tokens of 100 bytes.
    assert floor.attention_seconds == pytest.approx(0.080 + 2 * 1030 * 100 / 1e6)
    assert floor.total_tokens_per_second == pytest.approx(4 * 259 / (0.535 + 0.286))


def test_sizes_follow_from_a_llamas_config() -> None:
    config = json.loads((Path(__file__).parents[2] / "benchmarks/models/smollm2-135m/config.json").read_text())
    sizes = sizes_of(config)
    assert sizes.linear_shapes() == [(960, 576), (576, 576), (3072, 576), (576, 1536)]
    assert sizes.kv_bytes_per_token(2) == 23_040


@pytest.mark.parametrize(
    ("told", "flags"),
    [
        ("  --quantization {none,int8}\n     8 bits", ("--quantization", "int8")),
        ("  --weights {auto,int8,fp8}", ("--weights", "int8")),
        ("  --kv-cache-dtype {auto,int8}", ()),
        ("  --quantization {fp8}", ()),
        ("", ()),
    ],
)
def test_the_flag_for_int8_is_read_from_the_help(told: str, flags: tuple[str, ...]) -> None:
    assert int8_flags(told) == flags


def outcome(**changes: object) -> Outcome:
    good = Outcome(
        sent_seconds=0.0,
        first_token_seconds=0.1,
        end_seconds=1.0,
        chunk_gaps_seconds=(0.01,),
        prompt_tokens=256,
        output_tokens=64,
        requested_tokens=64,
        finish_reason="length",
        status=200,
        error=None,
    )
    return dataclasses.replace(good, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"error": "HTTP 500: no"}, "1 of 2 requests failed: HTTP 500: no"),
        ({"output_tokens": 63}, "1 of 2 answers were shorter"),
        ({"prompt_tokens": 257}, "counted 513 prompt tokens where 512 were sent"),
    ],
)
def test_answers_that_are_not_what_was_asked_for_do_not_count(changes: dict[str, object], words: str) -> None:
    good = [outcome(), outcome()]
    check(summarise(good, Objective()), SIXTEEN, 2)
    with pytest.raises(ServerError, match=words):
        check(summarise([outcome(), outcome(**changes)], Objective()), SIXTEEN, 2)


def test_a_batch_counts_prompts_and_answers() -> None:
    found = batch_measured(SIXTEEN, 4.0)
    assert found.total_tokens_per_second == 16 * 320 / 4 and found.output_tokens_per_second == 16 * 64 / 4


def test_a_server_is_stopped_with_all_its_processes(tmp_path: Path) -> None:
    """The child of a child, which ignores SIGTERM, is gone as well."""
    pid_file = tmp_path / "pid"
    write_pid = f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))"
    grandchild = f"import os, signal, time; signal.signal(15, signal.SIG_IGN); {write_pid}; time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with running([sys.executable, "-c", parent], {}, tmp_path / "log") as tree:
        while not (pid_file.exists() and pid_file.read_text()):
            tree.check()
        pid = int(pid_file.read_text())
        assert Path(f"/proc/{pid}").exists()
        while tree.peak_rss_bytes == 0:
            tree.check()
    # Whoever reaps orphans here may not have come to it yet; a dead process has no memory.
    memory = Path(f"/proc/{pid}/statm")
    assert not memory.exists() or memory.read_text().split()[1] == "0"


def test_memory_counts_every_process_of_the_session() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as child:
        while (resident := session_rss_bytes(child.pid)) < 1 << 20:
            assert child.poll() is None
        child.communicate(b"\n")
    assert resident < 1 << 30 and session_rss_bytes(child.pid) == 0


def test_a_server_that_ends_tells_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(4)"]
    with running(command, dict(os.environ), tmp_path / "log") as tree:
        tree.wait(60)
        with pytest.raises(ServerError, match=r"(?s)ended with 4.*no such model"):
            tree.check()


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="/nowhere/server cannot be started"),
        running(["/nowhere/server"], {}, tmp_path / "log"),
    ):
        pass


def test_the_picture_is_drawn_of_servers_and_batches(tmp_path: Path) -> None:
    turns = [
        turn("quire", "quire", 1, measured(SIXTEEN, 450), measured(EIGHT, 300)),
        turn("transformers-static", "transformers", 1, measured(SIXTEEN, 80, ttft=None, itl=None), start=None),
    ]
    write_plot(tmp_path / "plot.svg", turns, {"256/64@16": 500.0}, "a comparison")
    drawn = (tmp_path / "plot.svg").read_text()
    assert "a comparison" in drawn and drawn.count("<path") > 20


def test_results_survive_json() -> None:
    turns = [turn("quire", "quire", 1, measured(SIXTEEN, 450))]
    (read,) = json.loads(json.dumps(as_document(turns)))
    assert read["server"] == "quire" and read["measured"][0]["workload"] == "256/64@16"


def test_the_machines_limits_are_told_for_every_run() -> None:
    floor = {
        "workload": "256/64@16",
        "linear_seconds": 3.0,
        "attention_seconds": 1.0,
        "total_tokens_per_second": 1280.0,
    }
    limit = {"dtype": "bfloat16", "gemm_flops": {"bfloat16": 6e11}, "memory_bytes_per_second": 3e10, "floors": [floor]}
    lines = limit_lines([limit, limit])
    assert lines[0] == "machine, run 1: GEMM bfloat16 600 GFLOP/s; memory 30 GB/s"
    assert lines[1] == "  floor of 256/64@16 in bfloat16: 1,280 tokens/s (linear 75%, attention 25%)"
    assert len(lines) == 4
