"""A server with all its processes: it is started in its own session, watched until it answers, and stopped as a whole.

This module knows neither the server nor the measurement.
"""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_STOP_SECONDS = 60.0
_SAMPLE_SECONDS = 0.5
_LAST_LINES = 15


class ServerError(Exception):
    """A server that did not start, or answered incorrectly. The message names its log."""


class ProcessTree:
    """A command and all processes that it started, which belong to its session."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self.began = time.perf_counter()
        with log.open("wb") as file:
            self._child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._peak = 0
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    @property
    def peak_rss_bytes(self) -> int:
        """The maximum resident memory of its processes together; shared pages count in each."""
        return self._peak

    def check(self) -> None:
        """Raise ServerError if the command has ended."""
        status = self._child.poll()
        if status is not None:
            raise ServerError(
                f"it ended with {status} before it answered:\n  {self.last_words()}\nall of it: {self.log}"
            )

    def last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n  ".join(lines[-_LAST_LINES:])

    def stop(self) -> None:
        """End every process of the session: by SIGTERM first, then by SIGKILL."""
        self._over.set()
        self._watcher.join()
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_STOP_SECONDS)
        self._signal(signal.SIGKILL)
        self._child.wait()
        # The next server needs the memory of these processes.
        until = time.monotonic() + _STOP_SECONDS
        while session_rss_bytes(self._child.pid) and time.monotonic() < until:
            time.sleep(0.02)

    def _signal(self, number: signal.Signals) -> None:
        # Its session's process group has the leader's number, even after the leader is gone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)

    def _watch(self) -> None:
        while True:
            self._peak = max(self._peak, session_rss_bytes(self._child.pid))
            if self._over.wait(_SAMPLE_SECONDS):
                return


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[ProcessTree]:
    try:
        tree = ProcessTree(command, environment, log)
    except OSError as error:
        raise ServerError(f"{command[0]} cannot be started: {error.strerror}") from None
    try:
        yield tree
    finally:
        tree.stop()


def session_rss_bytes(session: int) -> int:
    """Return the resident memory of all processes of a session."""
    total = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            # The fields after the name, which may contain anything: state, parent, process group, session.
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                total += int((folder / "statm").read_text().split()[1])
        except (OSError, IndexError):
            continue  # it has just ended
    return total * os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
