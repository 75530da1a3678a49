#!/usr/bin/env python3
"""quire beside its peers on this machine: the same model, the same prompts, the same client, by turns (A B C A B C …).

  python benchmarks/serving/compare.py --list              who there is, and who is installed
  python benchmarks/serving/compare.py                     quire, vLLM and llama.cpp: three runs, half an hour
  python benchmarks/serving/compare.py --servers quire,vllm --workloads 256/64@16 --runs 1
  python benchmarks/serving/compare.py --quick             quire alone on the demo model, some seconds

benchmarks/peers has a script that installs each peer (`make peers`). One server runs at a time, with every CPU this
process may use: started, timed to its first token, warmed up, measured on each workload, stopped with all its
processes. Beside the table stand the goals, met or missed, and the floor: what linear layers and attention alone take
here, measured in the same run. Quote medians and ratios of several runs: other work on the machine weighs on them all.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from comparison.contestants import Contestant, contestants, missing, usable_cpus
from comparison.cross_check import CrossCheck, cross_check
from comparison.machine import Machine, this_machine
from comparison.plot import write_plot
from comparison.process_tree import ServerError
from comparison.results import Turn, Verdict, as_document, verdicts
from comparison.table import show
from comparison.turns import Bench
from comparison.workloads import QUICK, STANDARD, Workload, parse_workload
from peer_catalogue import VLLM
from peer_environments import peers_folder
from random_model import ensure_model
from rich.console import Console

from quire_engine.ipc.process import compute_environment

HERE = Path(__file__).resolve().parent
DEMO_MODEL = HERE.parents[1] / "examples" / "models" / "quire-demo"
DEFAULT_SERVERS = ("quire", "vllm", "llama.cpp")
OUT = Path("out/bench/compare")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the command line asked for."""

    model: Path
    servers: tuple[Contestant, ...]
    workloads: tuple[Workload, ...]
    runs: int
    seconds: float
    cross_check: bool
    goals: bool
    """They are set for a real model's shape; the demo model has none."""
    json: Path
    plot: Path | None
    logs: Path


