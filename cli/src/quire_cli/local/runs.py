"""The runs of ``quire up`` on this machine, live or ended, newest first."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire_cli.local.process import ProcessIdentity, identify
from quire_cli.local.run_state import RunState, read_run
from quire_cli.local.state import boot_id, read_state, run_folder, state_home


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    folder: Path
    state: RunState
    is_live: bool
    """True if the process that wrote the state lives."""


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
    """Return the run in a folder, or None if there is no readable state."""
    state = read_run(read_state(folder))
    return None if state is None else Run(folder=folder, state=state, is_live=_is_live(state))


def _is_live(state: RunState) -> bool:
    owner = state.owner
    if owner is None or state.ended is not None or state.boot != boot_id():
        return False
    return identify(owner.pid) == ProcessIdentity(pid=owner.pid, started=owner.started)
