"""A local process that must not outlive this one: it has a parent-death watcher, its own session and a log file.

Under ``supervision``, which decides when to start and stop it.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_cli.local import parent_watcher

_HAS_PROC = Path("/proc/self/stat").exists()
_TAIL_BYTES = 8192
_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|.)")
_STAT_SESSION = 3
_STAT_START_TIME = 19
"""Fields of /proc/PID/stat, counted from the one after the command's closing bracket."""


_WATCH_BY = "kernel" if sys.platform == "linux" else "pipe"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """The identity of a process, which a later process with the same number does not share."""

    pid: int
    started: str
    """The start time that the system reports, within this boot."""


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

    @property
    def identity(self) -> ProcessIdentity | None:
        """The identity; None once it has ended."""
        return identify(self.pid)

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


def identify(pid: int) -> ProcessIdentity | None:
    """Return the process that has this number now, or None."""
    if _HAS_PROC:
        stat = _stat(pid)
        return None if stat is None else ProcessIdentity(pid=pid, started=stat[_STAT_START_TIME])
    found = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    started = found.stdout.strip()
    return ProcessIdentity(pid=pid, started=started) if started else None


def own_identity() -> ProcessIdentity:
    """Return the identity of this process."""
    return identify(os.getpid()) or ProcessIdentity(pid=os.getpid(), started="")


def session_members(leader: ProcessIdentity) -> list[ProcessIdentity]:
    """Return the live processes of the session that ``leader`` led. Empty on systems other than Linux.

    The number of a session is not reused while it has members. So the members are ours unless the number has a new
    owner with another start time.
    """
    now = identify(leader.pid)
    if now is not None and now != leader:
        return []
    members: list[ProcessIdentity] = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        stat = _stat(pid)
        if stat is None or stat[_STAT_SESSION] != str(leader.pid):
            continue
        if int(stat[_STAT_START_TIME]) >= int(leader.started):
            members.append(ProcessIdentity(pid=pid, started=stat[_STAT_START_TIME]))
    return members


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the command, which may contain anything; None for dead processes."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else fields
