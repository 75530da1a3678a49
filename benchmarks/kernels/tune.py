#!/usr/bin/env python3
"""Find the launch configurations for this GPU, and write them where the kernels look for them.

Run the cases of run.py, record which kernels and keys they use, and try values of each parameter one after the other
(the "space" of the op's table). A configuration counts only if the results are correct. Trials are stored in out/tune,
so an interrupted run continues. Nothing is tuned at run time; only this program writes such a table.
"""

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from benchmarks.kernels.tuning import Found, Parameters, Trials, by_share, merged, search
from benchmarks.report import show_table, write_json

if TYPE_CHECKING:
    from benchmarks.kernels.kernel_cases import Case, Prepared, Result


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", help="only these ops")
    parser.add_argument("--quick", action="store_true", help="only on the cases that run.py --quick has")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=420.0, help="time to spend; run again to go on (default 420)")
    parser.add_argument("--output", type=Path, help="folder of the table (default: the package's configs/devices)")
    parser.add_argument("--state", type=Path, default=Path("out/tune"), help="folder of what was tried")
    return parser.parse_args()


class Subject:
    """One case, prepared once, and its correct results."""

    def __init__(self, case: "Case", prepared: "Prepared") -> None:
        self.case = case
        self.prepared = prepared
        self._expected: Result | None = None

    def seconds(self, time: Callable[[Callable[[], object]], float]) -> float | None:
        """Return the time; None if the result is wrong or the launch fails."""
        from benchmarks.kernels.kernel_cases import compare

        prepared = self.prepared
        if self._expected is None:
            self._expected = prepared.expected()
        try:
            found = prepared.result() if prepared.result is not None else prepared.compared(prepared.call())
            if not compare(prepared, found, self._expected).holds:
                return None
            return time(prepared.call)
        # Too much shared memory, too many registers, a rejected shape: not a configuration for this GPU.
        except Exception:
            return None


def asked_by(prepared: "Prepared") -> set[tuple[str, str]]:
    from quire_kernels.triton_runtime import config

    with config.recorded() as asked:
        prepared.call()
    return asked


def tune_op(cases: list["Case"], tuner: "Tuner") -> None:
    """Tune all keys that the op's cases use, each on the cases that use it."""
    from benchmarks.kernels.kernel_cases import gist

    subjects: list[tuple[Subject, set[tuple[str, str]]]] = []
    for case in cases:
        try:
            prepared = case.prepare(tuner.device, tuner.dtype)
            subjects.append((Subject(case, prepared), asked_by(prepared)))
        # A case that this GPU cannot hold or run must not affect the others.
        except Exception as error:
            print(f"{case}: left out: {gist(error)}", file=sys.stderr)
    for kernel, key in sorted({pair for _, asked in subjects for pair in asked}, key=by_share):
        if tuner.time_is_up():
            return
        tuner.tune(kernel, key, [subject for subject, asked in subjects if (kernel, key) in asked])


class Tuner:
    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch
        import triton

        from benchmarks.kernels.gpu_timing import Timer
        from quire_kernels.triton_runtime.config import FOLDER, device_file_name
        from quire_kernels.triton_runtime.device import target_of

        self.device = torch.device("cuda", torch.cuda.current_device())
        self.dtype = getattr(torch, arguments.dtype)
        self._target = target_of(self.device)
        self._timer = Timer(self.device)
        self._ends = perf_counter() + arguments.seconds
        name = device_file_name(torch.cuda.get_device_name(self.device))
        self.path: Path = (arguments.output or FOLDER / "devices") / name
        machine = {
            "device": torch.cuda.get_device_name(self.device),
            "capability": self._target.capability,
            "dtype": arguments.dtype,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        }
        self._header = {name: machine[name] for name in ("device", "capability", "torch", "triton")}
        self._trials = Trials.read(arguments.state / name, machine)
        self.rows: list[list[str]] = []

    def time_is_up(self) -> bool:
        return perf_counter() > self._ends

    def tune(self, kernel: str, key: str, subjects: list[Subject]) -> None:
        from quire_kernels.triton_runtime.config import config_for, launch_config, op_tables, override

        def score(parameters: Parameters) -> float | None:
            """Return the geometric mean over the cases."""
            with override(kernel, key, launch_config(parameters)):
                times = [subject.seconds(lambda call: self._timer.time(call, most=30).median) for subject in subjects]
            if any(time is None for time in times):
                return None
            return math.exp(sum(math.log(time) for time in times if time is not None) / len(times))

        op, _, name = kernel.partition(".")
        space = op_tables(op)[name].space
        default = config_for(kernel, self._target, key).options
        found = search(space, default, self._trials.remembered(kernel, key, score), self.time_is_up)
        if found.worth_writing:
            self._write(kernel, key, found.best)
        self._say(kernel, key, default, found)

    def _write(self, kernel: str, key: str, parameters: Parameters) -> None:
        table = json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else None
        write_json(self.path, {**self._header, **merged(table, kernel, key, parameters)} | self._header)

    def _say(self, kernel: str, key: str, default: Mapping[str, int], found: Found) -> None:
        changed = {name: value for name, value in found.best.items() if value != default[name]}
        if found.seconds is None:
            said = "nothing works"
        elif found.default_seconds is None:
            said = f"{found.seconds * 1e6:,.1f} µs; the default does not work"
        else:
            said = f"{found.default_seconds * 1e6:,.1f} -> {found.seconds * 1e6:,.1f} µs"
        how = ", ".join(f"{name} {default[name]} -> {value}" for name, value in changed.items())
        kept = how if found.worth_writing else "default kept"
        self.rows.append([f"{kernel} [{key}]", said, kept + ("" if found.finished else " (unfinished)")])
        print(f"{kernel} [{key}]: {said}: {kept}", file=sys.stderr, flush=True)


def main() -> None:
    arguments = parse_arguments()
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET=1 is set: an interpreter has nothing to tune; unset it")
    try:
        import torch
    except ImportError:
        raise SystemExit("torch is not installed here") from None
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: configurations are found by measuring; run this on the GPU that they are for")
    from benchmarks.kernels.run import chosen_cases

    cases = chosen_cases(arguments, tiny=False)
    tuner = Tuner(arguments)
    for op in sorted({case.op for case in cases}, key=lambda op: by_share((op, ""))):
        if tuner.time_is_up():
            print(f"the time was up before {op}; run again to go on", file=sys.stderr)
            break
        tune_op([case for case in cases if case.op == op], tuner)
    show_table(f"Tuned for {tuner.path.stem}", ["kernel [key]", "time", "change"], tuner.rows, [f"table: {tuner.path}"])


if __name__ == "__main__":
    main()
