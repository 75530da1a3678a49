"""The CPU kernels at other CPU levels that this machine can run, and the emulator of AMX that one of them needs.

The highest and the lowest level share the least code with this machine's own; ``QUIRE_EVERY_CPU_LEVEL`` adds the rest.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from level_processes import AMX, is_own, obstacle, start_of

from quire_kernels.precompiled.levels import LEVELS, CpuLevel

_HERE = Path(__file__).parent
_FILES = ("test_packed_linear.py", "test_paged_attention.py", "test_tiles.py")
# Tests that do not depend on the instructions, or repeat at length what others show.
_LEFT_OUT = "refuse or head_dims_and_groups or bend_the_scores or soft_cap_bounds"


TESTED = LEVELS if os.environ.get("QUIRE_EVERY_CPU_LEVEL") else (LEVELS[0], LEVELS[-1])


@pytest.fixture(scope="session")
def emulator_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulator")


def skip_unless_it_runs(level: CpuLevel) -> None:
    if reason := obstacle(level):
        pytest.skip(reason)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("level", TESTED, ids=[level.name for level in TESTED])
def test_kernels_are_right_at_each_level(level: CpuLevel, emulator_folder: Path) -> None:
    skip_unless_it_runs(level)
    if is_own(level):
        pytest.skip("this machine's own level, which the tests run without a choice of level")
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-k", f"not ({_LEFT_OUT})"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(_HERE / name) for name in _FILES)],
        env=start_of(level, emulator_folder).environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-1000:]}"


_TILES = """
import sys
import quire_kernels  # before numba: it names the level
import numpy as np
from numba import njit
from quire_kernels.cpu_runtime.amx import request_permission
from quire_kernels.cpu_runtime.tiles import configure, release, tile_product

multiply = tile_product("tdpbusd", down=1, across=1)

@njit
def run(memory, rows, units, a, b, c, configures):
    if configures:
        configure(memory, rows, units)
    multiply(a, 0, 64, 64, b, 0, 0, 1024, 64, 1, c, 0, 0, 64, True)
    release()

permits, configures, rows, units = map(int, sys.argv[1:])
if permits:
    assert request_permission()
data = np.ones((3, 1024), np.uint8)
run(np.zeros(64, np.uint8), rows, units, data[0].ctypes.data, data[1].ctypes.data, data[2].ctypes.data, configures)
print(int(data[2].view(np.int32)[0]))
"""


@pytest.mark.parametrize(
    ("permits", "configures", "rows", "units", "status"),
    [
        (1, 1, 16, 16, 0),
        (1, 1, 3, 8, 0),
        (0, 1, 16, 16, -signal.SIGILL),
        (1, 0, 16, 16, -signal.SIGILL),
        (1, 1, 17, 16, -signal.SIGSEGV),
        (1, 1, 16, 17, -signal.SIGSEGV),
    ],
)
def test_tiles_trap_where_the_hardware_would(
    permits: int, configures: int, rows: int, units: int, status: int, emulator_folder: Path
) -> None:
    """A test under the emulator would otherwise pass with code that a CPU rejects."""
    skip_unless_it_runs(AMX)
    done = subprocess.run(
        [sys.executable, "-c", _TILES, *map(str, (permits, configures, rows, units))],
        env=start_of(AMX, emulator_folder).environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    if not status:
        assert done.stdout == f"{4 * units}\n"
