"""The test cluster from a shell: `python tests/cluster/cluster.py up`, `down`, `status`, `binaries`.

`up` and `down` may be repeated; `up` also starts again whatever has died. The control plane is the one
that tests start for themselves, in a folder that stays.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire_cluster.binaries import PACKAGES, ensure, present
from quire_cluster.control_plane import PROGRAMS, ControlPlane
from quire_cluster.errors import ClusterError
from quire_cluster.progress import Progress

EXIT_NOT_RUNNING: Final = 3  # as `systemctl status`


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    state: Path


def up(options: Options, progress: Progress) -> int:
    binaries = ensure(PROGRAMS, progress)
    control_plane = ControlPlane.load(options.state, binaries) or ControlPlane.create(options.state, binaries)
    control_plane.start()
    print(f"# {control_plane.server.url} is up; kubectl is {binaries['kubectl']}")
    print(f"export KUBECONFIG={control_plane.admin_kubeconfig}")
    return 0


def down(options: Options, progress: Progress) -> int:
    control_plane = ControlPlane.load(options.state, present(PROGRAMS))
    if control_plane is None:
        print(f"nothing to stop: no test cluster in {options.state}")
        return 0
    control_plane.stop()
    print(f"stopped, and {options.state} removed")
    return 0


def status(options: Options, progress: Progress) -> int:
    control_plane = ControlPlane.load(options.state, present(PROGRAMS))
    if control_plane is None:
        print(f"no test cluster in {options.state}; start one with: {sys.argv[0]} up")
        return EXIT_NOT_RUNNING
    for process in control_plane.processes:
        print(f"{process.name:<26}{'not running' if process.pid is None else f'process {process.pid}'}")
    answers = control_plane.answers()
    print(f"{control_plane.server.url:<26}{'answers' if answers else 'does not answer'}")
    return 0 if answers and all(process.pid for process in control_plane.processes) else EXIT_NOT_RUNNING


def binaries(options: Options, progress: Progress) -> int:
    programs = [program for package in PACKAGES for program in package.programs]
    for program, path in ensure(programs, progress).items():
        print(f"{program:<26}{path}")
    return 0


COMMANDS: Final[dict[str, tuple[Callable[[Options, Progress], int], str]]] = {
    "up": (up, "start etcd, kube-apiserver and kube-controller-manager, and print how to reach them"),
    "down": (down, "stop them and delete their data"),
    "status": (status, f"say what runs; exit status {EXIT_NOT_RUNNING} when something does not"),
    "binaries": (binaries, "build what is missing, and say where each program is"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    name, options = _parse(arguments)
    command, _ = COMMANDS[name]
    try:
        return command(options, Progress(sys.stderr))
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parse(arguments: Sequence[str] | None) -> tuple[str, Options]:
    parser = argparse.ArgumentParser(prog="cluster.py", description="The Kubernetes control plane that the tests use.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, explanation) in COMMANDS.items():
        command = commands.add_parser(name, help=explanation, description=explanation)
        if name != "binaries":
            command.add_argument("--state-dir", type=Path, default=_default_state(), help="default: %(default)s")
            command.add_argument("--tier", choices=["api"], default="api", help="api: a control plane without nodes")
    parsed = parser.parse_args(arguments)
    return parsed.command, Options(state=getattr(parsed, "state_dir", _default_state()).absolute())


def _default_state() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "quire" / "cluster"


if __name__ == "__main__":
    sys.exit(main())
