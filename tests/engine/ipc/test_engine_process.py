"""A real engine process with the fake runner: it answers, is watched and replaced, and never stays behind."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import fake_runner
import pytest
from fake_runner import draw, next_digest
from process_ends import process_ends

from quire_engine import kept
from quire_engine.config import EngineProcessOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.cpu.choice import KIND, CpuChoice
from quire_engine.cpu.limits import KERNELS, Findings
from quire_engine.errors import EngineStartError, InvalidRequest, Unavailable
from quire_engine.ipc.client import EngineClient
from quire_engine.ipc.messages import Submit
from quire_engine.ipc.stream import Stream
from quire_engine.ipc.supervision import Supervisor

Started = Callable[..., Awaitable[EngineClient]]
MakeClient = Callable[..., EngineClient]
Reports = Any


def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def expected(prompt: list[int], count: int) -> list[int]:
    digest = 0
    for token_id in prompt:
        digest = next_digest(digest, token_id)
    answer: list[int] = []
    for _ in range(count):
        answer.append(draw(digest, 512))
        digest = next_digest(digest, answer[-1])
    return answer


async def parts_of(stream: Stream) -> list[list[int]]:
    """Return the tokens of each read."""
    parts = []
    while stream.finished is None:
        await stream.wait()
        parts.append(stream.read()[0])
    assert stream.finished.reason == "length"
    return parts


async def read_all(stream: Stream) -> list[int]:
    return sum(await parts_of(stream), [])


pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for processes by pidfd, which is Linux's")

# --- answers ---


async def test_tokens_arrive_step_by_step(started: Started, reports: Reports) -> None:
    client = await started(step_seconds=0.002)
    stream = client.submit([1, 2, 3], sampling(20))
    parts = await parts_of(stream)
    assert sum(parts, []) == expected([1, 2, 3], 20)
    assert len(parts) > 5
    assert stream.first_scheduled_time is not None
    await reports.until_idle()


async def test_two_hundred_concurrent_requests_get_their_own_tokens(started: Started, reports: Reports) -> None:
    client = await started(scheduler={"max_num_seqs": 64, "max_num_batched_tokens": 256})
    prompts = [[1 + number % 7] * (1 + number % 40) for number in range(200)]
    streams = [client.submit(prompt, sampling(5 + number % 30)) for number, prompt in enumerate(prompts)]
    answers = await asyncio.gather(*map(read_all, streams))
    assert answers == [expected(prompt, 5 + number % 30) for number, prompt in enumerate(prompts)]
    await reports.until_idle()
    assert not client.has_work()
    assert reports.stats[-1].counters.generation_tokens == sum(map(len, answers))
    assert reports.stats[-1].received_prompt_tokens == sum(reports.sent) > 0


async def test_request_without_a_seed_gets_its_own(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await started()
    sent: list[Submit] = []
    monkeypatch.setattr(Supervisor, "send", lambda self, message: sent.append(message))
    for seed in (None, None, 5):
        client.submit([1], SamplingParams(max_tokens=1, seed=seed))
    first, second, given = (message.request.seed for message in sent)
    assert given == 5 and len({first, second, given}) == 3
    monkeypatch.undo()


async def test_cancelled_stream_frees_its_blocks(started: Started, reports: Reports) -> None:
    client = await started(step_seconds=0.002)
    stream = client.submit([1] * 100, sampling(3000))
    await stream.wait()
    assert client.has_work()
    stream.cancel()
    assert not client.has_work()
    await reports.until_idle()
    assert reports.stats[-1].counters.generation_tokens < 3000


async def test_idle_reader_does_not_delay_other_requests(started: Started, reports: Reports) -> None:
    client = await started()
    idle_reader = client.submit([1], sampling(2000))
    assert await read_all(client.submit([2], sampling(50))) == expected([2], 50)
    await reports.until_idle()
    await idle_reader.wait()
    assert idle_reader.read()[0] == expected([1], 2000) and idle_reader.finished is not None


async def test_request_that_cannot_fit_is_an_invalid_request(started: Started) -> None:
    client = await started(max_model_len=100)
    with pytest.raises(InvalidRequest, match="at most 99"):
        await client.submit([1] * 100, sampling(1)).wait()
    assert await read_all(client.submit([1], sampling(2))) == expected([1], 2)


async def test_asynchronous_runner_is_driven_one_step_ahead(started: Started) -> None:
    client = await started(asynchronous=True, verify=True)
    answers = await asyncio.gather(*(read_all(client.submit([key], sampling(30))) for key in range(1, 9)))
    assert answers == [expected([key], 30) for key in range(1, 9)]


async def test_prefix_cache_can_be_reset(started: Started, reports: Reports) -> None:
    client = await started()
    hits = []
    for reset in (False, False, True):
        if reset:
            client.reset_prefix_cache()
        stream = client.submit([5] * 50, sampling(2))
        await read_all(stream)
        hits.append(stream.num_cached_tokens)
    assert hits == [0, 48, 0]


# --- faults ---


async def test_killed_engine_fails_running_requests_and_is_replaced(started: Started, reports: Reports) -> None:
    client = await started(step_seconds=0.005)
    streams = [client.submit([key], sampling(3000)) for key in range(1, 6)]
    for stream in streams:
        await stream.wait()
    assert client.ready is not None
    os.kill(client.ready.pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(Unavailable, match="SIGKILL") as raised:
            await read_all(stream)
        assert raised.value.retry_after_seconds is not None
    assert client.state == "restarting" and client.ready is None
    with pytest.raises(Unavailable, match="restarted"):
        client.submit([1], sampling(1))
    await reports.until(lambda reports: len(reports.ready) == 2)
    assert client.state == "ready" and client.restarts == 1
    assert await read_all(client.submit([9], sampling(3))) == expected([9], 3)


async def test_stopped_engine_is_detected_and_replaced(started: Started, reports: Reports) -> None:
    client = await started(step_seconds=0.005, supervision=EngineProcessOptions(hang_timeout_seconds=2.0))
    stream = client.submit([1], sampling(3000))
    await stream.wait()
    assert client.ready is not None
    hung = client.ready.pid
    os.kill(hung, signal.SIGSTOP)
    with pytest.raises(Unavailable, match="no step for 2 s"):
        await read_all(stream)
    await reports.until(lambda reports: len(reports.ready) == 2)
    assert process_ends(hung, 0)
    assert await read_all(client.submit([9], sampling(3))) == expected([9], 3)


@pytest.mark.parametrize(("expected_seconds", "killed"), [(2.0, False), (0.01, True)])
async def test_hang_limit_follows_the_expected_time_of_steps(
    started: Started, expected_seconds: float, killed: bool
) -> None:
    """Each step takes longer than the hang timeout, with or without costs that predict it."""
    client = await started(
        function="faulty_models:load_slow",
        step_seconds=2.0,
        expected_seconds=expected_seconds,
        supervision=EngineProcessOptions(hang_timeout_seconds=0.8),
    )
    stream = client.submit([9], sampling(2))
    if killed:
        with pytest.raises(Unavailable, match="no step"):
            await read_all(stream)
    else:
        assert await read_all(stream) == expected([9], 2)
    assert client.restarts == int(killed)


async def test_idle_engine_is_not_treated_as_hung(started: Started, reports: Reports) -> None:
    client = await started(supervision=EngineProcessOptions(hang_timeout_seconds=3.0))
    await reports.until(lambda reports: len(reports.stats) >= 5)  # answers to pings: the engine is idle
    assert client.state == "ready" and client.restarts == 0


async def test_stopped_idle_engine_is_detected_before_its_next_use(
    started: Started, reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    client = await started(supervision=EngineProcessOptions(hang_timeout_seconds=2.0))
    assert client.ready is not None
    hung = client.ready.pid
    os.kill(hung, signal.SIGSTOP)
    await reports.until(lambda reports: len(reports.ready) == 2)
    assert process_ends(hung, 0) and "gave no answer for 2 s" in caplog.text
    assert await read_all(client.submit([9], sampling(3))) == expected([9], 3)


async def test_replacement_that_is_not_ready_in_time_fails_the_engine(
    make_client: MakeClient, tmp_path: Path, reports: Reports
) -> None:
    first = str(tmp_path / "first")
    client = make_client(function="faulty_models:load_once", once=first, observer=reports)
    await client.start()
    assert client.ready is not None
    client._supervisor._options = EngineProcessOptions(start_timeout_seconds=2.0)  # not for the first start
    os.kill(client.ready.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while client.state != "failed":
            await asyncio.sleep(0.02)
    assert client.failure == "the engine process did not get ready within 2 s"


@pytest.fixture
def at_amx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CpuChoice:
    """Return a CPU whose self-test succeeded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return CpuChoice(KERNELS[-1][2], Findings(facts=("a machine",)), option="auto", environment={})


