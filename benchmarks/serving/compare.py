#!/usr/bin/env python3
"""Compare quire with other servers on this machine: same model, prompts and client, in interleaved runs.

  python -m benchmarks.serving.compare --list              list the servers and whether each is installed
  python -m benchmarks.serving.compare                     quire, vLLM and llama.cpp: three runs, most of an hour
  python -m benchmarks.serving.compare --servers quire,vllm --workloads 256/64@16 --runs 1
  python -m benchmarks.serving.compare --quick             quire alone on the demo model, a few seconds

benchmarks/peers has a script that installs each peer (`make peers`). One server runs at a time, with every CPU that
this process may use: it is started, timed to its first token, warmed up, measured on each workload, and stopped with
all its processes. ``--cpu-level`` limits every server to a level
of CPU, so that a new machine can represent older ones. Quote medians and ratios of several runs, because other work on
the machine slows all of them.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from benchmarks.models.random_model import ensure_model
from benchmarks.peers.peer_environments import peers_folder
from benchmarks.report import DEMO_MODEL, interrupt_on_terminate, machine
from benchmarks.serving.comparison.client import QUICK, STANDARD, Workload, parse_workload
from benchmarks.serving.comparison.levels import NAMES, check_level, highest_level
from benchmarks.serving.comparison.process_tree import ServerError
from benchmarks.serving.comparison.results import Turn, as_document, show
from benchmarks.serving.comparison.servers import ServerUnderTest, missing, servers_under_test
from benchmarks.serving.comparison.turns import Bench
from quire_engine.cpu.limits import CpuLevel

DEFAULT_SERVERS = ("quire", "vllm", "vllm-f32", "llama.cpp")
OUT = Path("out/bench/compare")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parsed command line."""

    model: Path
    cpu_level: CpuLevel
    servers: tuple[ServerUnderTest, ...]
    workloads: tuple[Workload, ...]
    runs: int
    seconds: float
    json: Path
    logs: Path


