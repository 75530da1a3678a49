"""Keeps one local process alive: starts it, asks whether it is ready, restarts it when it ends, drains it when told.

Between ``processes`` (which ones there shall be) and ``local_process`` (one of them). Each change of phase is told to
``changed``.
"""

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import aiohttp

from quire_cli.local.process import ProcessIdentity, TetheredProcess, log_tail

LOOPBACK = "127.0.0.1"


class Phase(StrEnum):
    PENDING = "Pending"
    LOADING = "Loading"
    READY = "Ready"
    DRAINING = "Draining"
    FAILED = "Failed"
    """It ended by itself, and waits to be started again."""
    ENDED = "Ended"
    """For good, as it was told to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often and how long; tests hurry."""

    first_backoff_seconds: float = 1.0
    longest_backoff_seconds: float = 60.0
    forgive_after_seconds: float = 60.0
    """Ready for so long, a process starts again with the first backoff."""
    poll_loading_seconds: float = 0.1
    poll_ready_seconds: float = 1.0
    probe_timeout_seconds: float = 2.0
    deregister_seconds: float = 0.3
    """Between leaving the gateway's list and SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How to start a process, each time anew."""

    name: str
    command: Callable[[int], Sequence[str]]
    """The command line for a port."""
    ready_path: str
    log: Path
    kill_grace_seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside this process's own."""
    port: int | None = None
    """None takes a free one each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a kept process is now."""

    name: str
    phase: Phase
    url: str | None
    """Where it listens; None while it doesn't run."""
    stopping: bool
    identity: ProcessIdentity | None
    restarts: int
    reason: str | None
    """Why it ended the last time."""
    exit_code: int | None
    ever_ready: bool
    log: Path
    log_start: int
    """How many bytes of it are from earlier starts."""

    def last_words(self, lines: int) -> list[str]:
        """What it logged last, since it was started last."""
        return log_tail(self.log, lines=lines, since=self.log_start)


class KeptProcess:
    """One process and its life. ``run`` is its task; ``stop`` lets it drain, ``kill`` does not."""

    def __init__(
        self, launch: Launch, *, http: aiohttp.ClientSession, pace: Pace, changed: Callable[["KeptProcess"], None]
    ) -> None:
        self.launch, self._http, self._pace, self._changed = launch, http, pace, changed
        self.phase = Phase.PENDING
        self._url: str | None = None
        self._process: TetheredProcess | None = None
        self._identity: ProcessIdentity | None = None
        self._restarts = 0
        self._failures_in_row = 0
        self._reason: str | None = None
        self._exit_code: int | None = None
        self._ever_ready = False
        self._log_start = 0
        self._stop = asyncio.Event()
        self._killed = False

    @property
    def status(self) -> Status:
        return Status(
            name=self.launch.name,
            phase=self.phase,
            url=self._url,
            stopping=self.stopping,
            identity=self._identity,
            restarts=self._restarts,
            reason=self._reason,
            exit_code=self._exit_code,
            ever_ready=self._ever_ready,
            log=self.launch.log,
            log_start=self._log_start,
        )

    async def run(self) -> None:
        """Until ``stop`` or ``kill``, and until the process has ended after it."""
        try:
            while not self._stop.is_set():
                await self._live_once()
                if not self._stop.is_set():
                    await self._back_off()
        finally:
            self.kill()
            self.phase = Phase.ENDED

    @property
    def stopping(self) -> bool:
        """Told to end, or killed; it never comes back."""
        return self._stop.is_set()

    def stop(self) -> None:
        self._stop.set()

    def kill(self) -> None:
        """At once, without draining."""
        self._killed = True
        self._stop.set()
        if self._process is not None:
            self._process.kill()

    async def _live_once(self) -> None:
        port = self.launch.port or free_port()
        self._log_start = self.launch.log.stat().st_size if self.launch.log.exists() else 0
        self._process = await TetheredProcess.start(
            self.launch.command(port), log=self.launch.log, environment=self.launch.environment
        )
        self._url, self._identity = f"http://{LOOPBACK}:{port}", self._process.identity
        self._set(Phase.LOADING)
        ended = asyncio.create_task(self._process.wait())
        probing = asyncio.create_task(self._probe_for_ever(self._url))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((ended, probing, stopping), return_when=asyncio.FIRST_COMPLETED)
            probing.cancel()
            if not ended.done():
                await self._drain(self._process, ended)
            self._exit_code = await ended
        finally:
            for task in (probing, stopping):
                task.cancel()
            if not ended.done():
                self._process.kill()
                await ended
            self._process, self._url, self._identity = None, None, None

    async def _drain(self, process: TetheredProcess, ended: asyncio.Task[int]) -> None:
        serving = self.phase is Phase.READY
        self._set(Phase.DRAINING)
        if serving and not self._killed:
            await asyncio.wait((ended,), timeout=self._pace.deregister_seconds)
        process.terminate()
        await asyncio.wait((ended,), timeout=self.launch.kill_grace_seconds)
        if not ended.done():
            process.kill()

    async def _back_off(self) -> None:
        self._failures_in_row += 1
        self._restarts += 1
        self._reason = _reason(self._exit_code, self.status.last_words(1))
        self._set(Phase.FAILED)
        delay = self._pace.first_backoff_seconds * 2 ** min(self._failures_in_row - 1, 30)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), min(delay, self._pace.longest_backoff_seconds))

    async def _probe_for_ever(self, url: str) -> None:
        ready_since: float | None = None
        while True:
            ready = await self._is_ready(url)
            if ready:
                now = time.monotonic()
                ready_since = ready_since or now
                self._ever_ready = True
                if now - ready_since >= self._pace.forgive_after_seconds:
                    self._failures_in_row = 0
            else:
                ready_since = None
            self._set(Phase.READY if ready else Phase.LOADING)
            await asyncio.sleep(self._pace.poll_ready_seconds if ready else self._pace.poll_loading_seconds)

    async def _is_ready(self, url: str) -> bool:
        timeout = aiohttp.ClientTimeout(total=self._pace.probe_timeout_seconds)
        try:
            async with self._http.get(url + self.launch.ready_path, timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    def _set(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase = phase
            self._changed(self)


def how_it_ended(exit_code: int | None) -> str:
    """In words; a signal by its name, for a number below zero tells few people anything."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"killed by {name}"


def _reason(exit_code: int | None, words: Sequence[str]) -> str:
    """Of a crashed process the last line is mostly the reason; one that SIGKILL ended had no time to say one."""
    if exit_code == -signal.SIGKILL:
        return f"{how_it_ended(exit_code)}, as the system does where memory runs out"
    if not words:
        return f"it said nothing ({how_it_ended(exit_code)})"
    return words[0] if exit_code is None or exit_code >= 0 else f"{how_it_ended(exit_code)}; it last said: {words[0]}"


def free_port() -> int:
    """A port of the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
    return port
