"""Kill the processes listed in a state folder when standard input ends, then remove the folder.

It runs as a separate program during a test run (`processes.Guard`), so that no process outlives the run, even after
`kill -9`. It imports only the standard library. It defines how a pid file is written and verified, for itself and for
`processes`.
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

POLL_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A process id and the start time of the process (in kernel ticks)."""

    pid: int
    birth: str

    def is_alive(self) -> bool:
        return birth_of(self.pid) == self.birth

    def send(self, number: signal.Signals) -> None:
        """Send a signal. Do nothing if the process has just ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


def birth_of(pid: int) -> str | None:
    """Return the start time of a living process, or None for one that is gone or waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the program's name may hold spaces and brackets
    state, birth = fields[0], fields[19]
    return None if state in "ZX" else birth


def read_identity(pid_path: Path) -> Identity | None:
    """Return the identity from a file, or None if the file is missing or its process is gone."""
    try:
        pid, _, birth = pid_path.read_text().partition(" ")
    except FileNotFoundError:
        return None
    identity = Identity(pid=int(pid), birth=birth) if pid else None
    return identity if identity is not None and identity.is_alive() else None


def kill_all(state: Path) -> None:
    """Kill all processes and return when they are gone, because a folder in use cannot be removed."""
    identities = [identity for path in state.glob("*.pid") if (identity := read_identity(path)) is not None]
    for identity in identities:
        identity.send(signal.SIGKILL)
    while any(identity.is_alive() for identity in identities):
        time.sleep(POLL_SECONDS)


def main() -> None:
    state = Path(sys.argv[1])
    sys.stdin.buffer.read()
    kill_all(state)
    shutil.rmtree(state, ignore_errors=True)


if __name__ == "__main__":
    main()
