"""The evaluation of a comparison: workloads, ratios of neighbouring runs, goals, and the lower bound's schedule."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from llvmlite import binding

from benchmarks.serving.comparison.client import Answer, Request, run, summarise
from benchmarks.serving.comparison.floor import Limits, ModelSizes, floor_of, sizes_of
from benchmarks.serving.comparison.levels import NAMES, check_level, highest_level, library_variables
from benchmarks.serving.comparison.plot import write_plot
from benchmarks.serving.comparison.process_tree import ServerError, running, session_rss_bytes
from benchmarks.serving.comparison.results import (
    Family,
    Measured,
    Turn,
    Verdict,
    as_document,
    rows,
    run_ratios,
    verdicts,
)
from benchmarks.serving.comparison.servers import int8_flags
from benchmarks.serving.comparison.table import limit_lines
from benchmarks.serving.comparison.turns import batch_measured, check, measured_from
from benchmarks.serving.comparison.workloads import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    Workload,
    parse_workload,
    requests_of,
    rounds_for,
)
from benchmarks.serving.machine_limits import arithmetic_flops, assembly, read_bytes_per_second
from quire_engine.cpu.limits import KERNELS_VARIABLE, CpuLevel

SIXTEEN = parse_workload("256/64@16")
EIGHT = parse_workload("1024/128@8")
THIRTY_TWO = parse_workload("32/128@32")


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
def test_invalid_workload_error_shows_the_format(text: str) -> None:
    with pytest.raises(ValueError, match="such as 256/64@16"):
        parse_workload(text)


@pytest.mark.parametrize(
    ("seconds", "round_seconds", "rounds"), [(20, 4, 5), (20, 60, MIN_ROUNDS), (20, 0, MAX_ROUNDS), (20, 0.1, 100)]
)
def test_rounds_fill_the_available_time(seconds: float, round_seconds: float, rounds: int) -> None:
    assert rounds_for(seconds, round_seconds) == rounds


def test_prompts_have_the_given_length_and_distinct_starts() -> None:
    asked = requests_of(SIXTEEN, rounds=3, vocabulary=49_152, seed=7)
    prompts = [request.prompt for request in asked]
    assert len(prompts) == 48 and {len(prompt) for prompt in prompts} == {256}
    assert len({prompt[:4] for prompt in prompts}) == 48
    assert all(0 < token < 49_152 for prompt in prompts for token in prompt)
    assert asked == requests_of(SIXTEEN, rounds=3, vocabulary=49_152, seed=7)
    assert asked != requests_of(SIXTEEN, rounds=3, vocabulary=49_152, seed=8)


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
    """The machine was half as fast in the second run: medians of each server alone would compare different hours."""
    turns = [
        turn("quire", "quire", 1, measured(SIXTEEN, 400)),
        turn("vllm", "vllm", 1, measured(SIXTEEN, 200)),
        turn("quire", "quire", 2, measured(SIXTEEN, 200)),
        turn("vllm", "vllm", 2, measured(SIXTEEN, 100)),
        turn("quire", "quire", 3, measured(SIXTEEN, 500)),
    ]
    assert run_ratios(turns, "quire", "vllm", SIXTEEN) == [2.0, 2.0]
    assert run_ratios(turns, "quire", "vllm", EIGHT) == []


def found_goals(turns: list[Turn], *, level: CpuLevel = "avx512-bf16") -> dict[str, Verdict]:
    return {verdict.what: verdict for verdict in verdicts(turns, level=level)}


@pytest.mark.parametrize(
    ("workload", "level", "goal"),
    [
        (SIXTEEN, "avx2", 1.1),
        (SIXTEEN, "amx", 1.1),
        (EIGHT, "avx512", 1.3),
        (EIGHT, "amx", 2.5),
        (THIRTY_TWO, "amx", 1.3),
    ],
)
def test_the_goal_over_vllm_depends_on_workload_and_level(workload: Workload, level: CpuLevel, goal: float) -> None:
    turns = [
        turn("quire", "quire", 1, measured(workload, goal * 100)),
        turn("vllm", "vllm", 1, measured(workload, 100)),
    ]
    found = found_goals(turns, level=level)[f"{workload}: total tokens/s over vllm"]
    assert found.goal == goal and found.met
    turns[0] = turn("quire", "quire", 1, measured(workload, goal * 100 - 1))
    assert not found_goals(turns, level=level)[f"{workload}: total tokens/s over vllm"].met


def test_every_goal_is_compared_with_the_measurement() -> None:
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
        "256/64@16: total tokens/s with int8 over vllm": (1.8, True),
        "start to first token over vllm": (0.04, True),
        "start to first token over vllm-f32": (0.04, True),
    }


def test_goals_are_absent_without_peers() -> None:
    assert found_goals([turn("quire", "quire", 1, measured(SIXTEEN, 300))]) == {}


TINY = ModelSizes(hidden=10, layers=2, heads=2, kv_heads=1, head_dim=5, intermediate=20, vocabulary=100)
"""Two layers of 20 x 10, 10 x 10, 40 x 10 and 10 x 20 weights, which are 1,800, and 1,000 for logits."""


@pytest.mark.parametrize(
    ("flops", "rate", "prompts", "step"),
    [
        # Arithmetic: 2 * 4 * (256 * 1800 + 1000) and 80 for each of 4 * 256 * 257 / 2 pairs; the step has 4 rows.
        pytest.param(1e6, 1e12, 3.6944 + 10.52672, 0.0224 + 80 * 1030 / 1e6, id="arithmetic is slow"),
        # Bytes: 5,600 of weights; 40 for each of 4 * 257.5 tokens in the cache.
        pytest.param(1e12, 1e6, 0.0056, 0.0056 + 40 * 1030 / 1e6, id="memory is slow"),
    ],
)
def test_the_slower_of_arithmetic_and_reading_is_the_floor(
    flops: float, rate: float, prompts: float, step: float
) -> None:
    workload = Workload(input_tokens=256, output_tokens=3, concurrency=4)
    floor = floor_of(workload, TINY, Limits(flops=flops, read_rate=lambda total: rate))
    assert floor.prompt_seconds == pytest.approx(prompts)
    assert floor.decode_seconds == pytest.approx(2 * step)
    assert floor.total_tokens_per_second == pytest.approx(4 * 259 / (prompts + 2 * step))


def test_a_level_above_this_cpu_is_refused() -> None:
    highest = highest_level()
    for level in NAMES[: NAMES.index(highest) + 1]:
        check_level(level)
    for level in NAMES[NAMES.index(highest) + 1 :]:
        with pytest.raises(ValueError, match=f"this CPU reaches {highest}"):
            check_level(level)


def test_a_lower_level_limits_the_libraries_of_every_server() -> None:
    assert library_variables(highest_level()) == {}
    if highest_level() != "avx2":
        limited = library_variables("avx2")
        assert limited["ONEDNN_MAX_CPU_ISA"] == "AVX2" and limited["ATEN_CPU_CAPABILITY"] == "avx2"
        assert KERNELS_VARIABLE not in limited


@pytest.mark.parametrize(
    ("level", "features"),
    [
        ("avx2", "+avx2,+fma"),
        ("avx512", "+avx512f"),
        ("avx512-bf16", "+avx512f,+avx512bf16"),
        ("amx", "+avx512f,+amx-tile,+amx-bf16"),
    ],
)
def test_loop_of_each_level_uses_existing_instructions(level: CpuLevel, features: str) -> None:
    """LLVM assembles the loop for a CPU of the level, whether or not this machine has its instructions."""
    binding.initialize_native_asmparser()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(features=features)
    escaped = assembly(level).replace("\n", "\\0A")
    module = binding.parse_assembly(
        "define i64 @loop(i64 %count, i64 %shapes) {"
        f' %done = call i64 asm sideeffect "{escaped}", "=r,0,r"(i64 %count, i64 %shapes)'
        " ret i64 %done }"
    )
    module.triple = "x86_64-unknown-linux-gnu"
    assert len(target.emit_object(module)) > 100


@pytest.mark.parametrize("bytes_read", [1 << 16, 1 << 20])
def test_the_machines_rates_are_measured(bytes_read: int) -> None:
    assert arithmetic_flops("avx2", 1) > 0.0 and arithmetic_flops(highest_level(), 1) > 0.0
    assert read_bytes_per_second(bytes_read, 1) > 0.0


def test_sizes_follow_from_a_llamas_config() -> None:
    config = json.loads((Path(__file__).parents[2] / "benchmarks/models/smollm2-135m/config.json").read_text())
    sizes = sizes_of(config)
    assert sizes.linear_shapes() == [(960, 576), (576, 576), (3072, 576), (576, 1536)]
    assert sizes.kv_bytes_per_token == 23_040
    assert sizes.layer_weights == 106_168_320 and sizes.head_weights == 28_311_552


@pytest.mark.parametrize(
    ("reported", "flags"),
    [
        ("  --quantization {none,int8}\n     8 bits", ("--quantization", "int8")),
        ("  --weights {auto,int8,fp8}", ("--weights", "int8")),
        ("  --kv-cache-dtype {auto,int8}", ()),
        ("  --quantization {fp8}", ()),
        ("", ()),
    ],
)
def test_the_flag_for_int8_is_read_from_the_help(reported: str, flags: tuple[str, ...]) -> None:
    assert int8_flags(reported) == flags


def outcome(**changes: object) -> Answer:
    good = Answer(sent=0.0, end=1.0, chunks=[0.1, 0.11], prompt_tokens=256, output_tokens=64, requested_tokens=64)
    return dataclasses.replace(good, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"error": "HTTP 500: no"}, "1 of 2 requests failed: HTTP 500: no"),
        ({"output_tokens": 63}, "1 of 2 answers were shorter"),
        ({"prompt_tokens": 257}, "counted 513 prompt tokens where 512 were sent"),
    ],
)
def test_invalid_responses_fail_the_measurement(changes: dict[str, object], words: str) -> None:
    good = [outcome(), outcome()]
    check(summarise(good), SIXTEEN, 2)
    with pytest.raises(ServerError, match=words):
        check(summarise([outcome(), outcome(**changes)]), SIXTEEN, 2)


def test_figures_of_a_run_follow_the_definitions() -> None:
    """The time per output token leaves out the first one, and rates count from the first request to the last answer."""
    fast = outcome(sent=1.0, chunks=[1.5, 2.5, 3.5], end=4.0, output_tokens=5, requested_tokens=5)
    slow = outcome(sent=2.0, chunks=[5.0, 8.0], end=9.0, output_tokens=2, requested_tokens=3)
    found = summarise([fast, slow, outcome(sent=3.0, chunks=[], end=6.0, error="no")])
    assert (found.requests, found.errors, found.short) == (3, {"no": 1}, 1)
    assert (found.seconds, found.prompt_tokens, found.output_tokens) == (8.0, 512, 7)
    assert (found.ttft_p50, found.itl_p50, found.tpot_p50) == (1.75, 1.0, 1.75)
    assert measured_from(SIXTEEN, found).total_tokens_per_second == 519 / 8


STREAM = (
    b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n',
    b'data: {"choices": [{"text": "", "finish_reason": null}]}\n\n',
    b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n',
    b'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 2}}\n\n',
    b"data: [DONE]\n\n",
)


@pytest.mark.parametrize(
    ("status", "events", "error"),
    [
        (200, STREAM, None),
        (200, STREAM[:-1], "the stream ended without [DONE]"),
        (200, (STREAM[0], b'data: {"error": {"message": "died"}}\n\n'), "error in the stream: {'message': 'died'}"),
        (429, (b"queue is full",), "HTTP 429: queue is full"),
    ],
)
async def test_client_reads_streams_and_limits_what_it_sends(
    status: int, events: tuple[bytes, ...], error: str | None
) -> None:
    running, most = 0, 0

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running, body = running + 1, await request.json()
        most = max(most, running)
        assert (body["prompt"], body["max_tokens"], body["ignore_eos"]) == ([1, 2], 2, True)
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for event in events:  # in two parts, as a network may deliver them
            await response.write(event[:9])
            await asyncio.sleep(0)
            await response.write(event[9:])
        running -= 1
        return response

    application = web.Application()
    application.router.add_post("/v1/completions", complete)
    async with TestServer(application) as server:
        found = await run(str(server.make_url("/v1")), [Request(prompt=(1, 2), max_tokens=2)] * 6, concurrency=2)
    assert [answer.error for answer in found] == [error] * 6
    assert most == 2
    if error is None:
        assert {(len(a.chunks), a.prompt_tokens, a.output_tokens) for a in found} == {(2, 2, 2)}


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
    # The process that reaps orphans here may be slow, but a dead process has no memory.
    memory = Path(f"/proc/{pid}/statm")
    assert not memory.exists() or memory.read_text().split()[1] == "0"


def test_memory_counts_every_process_of_the_session() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as child:
        while (resident := session_rss_bytes(child.pid)) < 1 << 20:
            assert child.poll() is None
        child.communicate(b"\n")
    assert resident < 1 << 30 and session_rss_bytes(child.pid) == 0


def test_exited_server_is_reported_with_its_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(4)"]
    with running(command, dict(os.environ), tmp_path / "log") as tree:
        tree.wait(60)
        with pytest.raises(ServerError, match=r"(?s)ended with 4.*no such model"):
            tree.check()


def test_missing_command_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="/nowhere/server cannot be started"),
        running(["/nowhere/server"], {}, tmp_path / "log"),
    ):
        pass


def test_plot_shows_servers_and_batches(tmp_path: Path) -> None:
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


def test_machine_limits_are_printed_for_every_run() -> None:
    floor = {
        "workload": "256/64@16",
        "prompt_seconds": 3.0,
        "decode_seconds": 1.0,
        "total_tokens_per_second": 1280.0,
    }
    limit = {
        "cpu_level": "avx512-bf16",
        "arithmetic_flops": 6e11,
        "memory_bytes_per_second": 3e10,
        "floors": [floor],
    }
    lines = limit_lines([limit, limit])
    assert lines[0] == "machine, run 1: arithmetic at avx512-bf16 600 GFLOP/s; memory 30 GB/s"
    assert lines[1] == "  floor of 256/64@16: 1,280 tokens/s (prompts 75%, decoding 25%)"
    assert len(lines) == 4
