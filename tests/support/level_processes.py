"""Processes whose kernels are compiled for another CPU level than this machine's own.

A level that exceeds this machine only in AMX can run: its tile instructions trap, and ``amx_emulator.c``, preloaded
into the process, computes them.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from quire_kernels.precompiled import LEVEL_VARIABLE, VARIABLE
from quire_kernels.precompiled.levels import LEVELS, CpuLevel, cpu_flags, highest_level

AMX = next(level for level in LEVELS if "amx-tile" in level.features)
_TILE_FLAGS = {"amx_tile", "amx_bf16", "amx_int8"}
_SOURCE = Path(__file__).with_name("amx_emulator.c")


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelProcess:
    """The start of a process of a level on this machine."""

    level: CpuLevel
    preload: Path | None
    """The emulator, if the level needs it."""

    def environment(self) -> dict[str, str]:
        found = {**os.environ, LEVEL_VARIABLE: self.level.name}
        for other in (VARIABLE, "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
            found.pop(other, None)
        if self.preload is not None:
            found["LD_PRELOAD"] = str(self.preload)
        return found


def is_own(level: CpuLevel) -> bool:
    """Return whether ordinary tests run the code of this level, since it is this machine's highest."""
    return level == highest_level(cpu_flags())


def obstacle(level: CpuLevel) -> str | None:
    """Return why no process of this level can run here, or None."""
    if sys.platform != "linux":
        return "levels are of x86-64 Linux"
    if missing := level.flags - cpu_flags():
        if level is not AMX or missing != _TILE_FLAGS:
            return f"this CPU lacks {', '.join(sorted(missing))}"
        if shutil.which("cc") is None:
            return "this CPU lacks AMX, and there is no C compiler for the emulator of its instructions"
    return None


def start_of(level: CpuLevel, folder: Path) -> LevelProcess:
    """Return how to start a process of a level without an ``obstacle``; ``folder`` gets the emulator."""
    if level.flags <= cpu_flags():
        return LevelProcess(level=level, preload=None)
    library = folder / "amx_emulator.so"
    if not library.exists():
        options = ["-O3", "-mavx2", "-mfma", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        subprocess.run(["cc", *options, "-o", str(library), str(_SOURCE)], check=True)
    return LevelProcess(level=level, preload=library)
