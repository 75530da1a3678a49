"""The evaluation of a comparison: requests, figures of streams, medians, ratios of neighbouring runs."""

import asyncio
import dataclasses
import sys
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.serving.comparison.client import (
    Answer,
    Request,
    Workload,
    parse_workload,
    requests_of,
    run,
    summarise,
)
from benchmarks.serving.comparison.process_tree import ServerError, running
from benchmarks.serving.comparison.results import Family, Measured, Turn, rows, run_ratios
from benchmarks.serving.comparison.turns import check, measured_from

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
