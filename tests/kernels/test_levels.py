"""The CPU kernels at other CPU levels that this machine can run; AMX is emulated where the CPU has all but its tiles.

The lowest level shares the least code with this machine's own, and linear layers differ most between levels.
``QUIRE_EVERY_CPU_LEVEL`` adds all other levels and attention.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from level_processes import is_own, obstacle, start_of

from quire_kernels.precompiled.levels import LEVELS, CpuLevel

_HERE = Path(__file__).parent
EVERY = bool(os.environ.get("QUIRE_EVERY_CPU_LEVEL"))
TESTED = LEVELS if EVERY else LEVELS[-1:]
_FILES = (
    "test_packed_linear.py",
    "test_tiles.py",
    *(("test_paged_attention.py", "ops/test_paged_attention.py") if EVERY else ()),
)
# Tests that do not depend on the instructions, or repeat at length what others show.
_LEFT_OUT = "refuse or head_dims_and_groups or bend_the_scores"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("level", TESTED, ids=[level.name for level in TESTED])
def test_kernels_are_right_at_each_level(level: CpuLevel, tmp_path: Path) -> None:
    if reason := obstacle(level):
        pytest.skip(reason)
    if is_own(level):
        pytest.skip("this machine's own level, which the tests run without a choice of level")
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-k", f"not ({_LEFT_OUT})"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(_HERE / name) for name in _FILES)],
        env=start_of(level, tmp_path).environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-1000:]}"
