"""Manage the test cluster from a shell: `python tests/cluster/cluster.py up`, `down`, `status`, `binaries`, `images`.

`up` and `down` may be repeated; `up` also restarts processes that have died. Tier `api` is the control plane that tests
start themselves, in a persistent folder. Tier `nodes` adds two nodes that run containers, DNS, a registry and
Prometheus. `down` and `status` apply to the existing one.
"""

import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from quire_cluster import real_cluster
from quire_cluster.binaries import PACKAGES, ensure, present
from quire_cluster.control_plane import PROGRAMS, ControlPlane
from quire_cluster.errors import ClusterError
from quire_cluster.images.ensure import images as images_command
from quire_cluster.nodes import requirements
from quire_cluster.processes import Process
from quire_cluster.programs import Programs
from quire_cluster.progress import Progress
from quire_cluster.real_cluster import RealCluster, default_state

TIERS: Final = "api: a control plane without nodes; nodes: with two that run containers (needs root)"
UP_WITH_NODES: Final = f"{sys.argv[0]} up --tier nodes"
EXIT_NOT_RUNNING: Final = 3  # as `systemctl status`


def up(options: Namespace, progress: Progress) -> int:
    there = (options.state_dir / "admin.kubeconfig").exists()
    if there and real_cluster.has_nodes(options.state_dir) != (options.tier == "nodes"):
        other = "api" if options.tier == "nodes" else "nodes"
        raise ClusterError(
            f"the cluster in {options.state_dir} is of tier {other}: stop it first, with: {sys.argv[0]} down"
        )
    return _up_with_nodes(options, progress) if options.tier == "nodes" else _up(options, progress)


def _up(options: Namespace, progress: Progress) -> int:
    binaries = ensure(PROGRAMS, progress)
    control_plane = ControlPlane.load(options.state_dir, binaries) or ControlPlane.create(options.state_dir, binaries)
    control_plane.start()
    return _say_how_to_reach(control_plane)


def _up_with_nodes(options: Namespace, progress: Progress) -> int:
    requirements.check(options.state_dir, real_cluster.store(), progress)  # before a build that takes minutes
    programs = Programs.ensure(progress)
    cluster = RealCluster.load(options.state_dir, programs) or RealCluster.create(options.state_dir, programs)
    cluster.start(progress)
    print(f"# registry http://{cluster.registry_address}, Prometheus {cluster.prometheus_url}")
    return _say_how_to_reach(cluster.control_plane)


def _say_how_to_reach(control_plane: ControlPlane) -> int:
    print(f"# {control_plane.server.url} is up; kubectl is {control_plane.binaries['kubectl']}")
    print(f"export KUBECONFIG={control_plane.admin_kubeconfig}")
    return 0


def down(options: Namespace, progress: Progress) -> int:
    if real_cluster.has_nodes(options.state_dir):
        real_cluster.stop(options.state_dir, purge=options.purge)
    else:
        control_plane = ControlPlane.load(options.state_dir, present(PROGRAMS))
        if control_plane is None:
            print(f"nothing to stop: no test cluster in {options.state_dir}")
            return 0
        control_plane.stop()
    print(f"stopped, and {options.state_dir} removed")
    return 0


def status(options: Namespace, progress: Progress) -> int:
    if real_cluster.has_nodes(options.state_dir):
        return _status_with_nodes(options)
    control_plane = ControlPlane.load(options.state_dir, present(PROGRAMS))
    if control_plane is None:
        return _not_there(options)
    all_run = _print_processes(control_plane.processes)
    return 0 if _print_answer(control_plane) and all_run else EXIT_NOT_RUNNING


def _status_with_nodes(options: Namespace) -> int:
    programs = Programs.here()
    if programs is None:
        print(f"the cluster in {options.state_dir} lacks programs; make them, and start it, with: {UP_WITH_NODES}")
        return EXIT_NOT_RUNNING
    cluster = RealCluster.load(options.state_dir, programs)
    if cluster is None:
        return _not_there(options)
    all_run = _print_processes(cluster.processes)
    answers = _print_answer(cluster.control_plane)
    ready = {name: node.is_ready() for name, node in cluster.nodes.items()}
    for name, is_ready in ready.items():
        print(f"{name:<26}{'Ready' if is_ready else 'not Ready'}")
    return 0 if all_run and answers and all(ready.values()) else EXIT_NOT_RUNNING


def _not_there(options: Namespace) -> int:
    print(f"no test cluster in {options.state_dir}; start one with: {sys.argv[0]} up")
    return EXIT_NOT_RUNNING


def _print_processes(processes: Sequence[Process]) -> bool:
    """Print the processes. Return True if all of them run."""
    for process in processes:
        print(f"{process.name:<26}{'not running' if process.pid is None else f'process {process.pid}'}")
    return all(process.pid for process in processes)


def _print_answer(control_plane: ControlPlane) -> bool:
    answers = control_plane.answers()
    print(f"{control_plane.server.url:<26}{'answers' if answers else 'does not answer'}")
    return answers


def binaries(options: Namespace, progress: Progress) -> int:
    programs = [program for package in PACKAGES for program in package.programs]
    for program, path in ensure(programs, progress).items():
        print(f"{program:<26}{path}")
    return 0


def images(options: Namespace, progress: Progress) -> int:
    return images_command(options.registry, options.tag, progress)


COMMANDS: Final[dict[str, tuple[Callable[[Namespace, Progress], int], str]]] = {
    "up": (up, "start the cluster or its missing processes, and print its address"),
    "down": (down, "stop it and delete its data"),
    "status": (status, f"show the state; exit status {EXIT_NOT_RUNNING} if a process does not run"),
    "binaries": (binaries, "build missing programs, and print their paths"),
    "images": (images, "build, push and list the images of engine, operator and gateway"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    command, _ = COMMANDS[options.command]
    try:
        code = command(options, Progress(sys.stderr))
        sys.stdout.flush()  # otherwise a closed pipe would be detected at exit, where it cannot be handled
        return code
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # as after `cluster.py status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(f"\ninterrupted; what was started runs on: `{sys.argv[0]} down` stops it", file=sys.stderr)
        return 130


def _parse(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(prog="cluster.py", description="Manage the Kubernetes cluster of the tests.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, explanation) in COMMANDS.items():
        command = commands.add_parser(name, help=explanation, description=explanation)
        if name == "binaries":
            continue
        if name == "images":
            command.add_argument("--registry", metavar="ADDRESS", help="default: the cluster's, if it runs")
            command.add_argument("--tag", help="an additional tag for all three images")
            continue
        command.add_argument("--state-dir", type=Path, default=default_state(), help="default: %(default)s")
        command.add_argument("--tier", choices=["api", "nodes"], default="api", help=TIERS)
        if name == "down":
            command.add_argument("--purge", action="store_true", help="also delete the images of nodes and registry")
    parsed = parser.parse_args(arguments)
    if "state_dir" in parsed:
        parsed.state_dir = parsed.state_dir.absolute()
    return parsed


if __name__ == "__main__":
    sys.exit(main())
