"""The folder and the state of each run of ``quire up``, which ``quire explain`` and ``quire top`` read.

One folder per YAML file has the lock, the state, the endpoints and the logs. A run lives as long as it holds the lock,
which the kernel releases at the end of the process, whatever ends it.
"""

import fcntl
import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from quire_cli.errors import AlreadyRunning, FileProblem
from quire_common.quantities import format_duration
from quire_operator.api import Autoscaling, AutoscalingMode, SelectPolicy
from quire_operator.api.scaling_limits import StepLimits
from quire_operator.autoscaling.schedules import Bounds
from quire_operator.autoscaling.ticks import Log

_STATE = "state.json"
_ATTEMPTS_TO_LOCK = 3
_LOCK_SECONDS = 0.05

_log = logging.getLogger(__name__)


class DirectionRules(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The window and the step limits of one direction."""

    window_seconds: float
    steps: str | None
    """None: never."""

    @classmethod
    def of(cls, limits: StepLimits) -> "DirectionRules":
        steps = None if limits.select is SelectPolicy.DISABLED else str(limits)
        return cls(window_seconds=limits.window_seconds, steps=steps)

    def text(self, direction: str, condition: str) -> str:
        """Return the rules as text: "scale-up" or "scale-down", and the condition that a window requires."""
        if self.steps is None:
            return f"never ({direction} is disabled)"
        window = format_duration(self.window_seconds)
        when = "at once" if self.window_seconds == 0 else f"when {condition} all through {window}"
        return f"{when}, by at most {self.steps}"


class Rules(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """``spec.autoscaling`` as it is shown next to a decision: bounds, windows and step limits."""

    mode: AutoscalingMode
    min_replicas: int
    max_replicas: int
    scale_up: DirectionRules
    scale_down: DirectionRules
    schedule: str | None = None
    """The reason why a schedule sets these bounds now; None if none does."""

    @classmethod
    def of(cls, autoscaling: Autoscaling, bounds: Bounds) -> "Rules":
        """Return the rules, with the bounds of now."""
        return cls(
            mode=autoscaling.mode,
            min_replicas=bounds.min_replicas,
            max_replicas=bounds.max_replicas,
            schedule=bounds.why,
            scale_up=DirectionRules.of(autoscaling.scale_up),
            scale_down=DirectionRules.of(autoscaling.scale_down),
        )

    @property
    def enforced(self) -> bool:
        return self.mode is AutoscalingMode.ENFORCE

    @property
    def up_text(self) -> str:
        return self.scale_up.text("scale-up", "needed")

    @property
    def down_text(self) -> str:
        return self.scale_down.text("scale-down", "one fewer was enough")


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    phase: str
    url: str | None = None
    restarts: int = 0
    reason: str | None = None
    """The reason why it last ended."""


class ServedState(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    served_name: str
    replicas: int
    """The requested number of replicas."""
    ready_replicas: int
    autoscaling: Rules | None = None
    """None: the number of replicas is fixed."""
    replica_states: tuple[ReplicaState, ...] = ()
    decisions: Log = ()


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    """The number of the quire command."""
    started: float
    """In Unix seconds."""
    time: float
    """The time at which it was written."""
    ended: float | None = None
    """The time at which all processes had ended; None while the run lives, or if it was killed."""
    file: str
    address: str
    phase: str = ""
    """The gateway's phase, or Draining."""
    deployments: dict[str, ServedState] = {}
    processes: dict[str, int] = {}
    """The numbers of the processes that run, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    folder: Path
    state: RunState
    is_live: bool


def state_home(environ: Mapping[str, str]) -> Path:
    """Return the folder of all runs (XDG Base Directory Specification)."""
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "quire"


def run_folder(home: Path, file: Path) -> Path:
    """Return the folder of one YAML file: readable, and the same for each run."""
    resolved = str(file.resolve())
    stem = re.sub(r"[^A-Za-z0-9.-]", "-", file.stem)[:40]
    return home / f"{stem}-{hashlib.sha256(resolved.encode()).hexdigest()[:8]}"


def runs(environ: Mapping[str, str]) -> list[Run]:
    """Return all runs with a state: live ones first, then by the time of their last update."""
    home = state_home(environ)
    folders = sorted(home.iterdir()) if home.is_dir() else []
    found = [run for folder in folders if (run := read(folder)) is not None]
    return sorted(found, key=lambda run: (not run.is_live, -run.state.time))


def run_of(where: Path, environ: Mapping[str, str]) -> Run | None:
    """Return the run of a YAML file, or of a run's folder."""
    return read(where) if where.is_dir() else read(run_folder(state_home(environ), where))


def read(folder: Path) -> Run | None:
    """Return the run in a folder; None without a state, and for a state of another version."""
    try:
        state = msgspec.json.decode((folder / _STATE).read_bytes(), type=RunState)
    except (OSError, ValueError):
        return None
    return Run(folder=folder, state=state, is_live=state.ended is None and _is_locked(folder / "lock"))


def _is_locked(file: Path) -> bool:
    try:
        with file.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


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
        """Lock the folder and remove what an earlier run left; raise AlreadyRunning or FileProblem."""
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
            lock = (path / "lock").open("a")
        except OSError as error:
            raise _unwritable(path, error) from error
        if not _locked(lock):
            lock.close()
            run = read(path)
            where = "" if run is None else f" at {run.state.address} (process {run.state.pid})"
            raise AlreadyRunning(
                f"{file} is already running{where}", hint="stop it with Ctrl-C there, or start another file"
            )
        folder = cls(path, lock)
        for old in (path / _STATE, *folder.logs.glob("*.log")):
            old.unlink(missing_ok=True)
        try:
            write_atomically(folder.endpoints, '{"models": []}')  # on a full disk a file can be created, but not filled
        except OSError as error:
            folder.release()
            raise _unwritable(path, error) from error
        return folder

    def write(self, state: RunState) -> None:
        """Write the state. On a full disk the run continues to serve without it."""
        try:
            write_atomically(self.path / _STATE, msgspec.json.format(msgspec.json.encode(state), indent=1).decode())
        except OSError as error:
            _log.warning("%s cannot be written: %s", self.path / _STATE, error.strerror)

    def release(self) -> None:
        self.endpoints.unlink(missing_ok=True)
        self.targets.unlink(missing_ok=True)
        self._lock.close()


def _locked(lock: IO[str]) -> bool:
    """Lock the file; one that is only being checked by ``read`` is free again in a moment."""
    for attempt in range(_ATTEMPTS_TO_LOCK):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_SECONDS if attempt + 1 < _ATTEMPTS_TO_LOCK else 0)
        else:
            return True
    return False


def _unwritable(path: Path, error: OSError) -> FileProblem:
    return FileProblem(
        f"{path}, for logs and state, cannot be written: {error.strerror}",
        hint="let XDG_STATE_HOME name a folder that you can write to",
    )


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers see either the old or the new text."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    os.replace(fresh, path)
