#!/usr/bin/env python3
"""Measure every kernel on this GPU: correctness, time, share of the GPU's rates, and other libraries' kernels.

Bandwidth and GEMM rate are measured in the same run; L2 is flushed before every call; times are medians. The rows are
written as JSON after each case, so an interrupted run keeps its results. Without a GPU, small cases are compared with
their references in Triton's interpreter, and skipped parts are listed.
"""

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.report import ROOT, interrupt_on_terminate, show_table, write_json

if TYPE_CHECKING:
    from benchmarks.kernels.gpu_timing import Card
    from benchmarks.kernels.kernel_cases import Case
    from benchmarks.kernels.measuring import Row

DEFAULT_JSON = Path("out/bench/kernels.json")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a case or two of each op")
    parser.add_argument("--op", nargs="+", help="only these ops")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=420.0, help="begin no case after these (default 420)")
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, help=f"default {DEFAULT_JSON}")
    parser.add_argument("--interpreted", action="store_true", help="the small cases, in Triton's interpreter, only")
    return parser.parse_args()


# --- with a GPU ---


def all_cases(*, tiny: bool) -> list["Case"]:
    from benchmarks.kernels import cases_attention, cases_layers, cases_products, cases_sampling

    modules = (cases_attention, cases_layers, cases_products, cases_sampling)
    return [case for module in modules for case in (module.tiny_cases() if tiny else module.cases())]


def chosen_cases(arguments: argparse.Namespace, *, tiny: bool) -> list["Case"]:
    cases = all_cases(tiny=tiny)
    if arguments.op:
        known = sorted({case.op for case in cases})
        if unknown := [op for op in arguments.op if op not in known]:
            raise SystemExit(f"--op: there is no {', '.join(unknown)}; there are {', '.join(known)}")
        cases = [case for case in cases if case.op in arguments.op]
    if arguments.quick and not tiny:
        cases = [case for case in cases if case.quick]
    return cases


def machine() -> dict[str, Any]:
    import torch
    import triton

    from benchmarks.kernels import peers

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "capability": list(torch.cuda.get_device_capability(0)),
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "peers": peers.versions(),
    }


def run_on_gpu(arguments: argparse.Namespace) -> int:
    import torch

    from benchmarks.kernels.gpu_timing import Timer, measure_card
    from benchmarks.kernels.measuring import measure

    began = perf_counter()
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = getattr(torch, arguments.dtype)
    cases = chosen_cases(arguments, tiny=False)
    timer = Timer(device)
    card = measure_card(timer, device)
    found = {"machine": machine(), "card": asdict(card), "dtype": arguments.dtype, "rows": [], "not_measured": []}
    rows: list[Row] = []
    interrupt_on_terminate()
    waiting = list(cases)
    try:
        while waiting and perf_counter() - began < arguments.seconds:
            row = measure(waiting[0], device, dtype, timer, card)
            waiting.pop(0)
            rows.append(row)
            found["rows"].append(asdict(row))
            found["not_measured"] = [str(case) for case in waiting]
            write_json(arguments.json, found)
            print(f"[{perf_counter() - began:5.0f} s] {row.op}: {row.case}: {brief(row)}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopped early", file=sys.stderr)
    show(rows, found["machine"], card, [str(case) for case in waiting])
    return 1 if any(row.wrong for row in rows) else 0


# --- what a person sees ---


def brief(row: "Row") -> str:
    if row.failed is not None:
        return row.failed
    if row.seconds is None:
        return "right"
    return f"{row.seconds * 1e6:,.1f} µs, {reached(row)}, {share(row)}"


def memory_bound(row: "Row") -> bool:
    """Return whether memory, not compute, limits the case."""
    return row.gemm_share is None or (row.bandwidth_share or 0.0) >= row.gemm_share


def reached(row: "Row") -> str:
    return f"{row.bytes_per_second / 1e9:,.0f} GB/s" if memory_bound(row) else f"{row.flops / 1e12:,.0f} TFLOP/s"


