"""AMD's GPUs: what the kernels accept by architecture, and launches that are compiled for one and not run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="torch's CPU build comes without triton")

from gpu_stand_in import cpu_device

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.errors import UnsupportedDeviceError
from quire_kernels.triton_runtime import device
from quire_kernels.triton_runtime.target import Target

CPU = torch.device("cpu")
LAUNCH = """
import torch
from gpu_stand_in import standing_in
from quire_kernels.rms_norm import rms_norm

seen = []
with standing_in("gfx942") as stand_in:
    stand_in.observe = seen.append
    rows = torch.zeros(4, 128, dtype=torch.bfloat16)
    for _ in range(2):
        rms_norm(rows, rows[0].clone(), 1e-5)
print([(launched.kernel, launched.arguments["rows"]) for launched in seen])
"""


def properties(amd: str) -> device.DeviceProperties:
    """Return what torch reports for a GPU of AMD, whose compute capability looks like one of Hopper."""
    return device.DeviceProperties(
        name="AMD Instinct", capability=(9, 4), amd=amd, multiprocessors=304, shared_memory_bytes=64 << 10
    )


@pytest.mark.parametrize(
    ("amd", "problem", "fp8_problem"),
    [
        ("gfx942", None, r"\(gfx942\) cannot convert from and to float8_e4m3fn"),
        ("gfx950", None, None),
        ("gfx1100", None, r"\(gfx1100\) cannot convert"),
        (
            "gfx90a",
            "architecture gfx90a; the Triton kernels are compiled for gfx942, gfx950, gfx1100",
            "cannot convert",
        ),
    ],
)
def test_architecture_decides_on_amd_gpus(amd: str, problem: str | None, fp8_problem: str | None) -> None:
    with cpu_device(properties(amd)):
        assert device.target_of(CPU) == Target(0, "AMD Instinct", amd)
        for check, expected in ((device.require_device, problem), (device.require_fp8, fp8_problem)):
            if expected is None:
                check("op", CPU)
            else:
                with pytest.raises(UnsupportedDeviceError, match=expected):
                    check("op", CPU)


@pytest.mark.skipif(INTERPRETED, reason="compiles kernels")
@pytest.mark.timeout(600)
def test_launch_for_amd_matches_compiled_signature() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    command = [sys.executable, "-c", LAUNCH]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[('_rms_norm_kernel', 4), ('_rms_norm_kernel', 4)]"
