"""Processes of the cluster by name: started, killed, paused, found again by a later run.

A process is known by the file `NAME.pid` in the state folder: its id and its birth, so that an id which the system has
given to somebody else since is never signalled. Knows nothing of what the processes do.
"""

import os
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
    """One program with its log, in a state folder. `command` is asked for at each start, and only then."""

    def __init__(self, name: str, command: Callable[[], list[str]], state: Path) -> None:
        self.name = name
        self.log_path = state / f"{name}.log"
        self._command = command
        self._state = state
        self._pid_path = state / f"{name}.pid"
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """None when it does not run."""
        identity = self._identity()
        return None if identity is None else identity.pid

    def start(self) -> None:
        """In a session of its own: a Ctrl-C at the terminal is for the test run, which then stops it in order."""
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
        """SIGKILL, and wait until it is gone. Nothing to do when it does not run."""
        identity = self._identity()
        if identity is not None:
            os.kill(identity.pid, signal.SIGKILL)
            if self._child is not None:
                self._child.wait()
            while identity.is_alive():
                time.sleep(POLL_SECONDS)
        self._child = None
        self._pid_path.unlink(missing_ok=True)

    def pause(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def wait_until(self, ready: Callable[[], bool], *, timeout_seconds: float) -> None:
        """Polls `ready`, and fails at once when the process ends instead."""
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
        os.kill(identity.pid, number)

    def _identity(self) -> Identity | None:
        if self._child is not None and self._child.poll() is not None:
            return None
        return read_identity(self._pid_path)


class Guard:
    """Stops what a state folder names when this process ends, however it ends, and removes the folder.

    It is a child that reads a pipe only we hold; the kernel closes the pipe for us when we cannot.
    """

    def __init__(self, state: Path) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-I", str(GUARD), str(state)], stdin=subprocess.PIPE, start_new_session=True
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    def release(self) -> None:
        """Has it do its work now, and waits for it."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()
