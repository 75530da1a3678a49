"""The engine's tests at every lower CPU level that this machine supports, with the instructions of older CPUs.

The environment of a separate pytest sets the level as the engine does for its process. The machine code of each level
is cached between runs.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire_engine.config import DeviceOptions
from quire_engine.cpu.choice import find_out
from quire_engine.cpu.limits import LEVELS, CpuLevel
from quire_engine.ipc.process import compute_environment

ROOT = Path(__file__).parents[3]
TESTS = (
    "tests/engine/model/test_linear.py",
    "tests/engine/parity/test_native_families.py",
    "tests/kernels/test_packed_linear.py",
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("level", LEVELS)
def test_engine_works_at_every_lower_cpu_level(level: CpuLevel, tmp_path: Path) -> None:
    choice = find_out(DeviceOptions(cpu_level=level)).choice()
    highest = find_out(DeviceOptions()).choice()
    if choice is None or highest is None or highest.limits.level is None:
        pytest.skip("this kind of machine has no levels")
    if LEVELS.index(level) >= LEVELS.index(highest.limits.level):
        pytest.skip(f"this CPU works up to {highest.limits.level}, at which all other tests run")
    environment = compute_environment(2, {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, choice.limits)
    environment["NUMBA_CACHE_DIR"] = str(_numba_folder())
    command = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS)
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-8000:]


def _numba_folder() -> Path:
    """Return the folder of machine code that every run on this machine shares; each level has a folder below it."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "quire" / "numba"
