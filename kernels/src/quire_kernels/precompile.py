"""Ahead-of-time compilation of the CPU kernels, also for other machines.

Run ``python -m quire_kernels.precompile --out DIR`` during the build of an image, with the Python and the package path
that the image will have. A process that finds DIR in ``QUIRE_PRECOMPILED_KERNELS`` then compiles nothing
(``quire_kernels.precompiled``). No kernel is run, so levels above the CPU of this machine are possible. Each level is
compiled by its own process, because numba compiles for one CPU.
"""

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire_kernels.precompiled import VARIABLE, build
from quire_kernels.precompiled.levels import LEVELS, CpuLevel

_NAMES = tuple(level.name for level in LEVELS)
_ONE_LEVEL = "QUIRE_PRECOMPILE_LEVEL"


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        prog="python -m quire_kernels.precompile", description="Compile the CPU kernels ahead of time."
    )
    options.add_argument("--out", type=Path, required=True, metavar="DIR", help=f"to be named by {VARIABLE}")
    options.add_argument("--levels", nargs="+", choices=_NAMES, default=_NAMES, help="(default: all)", metavar="LEVEL")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="levels at a time (default: CPUs)")
    args = options.parse_args(arguments)
    levels = [level for level in LEVELS if level.name in args.levels]
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        print("levels are of x86-64 Linux: nothing is compiled ahead of time here", file=sys.stderr)
        return 0
    with ThreadPoolExecutor(max_workers=max(1, args.jobs)) as pool:
        found = list(pool.map(lambda level: _compile_level(level, args.out), levels))
    return 0 if all(found) else 1


def _compile_level(level: CpuLevel, out: Path) -> bool:
    """Compile a level in its own process into ``<out>/<build>/<level>``, which appears only when it is complete."""
    began = time.perf_counter()
    target = out / build() / level.name
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as made:
        environment = {
            **os.environ,
            "NUMBA_CPU_NAME": level.cpu,
            "NUMBA_CPU_FEATURES": level.feature_string,
            "NUMBA_CACHE_DIR": made,
            _ONE_LEVEL: level.name,
        }
        environment.pop(VARIABLE, None)
        child = subprocess.run([sys.executable, "-m", __spec__.name], env=environment, check=False)
        if child.returncode:
            print(f"{level.name}: its process ended with status {child.returncode}", file=sys.stderr)
            return False
        (filled,) = Path(made).iterdir()  # The only folder is that of this CPU's fingerprint.
        for lock in filled.glob("*.lock"):
            lock.unlink()
        shutil.rmtree(target, ignore_errors=True)
        filled.rename(target)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    print(f"{level.name}: {size / 1e6:.1f} MB in {time.perf_counter() - began:.0f} s", flush=True)
    return True


def _compile_workers(level: CpuLevel) -> None:
    import torch

    from quire_kernels.cpu_runtime import Worker

    root = Path(__file__).parent
    modules = [importlib.import_module(f"quire_kernels.{source.parent.name}.cpu") for source in root.glob("*/cpu.py")]
    modules.append(importlib.import_module("quire_kernels.cpu_runtime"))
    for worker in (found for module in modules for found in vars(module).values() if isinstance(found, Worker)):
        for storage in level.storage:
            worker.address(getattr(torch, storage))


if __name__ == "__main__":
    if name := os.environ.get(_ONE_LEVEL):
        _compile_workers(next(level for level in LEVELS if level.name == name))
    else:
        sys.exit(main())
