"""The engine's linear layers and families at lower CPU levels that this machine supports; `make soak` runs them.

The environment of a separate pytest sets the level as the engine does for its process. The machine code of each level
is cached between runs. ``tests/kernels/test_levels.py`` does the same for the kernels.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire_engine import kept
from quire_engine.cpu.limits import LEVELS, CpuLevel, limit_cpu
from quire_engine.ipc.process import compute_environment

ROOT = Path(__file__).parents[3]
TESTS = ("tests/engine/model/test_linear.py", "tests/engine/parity/test_native_families.py")
pytestmark = pytest.mark.skipif(
    not os.environ.get("QUIRE_EVERY_CPU_LEVEL"), reason="minutes for each level: `make soak` sets QUIRE_EVERY_CPU_LEVEL"
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("level", LEVELS[:-1])
def test_linear_layers_are_right_at_a_lower_cpu_level(level: CpuLevel, tmp_path: Path) -> None:
    limits = limit_cpu(kept.this_machine().flags, option=level, environment={})
    if limits.level != level or not limits.left_out:
        pytest.skip(f"this CPU has no level above {level}, at which all other tests run")
    environment = compute_environment(2, {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, limits)
    environment["NUMBA_CACHE_DIR"] = os.environ.get("NUMBA_CACHE_DIR", str(kept.file_of("numba", "any").parent))
    command = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS)
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-8000:]
