"""A supervised process: it becomes ready, restarts when it ends, drains on request, and leaves nothing behind."""

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from quire_local.harness import FAKE_ENGINE, HURRY, Watch, is_alive, until_dead

from quire_cli.local.process import KeptProcess, Launch, Phase, Status, WatchedProcess, log_tail, phase_message


class Kept:
    """A supervised fake engine, its task and its changes."""

    def __init__(self, process: KeptProcess, task: asyncio.Task[None], watch: Watch, phases: list[Phase]) -> None:
        self.process, self.task, self.watch, self.phases = process, task, watch, phases

    async def until(self, phase: Phase) -> None:
        await self.watch.until(lambda: self.process.status.phase is phase)

    async def crash(self) -> None:
        with pytest.raises(aiohttp.ClientError):
            async with aiohttp.ClientSession() as http:
                await http.post(f"{self.process.status.url}/crash")


@asynccontextmanager
async def kept(
    folder: Path,
    *,
    command: Sequence[str] = FAKE_ENGINE,
    grace: float = 10.0,
    **environment: str,
) -> AsyncIterator[Kept]:
    watch, phases = Watch(), list[Phase]()

    def changed(process: KeptProcess) -> None:
        phases.append(process.status.phase)
        watch()

    launch = Launch(
        name="chat-0",
        command=lambda port: [*command, "--port", str(port)],
        ready_path="/readyz",
        log=folder / "chat-0.log",
        kill_grace_seconds=grace,
        environment=environment,
    )
    process = KeptProcess(launch, pace=HURRY, changed=changed)
    task = asyncio.create_task(process.run())
    try:
        yield Kept(process, task, watch, phases)
    finally:
        process.kill()
        await asyncio.wait_for(task, 60)


async def test_process_phases_are_loading_ready_draining(tmp_path: Path) -> None:
    async with kept(tmp_path, FAKE_LOAD_SECONDS="0.1") as it:
        await it.until(Phase.READY)
        assert it.process.status.url is not None and it.process.status.ever_ready
        it.process.stop()
        await it.task
        assert it.phases == [Phase.LOADING, Phase.READY, Phase.DRAINING]
        assert (it.process.status.exit_code, it.process.status.restarts) == (0, 0)


async def test_ended_process_is_restarted_and_its_last_lines_kept(tmp_path: Path) -> None:
    async with kept(tmp_path) as it:
        await it.until(Phase.READY)
        first = it.process.status.pid
        await it.crash()
        await it.until(Phase.FAILED)
        status = it.process.status
        assert (status.exit_code, status.reason, status.restarts) == (3, "CUDA error: out of cookies", 1)
        await it.until(Phase.READY)
        assert it.process.status.pid != first


@pytest.mark.parametrize(
    ("phase", "before", "message"),
    [
        (Phase.LOADING, None, "chat-0 is loading"),
        (Phase.LOADING, Phase.FAILED, "chat-0 is loading"),
        (Phase.LOADING, Phase.READY, "chat-0 is loading again; its log ends with: lost another rank"),
        (Phase.READY, Phase.LOADING, "chat-0 is ready"),
        (Phase.FAILED, Phase.READY, "chat-0 ended with exit code 3 and is restarted: out of cookies"),
        (Phase.ENDED, Phase.DRAINING, "chat-0 has ended"),
    ],
)
def test_engine_that_loads_again_shows_why(tmp_path: Path, phase: Phase, before: Phase | None, message: str) -> None:
    log = tmp_path / "chat-0.log"
    log.write_text("ready\nlost another rank\n")
    status = Status(name="chat-0", log=log, phase=phase, reason="out of cookies", exit_code=3)
    assert phase_message(status, before) == message


@pytest.mark.parametrize(
    ("phase", "failures_in_row", "starts"),
    [
        (Phase.LOADING, 0, True),
        (Phase.LOADING, 1, True),
        (Phase.LOADING, 2, False),
        (Phase.FAILED, 1, False),
        (Phase.READY, 0, False),
    ],
)
def test_loading_counts_as_a_start_until_it_fails_repeatedly(phase: Phase, failures_in_row: int, starts: bool) -> None:
    status = Status(name="chat-0", log=Path("log"), phase=phase, failures_in_row=failures_in_row)
    assert status.starts is starts


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "killed by SIGKILL, probably because memory ran out"),
        (signal.SIGABRT, "killed by SIGABRT; last output: the weights are in"),
    ],
)
async def test_process_ended_by_a_signal_is_not_blamed_on_its_last_line(
    tmp_path: Path, number: signal.Signals, reason: str
) -> None:
    async with kept(tmp_path) as it:
        await it.until(Phase.READY)
        with (tmp_path / "chat-0.log").open("a") as log:
            log.write("the weights are in\n")
        pid = it.process.status.pid
        assert pid is not None
        os.kill(pid, number)
        await it.until(Phase.FAILED)
        assert (it.process.status.exit_code, it.process.status.reason) == (-number, reason)