class Comparison:
    """Runs the plan; what is known so far is written after every turn."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.plan = plan
        self.console = console
        self.machine: Machine = this_machine()
        self.turns: list[Turn] = []
        self.limits: list[dict[str, Any]] = []
        self.check: CrossCheck | None = None
        self.started_at = datetime.now(UTC)
        self._began = time.monotonic()
        plan.logs.mkdir(parents=True, exist_ok=True)
        self.bench = Bench(
            model=plan.model, workloads=plan.workloads, seconds=plan.seconds, logs=plan.logs, say=self.say
        )

    def say(self, words: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        self.console.print(f"[{minutes:02d}:{seconds:02d}] {words}", markup=False, highlight=False, soft_wrap=True)

    def run(self) -> None:
        self.say(str(self.machine))
        for run in range(1, self.plan.runs + 1):
            if run > 1:
                left = (time.monotonic() - self._began) / (run - 1) * (self.plan.runs - run + 1)
                self.say(f"about {left / 60:.0f} min more")
            self.say(f"run {run} of {self.plan.runs}: what the machine allows")
            self._measure_limits()
            for contestant in self.plan.servers:
                self.say(f"run {run} of {self.plan.runs}: {contestant.name} ({contestant.what})")
                turn = self.bench.turn(contestant, run)
                if turn.problem is not None:
                    self.say(f"{contestant.name}: {turn.problem}")
                self.turns.append(turn)
                self.write()
        if self.plan.cross_check:
            ours = next(contestant for contestant in self.plan.servers if contestant.family == "quire")
            self.check = cross_check(self.bench, ours, self.plan.workloads[0], self.say)
            self.write()

    def _measure_limits(self) -> None:
        """In a process of its own, which is gone when servers are measured."""
        command = [sys.executable, "-m", "comparison.floor", str(self.plan.model), *map(str, self.plan.workloads)]
        command += ["--threads", str(len(usable_cpus()))]
        command += ["--dtype", "bfloat16" if self.machine.has_avx512_bf16 else "float32"]
        environment = compute_environment(len(usable_cpus()), os.environ) | {"PYTHONPATH": str(HERE)}
        ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
        if ended.returncode:
            raise ServerError(f"the floor could not be measured:\n{ended.stderr[-2000:]}")
        self.limits.append(json.loads(ended.stdout.splitlines()[-1]))

    @property
    def floors(self) -> dict[str, float]:
        """Total tokens per second by workload: the most of any run, since other work only takes away."""
        best: dict[str, float] = {}
        for limit in self.limits:
            for floor in limit["floors"]:
                name, rate = floor["workload"], floor["total_tokens_per_second"]
                best[name] = max(best.get(name, 0.0), rate)
        return best

    def verdicts(self) -> list[Verdict]:
        if not self.plan.goals:
            return []
        return verdicts(self.turns, self.floors, has_avx512_bf16=self.machine.has_avx512_bf16)

    def write(self) -> None:
        document = {
            "command": " ".join(sys.argv),
            "started_at": self.started_at.isoformat(),
            "model": str(self.plan.model),
            "machine": asdict(self.machine),
            "limits": self.limits,
            "turns": as_document(self.turns),
            "goals": [asdict(verdict) | {"met": verdict.met} for verdict in self.verdicts()],
            "cross_check": asdict(self.check) if self.check else None,
        }
        self.plan.json.parent.mkdir(parents=True, exist_ok=True)
        self.plan.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    def show(self) -> None:
        title = f"{self.plan.model.name}, medians of {self.plan.runs} interleaved runs"
        output = Console(width=None if sys.stdout.isatty() else 150)
        show(output, self.turns, self.verdicts(), self.limits, title=title)
        if self.check is not None:
            output.print(str(self.check), highlight=False)
        output.print(str(self.machine), style="dim", highlight=False)
        if self.plan.plot is not None:
            self.plan.plot.parent.mkdir(parents=True, exist_ok=True)
            write_plot(self.plan.plot, self.turns, self.floors, title)
        where = f"{self.plan.json}" + (f", {self.plan.plot}" if self.plan.plot else "")
        output.print(f"written: {where}; servers' logs: {self.plan.logs}", style="dim", highlight=False)


def parse_arguments(everyone: dict[str, Contestant]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="who can be compared; measure nothing")
    parser.add_argument("--quick", action="store_true", help="quire alone on the demo model, one run of some seconds")
    parser.add_argument(
        "--servers",
        default=",".join(DEFAULT_SERVERS),
        help=f"of {', '.join(everyone)}; or all (default: {','.join(DEFAULT_SERVERS)})",
    )
    standard = ",".join(map(str, STANDARD))
    parser.add_argument("--workloads", default=standard, help=f"input/output@concurrency,… (default: {standard})")
    parser.add_argument("--runs", type=int, default=3, help="interleaved runs of everyone (default 3)")
    parser.add_argument("--seconds", type=float, default=20.0, help="to measure a workload for, about (default 20)")
    parser.add_argument(
        "--model", type=Path, help="a Llama's folder (default: random weights in SmolLM2-135M's shape, in the cache)"
    )
    parser.add_argument(
        "--cross-check", action="store_true", help="put `vllm bench serve` beside our client, on one server of quire's"
    )
    parser.add_argument("--json", type=Path, default=OUT / "compare.json", help=f"(default: {OUT}/compare.json)")
    parser.add_argument("--plot", type=Path, help=f"a .png, .svg or .pdf (default: {OUT}/compare.png, none if quick)")
    arguments = parser.parse_args()
    if arguments.runs < 1 or arguments.seconds <= 0:
        parser.error("--runs and --seconds must be more than 0")
    return arguments


def chosen(names: str, everyone: dict[str, Contestant]) -> list[Contestant]:
    """Raises ValueError with the names there are."""
    wanted = list(everyone) if names == "all" else [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in everyone]:
        raise ValueError(f"--servers: no {', '.join(unknown)}; there are {', '.join(everyone)}")
    return [everyone[name] for name in dict.fromkeys(wanted)]


def plan_from(arguments: argparse.Namespace, everyone: dict[str, Contestant], console: Console) -> Plan:
    """Raises ValueError for what cannot be done, and names who is left out."""
    quick: bool = arguments.quick
    servers = [everyone["quire"]] if quick else chosen(arguments.servers, everyone)
    absent = missing(list(everyone.values()) if quick else servers)
    for name, why in absent.items():
        console.print(f"skipped: {name}: {why}", markup=False, highlight=False, soft_wrap=True)
    servers = [contestant for contestant in servers if contestant.name not in absent]
    if not servers:
        raise ValueError("nobody is left to measure")
    if arguments.cross_check and (problem := _cross_check_problem(servers)):
        raise ValueError(f"--cross-check: {problem}")
    workloads = QUICK if quick else tuple(parse_workload(text) for text in arguments.workloads.split(","))
    return Plan(
        model=_model(arguments.model, quick=quick, console=console),
        servers=tuple(servers),
        workloads=workloads,
        runs=1 if quick else arguments.runs,
        seconds=3.0 if quick else arguments.seconds,
        cross_check=arguments.cross_check,
        goals=not quick,
        json=arguments.json,
        plot=arguments.plot or (None if quick else OUT / "compare.png"),
        logs=arguments.json.parent / "logs",
    )


def _cross_check_problem(servers: Sequence[Contestant]) -> str | None:
    if not any(contestant.family == "quire" for contestant in servers):
        return "name quire among --servers"
    return None if VLLM.installed else "vLLM is not installed: python benchmarks/peers/install_vllm.py"


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


def main(everyone: dict[str, Contestant] | None = None) -> None:
    everyone = everyone or contestants()
    arguments = parse_arguments(everyone)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 200)
    if arguments.list:
        _list(list(everyone.values()))
        return
    try:
        comparison = Comparison(plan_from(arguments, everyone, console), console)
        comparison.run()
    except (ValueError, OSError, ServerError) as problem:
        sys.exit(f"compare: {problem}")
    except KeyboardInterrupt:
        sys.exit(f"compare: stopped; what was measured by then is in {arguments.json}")
    comparison.show()
    if any(turn.problem is not None for turn in comparison.turns):
        sys.exit(1)


def _list(everyone: Sequence[Contestant]) -> None:
    absent = missing(everyone)
    for contestant in everyone:
        why = f" ({absent[contestant.name]})" if contestant.name in absent else ""
        print(f"{contestant.name:24}{contestant.what}{why}")


if __name__ == "__main__":
    main()
