"""One local process that must not outlive us: started on a tether, in a session of its own, logging to a file.

Under ``local_supervision``, which decides when to start and stop it. Knows nothing of engines.
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

from quire_cli.local import tether

_HAS_PROC = Path("/proc/self/stat").exists()
_TAIL_BYTES = 8192
_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|.)")
_STAT_SESSION = 3
_STAT_START_TIME = 19
"""Fields of /proc/PID/stat, counted from the one after the command's closing bracket."""


_TETHER = "kernel" if sys.platform == "linux" else "pipe"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """Tells a process from a later one with the same number."""

    pid: int
    started: str
    """Start time as the system tells it, of this boot."""


async def start_tethered(command: Sequence[str], **options: Any) -> asyncio.subprocess.Process:
    """Start ``command`` in a session of its own, so that it ends when this process does."""
    # -I -S: neither site-packages nor the user's environment are of use to the tether, and it starts in 10 ms.
    tied = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), _TETHER, *command]
    stdin = subprocess.PIPE if _TETHER == "pipe" else subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(*tied, stdin=stdin, start_new_session=True, **options)


class TetheredProcess:
    """A running command. It leads a session, so that what it starts itself can be found and ended with it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> "TetheredProcess":
        """Start ``command`` with its output appended to ``log``, and ``environment`` added to ours."""
        with log.open("ab") as output:
            process = await start_tethered(
                command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
            )
        return cls(process)

    @property
    def identity(self) -> ProcessIdentity | None:
        """None once it has ended."""
        return identify(self.pid)

    async def wait(self) -> int:
        """Its exit code, once it and what it started have ended; a signal's number below zero."""
        code = await self._process.wait()
        self._signal_session(signal.SIGKILL)
        return code

    def close_tether(self) -> None:
        """What our own end would do to it, where the tether is a pipe."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def terminate(self) -> None:
        """Ask the command itself to end; what it started is its own affair."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        self._signal_session(signal.SIGKILL)

    def _signal_session(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def log_tail(log: Path, *, lines: int, since: int = 0) -> list[str]:
    """The last lines that say something, of those written after the first ``since`` bytes."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = _ESCAPE.sub("", file.read().decode("utf-8", errors="replace"))
    except FileNotFoundError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def identify(pid: int) -> ProcessIdentity | None:
    """Who has this number now; None if nobody does."""
    if _HAS_PROC:
        stat = _stat(pid)
        return None if stat is None else ProcessIdentity(pid=pid, started=stat[_STAT_START_TIME])
    found = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    started = found.stdout.strip()
    return ProcessIdentity(pid=pid, started=started) if started else None


def own_identity() -> ProcessIdentity:
    """Of this process."""
    return identify(os.getpid()) or ProcessIdentity(pid=os.getpid(), started="")


def session_members(leader: ProcessIdentity) -> list[ProcessIdentity]:
    """Live processes of the session that ``leader`` led, whether it lives or not. Empty where /proc is not Linux's.

    The number of a session is not given to another process while it has members; so members are ours unless the
    number has a new owner with another start time.
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
    """Fields of /proc/PID/stat after the command, which may hold anything; None for the dead and for zombies."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else fields