class Comparison:
    """A comparison in progress. The results so far are written after every turn."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.plan = plan
        self.console = console
        self.machine = machine()
        self.turns: list[Turn] = []
        self.started_at = datetime.now(UTC)
        self._began = time.monotonic()
        plan.logs.mkdir(parents=True, exist_ok=True)
        self.bench = Bench(
            model=plan.model,
            cpu_level=plan.cpu_level,
            workloads=plan.workloads,
            seconds=plan.seconds,
            logs=plan.logs,
            say=self.say,
        )

    def say(self, words: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        self.console.print(f"[{minutes:02d}:{seconds:02d}] {words}", markup=False, highlight=False, soft_wrap=True)

    def run(self) -> None:
        self.say(f"{self.machine}; level {self.plan.cpu_level}")
        runs_began = time.monotonic()
        for run in range(1, self.plan.runs + 1):
            if run > 1:
                left = (time.monotonic() - runs_began) / (run - 1) * (self.plan.runs - run + 1)
                self.say(f"about {left / 60:.0f} min more")
            for server in self.plan.servers:
                self.say(f"run {run} of {self.plan.runs}: {server.name} ({server.what})")
                turn = self.bench.turn(server, run)
                if turn.problem is not None:
                    self.say(f"{server.name}: {turn.problem}")
                self.turns.append(turn)
                self.write()

    def write(self) -> None:
        document = {
            "command": " ".join(sys.argv),
            "started_at": self.started_at.isoformat(),
            "model": str(self.plan.model),
            "machine": self.machine,
            "cpu_level": self.plan.cpu_level,
            "turns": as_document(self.turns),
        }
        self.plan.json.parent.mkdir(parents=True, exist_ok=True)
        self.plan.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    def show(self) -> None:
        title = f"{self.plan.model.name} at {self.plan.cpu_level}, medians of {self.plan.runs} interleaved runs"
        output = Console(width=None if sys.stdout.isatty() else 150)
        show(output, self.turns, title=title)
        output.print(self.machine, style="dim", highlight=False)
        output.print(f"written: {self.plan.json}; servers' logs: {self.plan.logs}", style="dim", highlight=False)


def parse_arguments(everyone: dict[str, ServerUnderTest]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the servers and measure nothing")
    parser.add_argument(
        "--quick", action="store_true", help="measure quire alone on the demo model, one run of a few seconds"
    )
    parser.add_argument(
        "--servers",
        default=",".join(DEFAULT_SERVERS),
        help=f"a list of {', '.join(everyone)}; or all (default: {','.join(DEFAULT_SERVERS)})",
    )
    standard = ",".join(map(str, STANDARD))
    parser.add_argument(
        "--workloads", default=standard, help=f"a list of input/output@concurrency (default: {standard})"
    )
    parser.add_argument(
        "--cpu-level",
        choices=NAMES,
        help="limit every server to a level of CPU (default: the highest level of this machine)",
    )
    parser.add_argument("--runs", type=int, default=3, help="interleaved runs of each server (default 3)")
    parser.add_argument("--seconds", type=float, default=20.0, help="approximate time per workload (default 20)")
    parser.add_argument(
        "--model",
        type=Path,
        help="a Llama model folder (default: random weights in SmolLM2-135M's shape, in the cache)",
    )
    parser.add_argument("--json", type=Path, default=OUT / "compare.json", help=f"(default: {OUT}/compare.json)")
    arguments = parser.parse_args()
    if arguments.runs < 1 or arguments.seconds <= 0:
        parser.error("--runs and --seconds must be more than 0")
    return arguments


def chosen(names: str, everyone: dict[str, ServerUnderTest]) -> list[ServerUnderTest]:
    """Return the named servers. Raises ValueError for an unknown name."""
    wanted = list(everyone) if names == "all" else [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in everyone]:
        raise ValueError(f"--servers: no {', '.join(unknown)}; there are {', '.join(everyone)}")
    return [everyone[name] for name in dict.fromkeys(wanted)]


def plan_from(arguments: argparse.Namespace, everyone: dict[str, ServerUnderTest], console: Console) -> Plan:
    """Build the plan and report the servers that are skipped. Raises ValueError for a plan that cannot run."""
    quick: bool = arguments.quick
    servers = [everyone["quire"]] if quick else chosen(arguments.servers, everyone)
    absent = missing(list(everyone.values()) if quick else servers)
    for name, why in absent.items():
        console.print(f"skipped: {name}: {why}", markup=False, highlight=False, soft_wrap=True)
    servers = [server for server in servers if server.name not in absent]
    if not servers:
        raise ValueError("no server is left to measure")
    workloads = QUICK if quick else tuple(parse_workload(text) for text in arguments.workloads.split(","))
    cpu_level = arguments.cpu_level or highest_level()
    check_level(cpu_level)
    return Plan(
        cpu_level=cpu_level,
        model=_model(arguments.model, quick=quick, console=console),
        servers=tuple(servers),
        workloads=workloads,
        runs=1 if quick else arguments.runs,
        seconds=3.0 if quick else arguments.seconds,
        json=arguments.json,
        logs=arguments.json.parent / "logs",
    )


def _model(asked: Path | None, *, quick: bool, console: Console) -> Path:
    if quick and asked is None:
        return DEMO_MODEL
    if asked is None:
        folder = peers_folder().parent / "models" / "smollm2-135m-random"
        console.print(f"model: {folder}", highlight=False, soft_wrap=True)
        return ensure_model(folder)
    if not (asked / "config.json").is_file():
        raise ValueError(f"--model: {asked} holds no config.json")
    return asked


def main(everyone: dict[str, ServerUnderTest] | None = None) -> None:
    everyone = everyone or servers_under_test()
    arguments = parse_arguments(everyone)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 200)
    if arguments.list:
        _list(list(everyone.values()))
        return
    interrupt_on_terminate()  # Servers have sessions of their own, and would outlive this process.
    try:
        comparison = Comparison(plan_from(arguments, everyone, console), console)
        comparison.run()
    except (ValueError, OSError, ServerError) as problem:
        sys.exit(f"compare: {problem}")
    except KeyboardInterrupt:
        sys.exit(f"compare: stopped; the results so far are in {arguments.json}")
    comparison.show()
    if any(turn.problem is not None for turn in comparison.turns):
        sys.exit(1)


def _list(everyone: Sequence[ServerUnderTest]) -> None:
    absent = missing(everyone)
    for server in everyone:
        why = f" ({absent[server.name]})" if server.name in absent else ""
        print(f"{server.name:24}{server.what}{why}")


if __name__ == "__main__":
    main()