def share(row: "Row") -> str:
    if memory_bound(row):
        return f"{row.bandwidth_share or 0.0:.0%} of bandwidth"
    return f"{row.gemm_share or 0.0:.0%} of GEMM"


def peer_cell(row: "Row") -> str:
    timed = [f"{name} {peer.ratio:.2f}x" for name, peer in row.peers.items() if peer.ratio is not None]
    return ", ".join(timed)


def show(rows: Sequence["Row"], machine: dict[str, Any], card: "Card", missing: Sequence[str]) -> None:
    lines = []
    for row in rows:
        if row.seconds is None:
            lines.append([f"{row.op}: {row.case}", "failed", "", "", "", ""])
        else:
            time = f"{row.seconds * 1e6:,.1f}"
            lines.append([f"{row.op}: {row.case}", time, reached(row), share(row), f"{row.error:.1e}", peer_cell(row)])
    gemm = ", ".join(f"{name} {flops / 1e12:,.0f} TFLOP/s" for name, flops in card.gemm_flops.items())
    refused = {f"{name}: {peer.failed}" for row in rows for name, peer in row.peers.items() if peer.failed is not None}
    notes = [
        f"{machine['device']}; torch {machine['torch']}, Triton {machine['triton']}, Python {machine['python']}",
        f"read {card.read_bytes_per_second / 1e9:,.0f} GB/s, copy {card.copy_bytes_per_second / 1e9:,.0f} GB/s, {gemm}",
        f"peers: time over ours, above 1 ours is faster; installed: {machine['peers'] or 'torch only'}",
        *(f"peers refused or wrong: {line}" for line in sorted(refused)),
        *(f"{row.op}: {row.case}: {row.failed}" for row in rows if row.failed is not None),
    ]
    if missing:
        notes.append(f"not measured, the time was up: {'; '.join(missing)}")
    columns = ["case", "µs", "reached", "share", "error", "peers"]
    show_table("Kernels: medians with a cold L2 cache", columns, lines, notes)


# --- without one ---


def run_interpreted(arguments: argparse.Namespace) -> int:
    """Compare the cases in a process with TRITON_INTERPRET=1."""
    import torch

    from benchmarks.kernels.measuring import measure

    rows = []
    for case in chosen_cases(arguments, tiny=True):
        row = measure(case, torch.device("cpu"), torch.float16, None, None)
        outcome = "right" if row.failed is None else "failed"
        rows.append([f"{row.op}: {row.case}", outcome, "" if row.error is None else f"{row.error:.1e}"])
        if row.failed is not None:
            print(f"{case}: {row.failed}", file=sys.stderr)
    show_table("Small cases in Triton's interpreter, float16, against their references", ["case", "", "error"], rows)
    write_json(
        arguments.json, {"interpreted": [dict(zip(("case", "outcome", "error"), row, strict=True)) for row in rows]}
    )
    return 0 if all(row[1] == "right" for row in rows) else 1


def run_without_gpu(arguments: argparse.Namespace) -> int:
    print("No GPU here: nothing is timed. Small cases run in Triton's interpreter.", flush=True)
    command = [sys.executable, "-m", "benchmarks.kernels.run", "--interpreted", "--json", str(arguments.json)]
    if arguments.op:
        command += ["--op", *arguments.op]
    failed = subprocess.run(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode
    skipped = (
        "times, shares of bandwidth and GEMM rate, ratios to other kernels, bfloat16, compiling (make kernels-aot)"
    )
    print(f"Skipped, as there is no GPU: {skipped}.")
    return failed


def main() -> None:
    arguments = parse_arguments()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if arguments.interpreted and not interpreted:
        raise SystemExit("--interpreted: set TRITON_INTERPRET=1 as well; Triton reads it as kernels are defined")
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        raise SystemExit(f"{error.name} is not installed here: no kernel can run") from None
    if interpreted:
        raise SystemExit(run_interpreted(arguments))
    if not torch.cuda.is_available():
        raise SystemExit(run_without_gpu(arguments))
    raise SystemExit(run_on_gpu(arguments))


if __name__ == "__main__":
    main()
