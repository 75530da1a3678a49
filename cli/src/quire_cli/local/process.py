"""Local processes that must not outlive this one: started, probed, restarted when they end, drained on request.

A ``WatchedProcess`` has a parent-death watcher, a session of its own and a log file. A ``KeptProcess`` keeps one alive
and reports each change of its phase to ``changed``; ``replicas`` has the processes that should run.
"""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from quire_cli.local import parent_watcher

LOOPBACK = "127.0.0.1"
_TAIL_BYTES = 8192
_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|.)")
_WATCH_BY = "kernel" if sys.platform == "linux" else "pipe"


async def start_watched(command: Sequence[str], **options: Any) -> asyncio.subprocess.Process:
    """Start ``command`` in a session of its own, so that it ends when this process does."""
    # -I -S: the watcher needs neither site-packages nor the user's environment, and starts in 10 ms without them.
    watched = [sys.executable, "-I", "-S", parent_watcher.__file__, str(os.getpid()), _WATCH_BY, *command]
    stdin = subprocess.PIPE if _WATCH_BY == "pipe" else subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(*watched, stdin=stdin, start_new_session=True, **options)


async def watched_output(command: Sequence[str]) -> bytes:
    """Return the standard output of ``command``, which ends with its session if this is cancelled.

    Raises ``OSError``, or ``CalledProcessError`` if it fails.
    """
    started = await start_watched(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    process = WatchedProcess(started)
    try:
        output, _ = await started.communicate()
    finally:
        process.kill()
        code = await process.wait()
    if code:
        raise subprocess.CalledProcessError(code, list(command))
    return output


class WatchedProcess:
    """A running command. It leads a session, so that the processes it starts can be found and ended with it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> "WatchedProcess":
        """Start ``command``, append its output to ``log``, and add ``environment`` to this process's own."""
        with log.open("ab") as output:
            process = await start_watched(
                command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
            )
        return cls(process)

    async def wait(self) -> int:
        """Return the exit code once it has ended, negative for a signal; kill the rest of its session."""
        code = await self._process.wait()
        self._signal_session(signal.SIGKILL)
        return code

    def terminate(self) -> None:
        """Ask the command to end; it handles the processes that it started."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        self._signal_session(signal.SIGKILL)

    def _signal_session(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def log_tail(log: Path, *, lines: int, since: int = 0) -> list[str]:
    """Return the last lines that are not blank, after the first ``since`` bytes."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = _ESCAPE.sub("", file.read().decode("utf-8", errors="replace"))
    except FileNotFoundError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def free_port() -> int:
    """Return a port of the loopback address that is free now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
    return port


class Phase(StrEnum):
    PENDING = "Pending"
    LOADING = "Loading"
    READY = "Ready"
    DRAINING = "Draining"
    FAILED = "Failed"
    """It ended by itself and waits for its restart."""
    ENDED = "Ended"
    """It ended on request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The timing of supervision; tests use shorter times."""

    first_backoff_seconds: float = 1.0
    longest_backoff_seconds: float = 60.0
    forgive_after_seconds: float = 60.0
    """The time after which a ready process is restarted with the first backoff again."""
    poll_loading_seconds: float = 0.1
    poll_ready_seconds: float = 1.0
    probe_timeout_seconds: float = 2.0
    deregister_seconds: float = 0.3
    """The time between the removal from the endpoints file and SIGTERM."""
    report_loading_seconds: float = 30.0
    """The time between two reports of processes that are still loading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    name: str
    command: Callable[[int], Sequence[str]]
    """The command line for a port."""
    ready_path: str
    log: Path
    kill_grace_seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to this process's own."""
    port: int | None = None
    """None: a free port at each start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of a supervised process."""

    name: str
    log: Path
    log_start: int = 0
    """The bytes of the log that earlier starts wrote."""
    phase: Phase = Phase.PENDING
    url: str | None = None
    """Its address; None while it does not run."""
    stopping: bool = False
    """True after ``stop`` or ``kill``: it is not restarted."""
    pid: int | None = None
    restarts: int = 0
    reason: str | None = None
    """The reason why it last ended."""
    failures_in_row: int = 0
    """The times that it ended by itself since it was last ready for a while."""
    exit_code: int | None = None
    """None before the first end, and after a start that failed."""
    ever_ready: bool = False

    @property
    def starts(self) -> bool:
        """True while it loads, unless it ends again and again."""
        return self.phase is Phase.LOADING and self.failures_in_row <= 1

    def last_lines(self, lines: int) -> list[str]:
        """Return its last log lines since its last start."""
        return log_tail(self.log, lines=lines, since=self.log_start)


class KeptProcess:
    """A supervised process. ``run`` is its task; ``stop`` drains it, ``kill`` does not."""

    def __init__(self, launch: Launch, *, pace: Pace, changed: Callable[["KeptProcess"], None]) -> None:
        self.launch, self._pace, self._changed = launch, pace, changed
        self.status = Status(name=launch.name, log=launch.log)
        self._process: WatchedProcess | None = None
        self._start_problem: str | None = None
        """The error of the system that prevented the last start; None if the process started."""
        self._stop = asyncio.Event()
        self._killed = False

    async def run(self) -> None:
        """Run until ``stop`` or ``kill``, and until the process has ended."""
        try:
            while not self._stop.is_set():
                await self._live_once()
                if not self._stop.is_set():
                    await self._back_off()
        finally:
            self.kill()
            self.status = replace(self.status, phase=Phase.ENDED)

    def stop(self) -> None:
        """Drain the process and end."""
        self.status = replace(self.status, stopping=True)
        self._stop.set()

    def kill(self) -> None:
        self._killed = True
        self.stop()
        if self._process is not None:
            self._process.kill()

    async def _live_once(self) -> None:
        log = self.launch.log
        self.status = replace(self.status, log_start=log.stat().st_size if log.exists() else 0)
        try:
            port = self.launch.port or free_port()
            self._process = await WatchedProcess.start(
                self.launch.command(port), log=log, environment=self.launch.environment
            )
        except OSError as error:
            # The system lacks processes, files or space for now: what runs goes on, and this one is tried again.
            self._start_problem = error.strerror or str(error)
            self.status = replace(self.status, exit_code=None)
            self._enter(Phase.PENDING)
            return
        self._start_problem = None
        url = f"http://{LOOPBACK}:{port}"
        self.status = replace(self.status, url=url, pid=self._process.pid)
        self._enter(Phase.LOADING)
        ended = asyncio.create_task(self._process.wait())
        probing = asyncio.create_task(self._probe_forever(port))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((ended, probing, stopping), return_when=asyncio.FIRST_COMPLETED)
            probing.cancel()
            if not ended.done():
                await self._drain(self._process, ended)
            exit_code = await ended  # meanwhile the status may change
            self.status = replace(self.status, exit_code=exit_code)
        finally:
            for task in (probing, stopping):
                task.cancel()
            if not ended.done():
                self._process.kill()
                await ended
            self._process = None
            self.status = replace(self.status, url=None, pid=None)

    async def _drain(self, process: WatchedProcess, ended: asyncio.Task[int]) -> None:
        serving = self.status.phase is Phase.READY
        self._enter(Phase.DRAINING)
        if serving and not self._killed:
            await asyncio.wait((ended,), timeout=self._pace.deregister_seconds)
        process.terminate()
        await asyncio.wait((ended,), timeout=self.launch.kill_grace_seconds)
        if not ended.done():
            process.kill()

    async def _back_off(self) -> None:
        status = self.status
        self.status = replace(
            status,
            failures_in_row=status.failures_in_row + 1,
            restarts=status.restarts + 1,
            reason=self._start_problem or _reason(status.exit_code, status.last_lines(1)),
        )
        self._enter(Phase.FAILED)
        delay = self._pace.first_backoff_seconds * 2 ** min(status.failures_in_row, 30)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), min(delay, self._pace.longest_backoff_seconds))

    async def _probe_forever(self, port: int) -> None:
        ready_since: float | None = None
        while True:
            ready = await self._is_ready(port)
            if ready:
                now = time.monotonic()
                ready_since = ready_since or now
                self.status = replace(self.status, ever_ready=True)
                if now - ready_since >= self._pace.forgive_after_seconds:
                    self.status = replace(self.status, failures_in_row=0)
            else:
                ready_since = None
            self._enter(Phase.READY if ready else Phase.LOADING)
            await asyncio.sleep(self._pace.poll_ready_seconds if ready else self._pace.poll_loading_seconds)

    async def _is_ready(self, port: int) -> bool:
        try:
            async with asyncio.timeout(self._pace.probe_timeout_seconds):
                reader, writer = await asyncio.open_connection(LOOPBACK, port)
                try:
                    request = f"GET {self.launch.ready_path} HTTP/1.1\r\nHost: {LOOPBACK}\r\nConnection: close\r\n\r\n"
                    writer.write(request.encode())
                    return (await reader.readline()).split()[1:2] == [b"200"]
                finally:
                    writer.close()
        except (TimeoutError, OSError, ValueError):  # the last for a line without an end
            return False

    def _enter(self, phase: Phase) -> None:
        if phase is not self.status.phase:
            self.status = replace(self.status, phase=phase)
            self._changed(self)


