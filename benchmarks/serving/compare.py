#!/usr/bin/env python3
"""Compare quire with other servers on this machine: same model, prompts and client, in interleaved runs.

  python -m benchmarks.serving.compare --list              list the servers and whether each is installed
  python -m benchmarks.serving.compare                     quire, vLLM and llama.cpp: three runs, most of an hour
  python -m benchmarks.serving.compare --servers quire,vllm --workloads 256/64@16 --runs 1
  python -m benchmarks.serving.compare --quick             quire alone on the demo model, a few seconds

benchmarks/peers has a script that installs each peer (`make peers`). One server runs at a time, with every CPU that
this process may use: it is started, timed to its first token, warmed up, measured on each workload, and stopped with
all its processes. The report also lists the goals, met or missed, and the lower bound: the time that arithmetic and
reading alone take at the hardware's own rates, measured in the same run. ``--cpu-level`` limits every server to a level
of CPU, so that a new machine can represent older ones. Quote medians and ratios of several runs, because other work on
the machine slows all of them.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.models.random_model import ensure_model
from benchmarks.peers.peer_environments import peers_folder
from benchmarks.report import DEMO_MODEL, ROOT, interrupt_on_terminate, usable_cpus
from benchmarks.serving.comparison.levels import NAMES, check_level, highest_level
from benchmarks.serving.comparison.machine import Machine, this_machine
from benchmarks.serving.comparison.plot import write_plot
from benchmarks.serving.comparison.process_tree import ServerError
from benchmarks.serving.comparison.results import Turn, Verdict, as_document, verdicts
from benchmarks.serving.comparison.servers import ServerUnderTest, missing, servers_under_test
from benchmarks.serving.comparison.table import show
from benchmarks.serving.comparison.turns import Bench
from benchmarks.serving.comparison.workloads import QUICK, STANDARD, Workload, parse_workload
from quire_engine.cpu.limits import CpuLevel

DEFAULT_SERVERS = ("quire", "vllm", "vllm-f32", "llama.cpp")
OUT = Path("out/bench/compare")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parsed command line."""

    model: Path
    cpu_level: CpuLevel
    keep_running: bool
    servers: tuple[ServerUnderTest, ...]
    workloads: tuple[Workload, ...]
    runs: int
    seconds: float
    goals: bool
    """True if the goals apply, which are set for a real model's shape and not for the demo model."""
    json: Path
    plot: Path | None
    logs: Path


class Comparison:
    """A comparison in progress. The results so far are written after every turn."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.plan = plan
        self.console = console
        self.machine: Machine = this_machine()
        self.turns: list[Turn] = []
        self.limits: list[dict[str, Any]] = []
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
            keep_running=plan.keep_running,
        )

    def say(self, words: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        self.console.print(f"[{minutes:02d}:{seconds:02d}] {words}", markup=False, highlight=False, soft_wrap=True)

    def run(self) -> None:
        try:
            self._run()
        finally:
            self.bench.close()

    def _run(self) -> None:
        self.say(f"{self.machine}; level {self.plan.cpu_level}")
        if self.plan.keep_running:
            for server in self.plan.servers:
                self.say(f"starting {server.name} ({server.what})")
                self.bench.start(server)
        runs_began = time.monotonic()
        for run in range(1, self.plan.runs + 1):
            if run > 1:
                left = (time.monotonic() - runs_began) / (run - 1) * (self.plan.runs - run + 1)
                self.say(f"about {left / 60:.0f} min more")
            self.say(f"run {run} of {self.plan.runs}: the floor")
            self._measure_limits()
            for server in self.plan.servers:
                self.say(f"run {run} of {self.plan.runs}: {server.name} ({server.what})")
                turn = self.bench.turn(server, run)
                if turn.problem is not None:
                    self.say(f"{server.name}: {turn.problem}")
                self.turns.append(turn)
                self.write()

    def _measure_limits(self) -> None:
        """Measure the floor in its own process, which ends before servers are measured."""
        command = [
            sys.executable,
            "-m",
            "benchmarks.serving.comparison.floor",
            str(self.plan.model),
            *map(str, self.plan.workloads),
        ]
        command += ["--threads", str(len(usable_cpus()))]
        command += ["--cpu-level", self.plan.cpu_level]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        if ended.returncode:
            raise ServerError(f"the floor could not be measured:\n{ended.stderr[-2000:]}")
        self.limits.append(json.loads(ended.stdout.splitlines()[-1]))

    @property
    def floors(self) -> dict[str, float]:
        """Return the highest total tokens per second of any run, by workload, because other work only slows it down."""
        best: dict[str, float] = {}
        for limit in self.limits:
            for floor in limit["floors"]:
                name, rate = floor["workload"], floor["total_tokens_per_second"]
                best[name] = max(best.get(name, 0.0), rate)
        return best

    def verdicts(self) -> list[Verdict]:
        if not self.plan.goals:
            return []
        return verdicts(self.turns, level=self.plan.cpu_level)

    def write(self) -> None:
        document = {
            "command": " ".join(sys.argv),
            "started_at": self.started_at.isoformat(),
            "model": str(self.plan.model),
            "machine": asdict(self.machine),
            "cpu_level": self.plan.cpu_level,
            "kept_running": self.plan.keep_running,
            "limits": self.limits,
            "turns": as_document(self.turns),
            "goals": [asdict(verdict) | {"met": verdict.met} for verdict in self.verdicts()],
        }
        self.plan.json.parent.mkdir(parents=True, exist_ok=True)
        self.plan.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    def show(self) -> None:
        title = f"{self.plan.model.name} at {self.plan.cpu_level}, medians of {self.plan.runs} interleaved runs"
        output = Console(width=None if sys.stdout.isatty() else 150)
        show(output, self.turns, self.verdicts(), self.limits, floors=self.floors, title=title)
        output.print(str(self.machine), style="dim", highlight=False)
        if self.plan.plot is not None:
            self.plan.plot.parent.mkdir(parents=True, exist_ok=True)
            write_plot(self.plan.plot, self.turns, self.floors, title)
        where = f"{self.plan.json}" + (f", {self.plan.plot}" if self.plan.plot else "")
        output.print(f"written: {where}; servers' logs: {self.plan.logs}", style="dim", highlight=False)


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
    parser.add_argument(
        "--keep-running",
        action="store_true",
        help="start all servers first and pause each between its turns; needs memory for all of them",
    )
    parser.add_argument("--runs", type=int, default=3, help="interleaved runs of each server (default 3)")
    parser.add_argument("--seconds", type=float, default=20.0, help="approximate time per workload (default 20)")
    parser.add_argument(
        "--model",
        type=Path,
        help="a Llama model folder (default: random weights in SmolLM2-135M's shape, in the cache)",
    )
    parser.add_argument("--json", type=Path, default=OUT / "compare.json", help=f"(default: {OUT}/compare.json)")
    parser.add_argument("--plot", type=Path, help=f"a .png, .svg or .pdf (default: {OUT}/compare.png, none if quick)")
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
        keep_running=arguments.keep_running,
        model=_model(arguments.model, quick=quick, console=console),
        servers=tuple(servers),
        workloads=workloads,
        runs=1 if quick else arguments.runs,
        seconds=3.0 if quick else arguments.seconds,
        goals=not quick,
        json=arguments.json,
        plot=arguments.plot or (None if quick else OUT / "compare.png"),
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
