#!/usr/bin/env python3
"""Compile every Triton kernel for GPUs that need not be present, and compare it with its bounds.

Print, by case and target, registers per thread and KiB of shared memory per block (and stack or local bytes if there
are any), write the same as JSON, and fail if a case does not compile or exceeds aot_bounds.json. Compiled code is
cached in ${XDG_CACHE_HOME:-~/.cache}/quire/triton-aot unless TRITON_CACHE_DIR is set.
"""

import argparse
import contextlib
import functools
import io
import multiprocessing
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

from benchmarks.kernels import aot_bounds
from benchmarks.kernels.aot_bounds import Bounds, Measured
from benchmarks.report import show_table, usable_cpus, write_json

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", "gfx1100")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=_target, nargs="+", default=TARGETS, help=f"default: {', '.join(TARGETS)}")
    parser.add_argument("--op", nargs="+", help="only these (default: every op with a kernel)")
    parser.add_argument("--jobs", type=int, default=len(usable_cpus()), help="default: all CPUs")
    parser.add_argument("--json", type=Path, help="write what was found there as well")
    parser.add_argument("--update", action="store_true", help="set the bounds to what is found now, rounded up")
    parser.add_argument("--widen", action="store_true", help="raise the bounds that what is found now exceeds")
    return parser.parse_args()


def _target(text: str) -> str:
    name = f"sm_{text}" if text.isdigit() else text
    if name not in aot_bounds.SHARED_LIMITS:
        raise argparse.ArgumentTypeError(f"{text!r} should be one of {', '.join(aot_bounds.SHARED_LIMITS)}")
    return name


def use_cache_folder() -> None:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    os.environ.setdefault("TRITON_CACHE_DIR", str(home / "quire" / "triton-aot"))


def measure(ops: Iterable[str], targets: Iterable[str], jobs: int) -> list[Measured]:
    """Return the measurement of every case of every op on every target, in order."""
    from benchmarks.kernels.aot_cases import cases_of
    from quire_kernels.triton_runtime.target import Target

    tasks = [(op, case.name, name) for op in ops for name in targets for case in cases_of(op, Target.named(name))]
    # Not forked, because a process that has imported torch has threads.
    with ProcessPoolExecutor(max(1, jobs), mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_measure_one, tasks))


def _measure_one(task: tuple[str, str, str]) -> Measured:
    from benchmarks.kernels.aot_compile import AotError, compile_case
    from quire_kernels.triton_runtime.target import Target

    op, name, target = task
    case = _cases(op, target)[name]
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # a failed compilation prints its assembly
            usage = compile_case(op, case, Target.named(target))
    except AotError as error:
        return Measured(op=op, case=name, target=target, decode_path=case.decode_path, error=str(error))
    return Measured(
        op=op,
        case=name,
        target=target,
        decode_path=case.decode_path,
        usage=asdict(usage),
        programs_per_sm=case.programs_per_sm,
        resident_programs=usage.resident_programs(Target.named(target), case.launch.constants["num_warps"]),
    )


@functools.cache
def _cases(op: str, target: str):  # type: ignore[no-untyped-def]
    from benchmarks.kernels.aot_cases import cases_of
    from quire_kernels.triton_runtime.target import Target

    return {case.name: case for case in cases_of(op, Target.named(target))}


def cell(one: Measured | None) -> str:
    if one is None:
        return ""
    if one.usage is None:
        return "fails"
    text = f"{one.usage['registers']} / {one.usage['shared_bytes'] / 1024:.3g}"
    spilled = [
        f"{field.removesuffix('_bytes')} {one.usage[field]}" for field in aot_bounds.FIELDS[1:3] if one.usage[field]
    ]
    return " ".join([text, *spilled])


def show(measured: list[Measured], targets: Iterable[str], notes: list[str]) -> None:
    by_place = {(one.op, one.case, one.target): one for one in measured}
    rows = []
    for op, case in dict.fromkeys((one.op, one.case) for one in measured):
        cells = [cell(by_place.get((op, case, target))) for target in targets]
        decode = any(one.decode_path for one in measured if (one.op, one.case) == (op, case))
        rows.append([f"{op}: {case}", "yes" if decode else "", *cells])
    columns = ["kernel", "decode", *targets]
    show_table("Registers per thread / KiB of shared memory per block", columns, rows, notes)


def main() -> None:
    arguments = parse_arguments()
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET=1 is set: nothing would be compiled; unset it")
    use_cache_folder()
    try:
        import triton
    except ImportError:
        raise SystemExit(
            "triton is not installed here (torch's CPU build comes without): nothing can be compiled"
        ) from None
    from benchmarks.kernels.aot_cases import CALLS

    ops = arguments.op or list(CALLS)
    if unknown := [op for op in ops if op not in CALLS]:
        raise SystemExit(f"--op: there is no {', '.join(unknown)}; there are {', '.join(CALLS)}")
    began = perf_counter()
    measured = measure(ops, arguments.target, arguments.jobs)
    seconds = perf_counter() - began
    note = (
        f"Triton {triton.__version__}, {len(measured)} compilations in {seconds:.0f} s with {arguments.jobs} processes"
    )
    show(measured, arguments.target, [note])
    if arguments.json:
        write_json(arguments.json, {"triton": triton.__version__, "cases": [asdict(one) for one in measured]})
    bounds: Bounds = aot_bounds.read()
    if arguments.update or arguments.widen:
        bounds = aot_bounds.updated(bounds, measured, widen=not arguments.update)
        aot_bounds.write(bounds)
    wrong = aot_bounds.complaints(measured, bounds)
    for complaint in wrong:
        print(complaint, file=sys.stderr)
    if wrong:
        raise SystemExit(f"{len(wrong)} complaints")


if __name__ == "__main__":
    main()