async def test_engine_killed_by_sigill_starts_at_lower_levels(
    make_client: MakeClient, at_amx: CpuChoice, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(function="faulty_models:load_refused", works_at="avx512", cpu=at_amx)
    await client.start()
    assert await read_all(client.submit([1], sampling(5))) == expected([1], 5)
    assert client.restarts == 0
    assert client.cpu is not None and client.cpu.level == "avx512"
    findings = kept.read(KIND, ("a machine",), Findings)
    assert findings is not None and list(findings.failed) == ["amx", "avx512-bf16"]
    lowered = [record.args for record in caplog.records if record.levelname == "WARNING"]
    assert [args[1] for args in lowered if isinstance(args, tuple)] == ["avx512-bf16", "avx512"]


async def test_engine_killed_by_sigill_at_every_level_fails(make_client: MakeClient, at_amx: CpuChoice) -> None:
    client = make_client(function="faulty_models:load_refused", works_at="none", cpu=at_amx)
    with pytest.raises(EngineStartError, match="SIGILL"):
        await client.start()
    assert client.cpu is not None and client.cpu.level == "avx2"


async def test_engine_killed_by_sigill_restarts_at_a_lower_level(
    make_client: MakeClient, at_amx: CpuChoice, reports: Reports
) -> None:
    client = make_client(cpu=at_amx, observer=reports)
    os.kill((await client.start()).pid, signal.SIGILL)
    await reports.until(lambda reports: len(reports.ready) == 2)
    assert client.restarts == 1
    assert client.cpu is not None and client.cpu.level == "avx512-bf16"


async def test_failed_step_is_reported_in_one_line(started: Started, capfd: pytest.CaptureFixture[str]) -> None:
    client = await started(function="faulty_models:load_failing_later")
    with pytest.raises(Unavailable, match="failed while running a step: RuntimeError: the third step was too much"):
        await read_all(client.submit([1], sampling(10)))
    assert "Traceback" in capfd.readouterr().err  # a bug of ours: the log has the traceback


async def test_engine_that_crashes_repeatedly_is_not_restarted(make_client: MakeClient, reports: Reports) -> None:
    supervision = EngineProcessOptions(restart_delays_seconds=(0.0,))
    client = make_client(function="faulty_models:load_failing_later", observer=reports, supervision=supervision)
    await client.start()
    for life in (1, 2):
        await reports.until(lambda reports, life=life: len(reports.ready) == life)
        with pytest.raises(Unavailable):
            await read_all(client.submit([1], sampling(10)))
    assert client.state == "failed"
    assert client.failure is not None and "restarted 1 times" in client.failure
    assert reports.lost == 2
    with pytest.raises(Unavailable, match="has failed"):
        client.submit([1], sampling(1))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signal_to_the_group_leaves_draining_to_the_api_process(started: Started, number: signal.Signals) -> None:
    client = await started(step_seconds=0.001)
    stream = client.submit([1], sampling(100))
    await stream.wait()
    begun = stream.read()[0]
    assert client.ready is not None
    os.kill(client.ready.pid, number)
    assert begun + await read_all(stream) == expected([1], 100)
    assert client.restarts == 0


# --- starting ---


@pytest.mark.parametrize(
    ("function", "message", "exit_code", "traceback"),
    [
        pytest.param("load_missing", r"^no model folder at /nowhere/model$", 2, False, id="the user's mistake"),
        pytest.param("load_broken", "while loading the model: RuntimeError: wires crossed", 1, True, id="our bug"),
        pytest.param("load_vanishing", "exit status 3", 1, False, id="no last words"),
    ],
)
async def test_engine_start_error_has_reason_and_exit_code(
    make_client: MakeClient,
    capfd: pytest.CaptureFixture[str],
    function: str,
    message: str,
    exit_code: int,
    traceback: bool,
) -> None:
    client = make_client(function=f"faulty_models:{function}")
    with pytest.raises(EngineStartError, match=message) as caught:
        await client.start()
    assert caught.value.exit_code == exit_code
    assert client.state == "failed"
    assert ("Traceback" in capfd.readouterr().err) == traceback


async def test_unusable_socket_folder_is_named_in_the_error(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    client = make_client()
    with pytest.raises(EngineStartError, match="cannot be started: cannot create a socket in .*TMPDIR"):
        await client.start()
    assert list(deep.iterdir()) == []


async def test_engine_start_times_out(make_client: MakeClient) -> None:
    client = make_client(
        function="faulty_models:load_forever", supervision=EngineProcessOptions(start_timeout_seconds=1.0)
    )
    with pytest.raises(EngineStartError, match="not get ready within 1 s"):
        await client.start()


async def test_close_during_start_aborts_the_start(make_client: MakeClient) -> None:
    client = make_client(function="faulty_models:load_forever")
    starting = asyncio.create_task(client.start())
    await asyncio.sleep(0.1)
    with pytest.raises(Unavailable, match="starting"):
        client.submit([1], sampling(1))
    await client.close()
    with pytest.raises(EngineStartError, match="stopped before"):
        await starting
    assert client.state == "stopped"


# --- ending ---


async def test_close_ends_the_process_and_running_requests(started: Started) -> None:
    client = await started(step_seconds=0.005)
    stream = client.submit([1], sampling(3000))
    await stream.wait()
    assert client.ready is not None
    pid = client.ready.pid
    await client.close()
    assert process_ends(pid, 0)
    with pytest.raises(Unavailable, match="stopping"):
        await read_all(stream)


PARENT = """
import asyncio
from pathlib import Path
from quire_engine.config import CacheOptions, EngineConfig, ModelOptions, ServerOptions
from quire_engine.core.options import SchedulerOptions
from quire_engine.ipc.client import EngineClient
from quire_engine.ipc.messages import RunnerFactory

async def main():
    config = EngineConfig(model=ModelOptions(path=Path("m")), cache=CacheOptions(), scheduler=SchedulerOptions(),
                          server=ServerOptions(), threads=1)
    client = EngineClient(config, factory=RunnerFactory(function="fake_runner:load_fake_model"))
    print((await client.start()).pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_engine_process_ends_with_a_killed_parent(stopped: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(fake_runner.__file__).parent)}
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine = int(parent.stdout.readline())
        if stopped:
            os.kill(engine, signal.SIGSTOP)
        parent.kill()
        assert process_ends(engine, 10)


def test_engine_module_run_by_hand_prints_a_usage_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire_engine.ipc.loop"], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "quire-engine" in done.stderr and "Traceback" not in done.stderr