def phase_message(status: Status, before: Phase | None) -> str:
    """Return a change of phase as text.

    A process that was ready and loads again, as an engine does whose engine process or rank has ended, has written the
    reason into its log.
    """
    match status.phase:
        case Phase.FAILED if status.exit_code is None:
            return f"{status.name} could not be started and is tried again: {status.reason}"
        case Phase.FAILED:
            return f"{status.name} ended with exit code {status.exit_code} and is restarted: {status.reason}"
        case Phase.ENDED:
            return f"{status.name} has ended"
        case Phase.LOADING if before is Phase.READY and (words := status.last_lines(1)):
            return f"{status.name} is loading again; its log ends with: {words[0]}"
    return f"{status.name} is {status.phase.value.lower()}"


def how_it_ended(exit_code: int | None) -> str:
    """Return the exit code, or the name of the signal, as text."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"killed by {name}"


def _reason(exit_code: int | None, words: Sequence[str]) -> str:
    """Return the reason for an exit: mostly the last log line."""
    if exit_code == -signal.SIGKILL:
        return f"{how_it_ended(exit_code)}, probably because memory ran out"
    if not words:
        return f"no output ({how_it_ended(exit_code)})"
    return words[0] if exit_code is None or exit_code >= 0 else f"{how_it_ended(exit_code)}; last output: {words[0]}"
