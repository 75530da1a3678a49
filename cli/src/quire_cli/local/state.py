"""The files of ``quire up``: one folder per YAML file, with the lock, the state, the endpoints and the logs.

The state (``run_state``) is for ``quire explain``, ``quire top`` and the next run, which ends the processes that this
run could not. A process is ended only if its number, start time and boot are those in the state.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from quire_cli.errors import AlreadyRunning, FileProblem
from quire_cli.local.process import ProcessIdentity, identify, session_members
from quire_cli.local.replicas import write_atomically

_STATE = "state.json"

_log = logging.getLogger(__name__)


def state_home(environ: Mapping[str, str]) -> Path:
    """Return the folder of all runs (XDG Base Directory Specification)."""
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "quire"


def run_folder(home: Path, file: Path) -> Path:
    """Return the folder of one YAML file: readable, and the same for each run."""
    resolved = str(file.resolve())
    stem = re.sub(r"[^A-Za-z0-9.-]", "-", file.stem)[:40]
    return home / f"{stem}-{hashlib.sha256(resolved.encode()).hexdigest()[:8]}"


class RunFolder:
    """A folder that one ``quire up`` locks at a time."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path, self._lock = path, lock
        self.logs = path / "logs"
        self.endpoints = path / "endpoints.json"
        self.targets = path / "prometheus-targets.json"
        self.adapters = path / "adapters"

    @classmethod
    def claim(cls, path: Path, *, file: Path) -> "RunFolder":
        """Lock the folder and end what an earlier run left; raise AlreadyRunning or FileProblem.

        The lock is the kernel's, so a killed run holds none.
        """
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
            lock = (path / "lock").open("a")
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            state = read_state(path)
            lock.close()
            where = f" at {state['address']}" if "address" in state else ""
            raise AlreadyRunning(
                f"{file} is already running{where} (process {state.get('pid', 'unknown')})",
                hint="stop it with Ctrl-C there, or start another file",
            ) from None
        folder = cls(path, lock)
        end_leftovers(read_state(path))
        for log in folder.logs.glob("*.log"):
            log.unlink()
        folder._check_space()
        return folder

    def _check_space(self) -> None:
        """Raise FileProblem if files can be created but not filled, before anything is started."""
        try:
            write_atomically(self.endpoints, json.dumps({"models": []}))
        except OSError as error:
            self.release()
            raise _unwritable(self.path, error) from error

    def write(self, state: Mapping[str, object]) -> None:
        """Write the state. On a full disk the run continues to serve without it."""
        try:
            write_atomically(self.path / _STATE, json.dumps({**state, "boot": boot_id()}, indent=1))
        except OSError as error:
            _log.warning("%s cannot be written: %s", self.path / _STATE, error.strerror)

    def release(self) -> None:
        self.endpoints.unlink(missing_ok=True)
        self.targets.unlink(missing_ok=True)
        self._lock.close()


def _unwritable(path: Path, error: OSError) -> FileProblem:
    return FileProblem(
        f"{path}, for logs and state, cannot be written: {error.strerror}",
        hint="let XDG_STATE_HOME name a folder that you can write to",
    )


def read_state(path: Path) -> dict[str, object]:
    """Return the state that a run last wrote; empty if there is no readable state."""
    try:
        state = json.loads((path / _STATE).read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def end_leftovers(state: Mapping[str, object]) -> list[str]:
    """Kill the processes of a run that was killed itself; return their names."""
    records = state.get("processes")
    if state.get("boot") != boot_id() or not isinstance(records, list):
        return []
    ended: list[str] = []
    for record in records:
        match record:
            case {"name": str(name), "pid": int(pid), "started": str(started)}:
                if _end(ProcessIdentity(pid=pid, started=started)):
                    ended.append(name)
    return ended


def _end(leader: ProcessIdentity) -> bool:
    """Kill this process and the members of its session."""
    found = session_members(leader)
    if identify(leader.pid) == leader and leader not in found:
        found.append(leader)
    for process in found:
        if identify(process.pid) == process:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
    return bool(found)


def boot_id() -> str:
    """Return the id of this boot: start times are unique only within one boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