async def test_process_that_never_gets_ready_is_restarted(tmp_path: Path) -> None:
    async with kept(tmp_path, FAKE_EXIT="2") as it:
        await it.watch.until(lambda: it.process.status.restarts >= 3)
        status = it.process.status
        assert not status.ever_ready
        assert (status.exit_code, status.reason) == (2, "the model folder holds no tokenizer")


async def test_missing_program_is_reported(tmp_path: Path) -> None:
    async with kept(tmp_path, command=["/nowhere/engine"]) as it:
        await it.until(Phase.FAILED)
        assert it.process.status.reason == "/nowhere/engine: No such file or directory"


async def test_process_that_cannot_be_forked_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, errors = WatchedProcess.start, [OSError(errno.EAGAIN, "too many processes")]

    async def limited(*args: Any, **options: Any) -> WatchedProcess:
        if errors:
            raise errors.pop()
        return await start(*args, **options)

    monkeypatch.setattr(WatchedProcess, "start", limited)
    async with kept(tmp_path) as it:
        await it.until(Phase.READY)
        assert it.phases == [Phase.FAILED, Phase.LOADING, Phase.READY]
        status = it.process.status
        assert (status.exit_code, status.reason, status.restarts) == (None, "too many processes", 1)
        assert phase_message(replace(status, phase=Phase.FAILED), None).endswith("tried again: too many processes")


async def test_drain_is_limited_by_its_grace_period(tmp_path: Path) -> None:
    async with kept(tmp_path, FAKE_DRAIN_SECONDS="0.3") as it:
        await it.until(Phase.READY)
        it.process.stop()
        await it.task
        assert it.process.status.exit_code == 0
    async with kept(tmp_path, grace=0.2, FAKE_DRAIN_SECONDS="never") as it:
        await it.until(Phase.READY)
        it.process.stop()
        await it.task
        assert it.process.status.exit_code == -signal.SIGKILL


async def test_loading_process_can_be_stopped(tmp_path: Path) -> None:
    async with kept(tmp_path, FAKE_LOAD_SECONDS="600") as it:
        await it.until(Phase.LOADING)
        it.process.stop()
        await it.task
    assert Phase.READY not in it.phases


@pytest.mark.parametrize("end", ["crash", "stop", "kill"])
async def test_child_processes_end_with_their_parent(tmp_path: Path, end: str) -> None:
    children = tmp_path / "children"
    async with kept(tmp_path, FAKE_CHILD=str(children)) as it:
        await it.until(Phase.READY)
        child = int(children.read_text().split()[0])
        assert is_alive(child)
        if end == "crash":
            await it.crash()
        elif end == "stop":
            it.process.stop()
        else:
            it.process.kill()
        await until_dead([child])


async def test_pipe_watcher_works_like_the_kernel_watcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PR_SET_PDEATHSIG, signals are passed on, and the end of the pipe ends the command."""
    monkeypatch.setattr("quire_cli.local.process._WATCH_BY", "pipe")
    log = tmp_path / "log"
    script = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
    command = [FAKE_ENGINE[0], "-c", script]

    async def started() -> tuple[WatchedProcess, int]:
        log.unlink(missing_ok=True)
        process = await WatchedProcess.start(command, log=log, environment={})
        async with asyncio.timeout(60):
            while not log_tail(log, lines=1):
                await asyncio.sleep(0.01)
        return process, int(log_tail(log, lines=1)[0])

    process, pid = await started()
    process.terminate()
    assert await process.wait() == 128 + signal.SIGTERM
    assert not is_alive(pid)
    process, pid = await started()
    pipe = process._process.stdin
    assert pipe is not None
    # The end of this process would close it too.
    pipe.close()
    await until_dead([pid])
    await process.wait()
