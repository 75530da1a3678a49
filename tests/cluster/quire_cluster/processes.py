"""Processes of the cluster by name: start, kill, pause, and find those of an earlier run.

The file `NAME.pid` in the state folder identifies a process by its id and start time, so an id that was reused is never
signalled. This module does not know what the processes do.
"""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from quire_cluster.errors import ComponentFailed
from quire_cluster.guard import POLL_SECONDS, Identity, birth_of, read_identity

LOG_TAIL_BYTES: Final = 2000
GUARD: Final = Path(__file__).parent / "guard.py"


class Process:
    """A program with its log in a state folder. `command` is called at each start."""

    def __init__(self, name: str, command: Callable[[], list[str]], state: Path) -> None:
        self.name = name
        self.log_path = state / f"{name}.log"
        self._command = command
        self._state = state
        self._pid_path = state / f"{name}.pid"
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id, or None if it does not run."""
        identity = self._identity()
        return None if identity is None else identity.pid

    def start(self) -> None:
        """Start in a new session, so that Ctrl-C reaches only the test run, which then stops it in order."""
        if self.pid is not None:
            raise ComponentFailed(f"{self.name} runs already, as process {self.pid}")
        with self.log_path.open("ab") as log:
            self._child = subprocess.Popen(
                self._command(),
                cwd=self._state,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._pid_path.write_text(f"{self._child.pid} {birth_of(self._child.pid) or ''}")

    def kill(self) -> None:
        """Send SIGKILL and wait until the process is gone. Do nothing if it does not run."""
        identity = self._identity()
        if identity is not None:
            identity.send(signal.SIGKILL)
            if self._child is not None:
                self._child.wait()
            while identity.is_alive():
                time.sleep(POLL_SECONDS)
        self._child = None
        self._pid_path.unlink(missing_ok=True)

    def pause(self) -> None:
        """Send SIGSTOP, and wait until no thread runs: the process keeps its connections and answers nothing."""
        self._signal(signal.SIGSTOP)
        while (pid := self.pid) is not None and not _is_stopped(pid):
            time.sleep(POLL_SECONDS)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def wait_until(self, ready: Callable[[], bool], *, timeout_seconds: float) -> None:
        """Poll `ready`; fail immediately if the process ends instead."""
        deadline = time.monotonic() + timeout_seconds
        while not ready():
            if self.pid is None:
                raise ComponentFailed(f"{self.name} ended while it was starting. {self._log_excerpt()}")
            if time.monotonic() > deadline:
                raise ComponentFailed(f"{self.name} was not ready after {timeout_seconds:.0f} s. {self._log_excerpt()}")
            time.sleep(POLL_SECONDS)

    def _log_excerpt(self) -> str:
        tail = self.log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return f"The end of {self.log_path}:\n{tail}"

    def _signal(self, number: signal.Signals) -> None:
        identity = self._identity()
        if identity is None:
            raise ComponentFailed(f"{self.name} does not run")
        identity.send(number)

    def _identity(self) -> Identity | None:
        if self._child is not None and self._child.poll() is not None:
            return None
        return read_identity(self._pid_path)


def _is_stopped(pid: int) -> bool:
    """Return whether every thread of a process is stopped, which a busy machine does some time after the signal."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            if stat.read_text().rpartition(") ")[2][0] != "T":
                return False
    return True


class Guard:
    """A guard that stops the processes of a state folder and removes the folder when this process ends in any way.

    It is a child that reads a pipe, which the kernel closes when this process ends.
    """

    def __init__(self, state: Path) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-I", str(GUARD), str(state)], stdin=subprocess.PIPE, start_new_session=True
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    def release(self) -> None:
        """Let the guard do its work now, and wait for it."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()
