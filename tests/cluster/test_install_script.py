"""requirements/install.sh: the packages for a lock and TORCH_SPEC, with a script instead of uv."""

import os
import subprocess
from pathlib import Path

import pytest

INSTALL = Path(__file__).parents[2] / "requirements" / "install.sh"
TORCH = ["torch==2.13.0 \\", "    --hash=sha256:a", "triton==3.7.1 \\", "    --hash=sha256:b"]
CUDA = ["cuda-toolkit==13.0 \\", "    --hash=sha256:c", "nvidia-cublas==13.1 \\", "    --hash=sha256:d"]
OTHERS = ["numpy==2.4 \\", "    --hash=sha256:e", "torchmetrics-like==1 \\", "    --hash=sha256:f"]
UV = """\
#!/bin/sh
for last; do :; done
echo "$@" | grep -q -- --no-deps || exit 7
if [ -f "$last" ]; then grep -o '^[a-z-]*' "$last"; else echo "$last"; fi >> {log}
"""


@pytest.mark.parametrize(
    ("lock", "specs", "installed"),
    [
        (CUDA + OTHERS + TORCH, [], ["cuda-toolkit", "nvidia-cublas", "numpy", "torchmetrics-like", "torch", "triton"]),
        (CUDA + OTHERS + TORCH, ["/mnt/torch.whl"], ["numpy", "torchmetrics-like", "/mnt/torch.whl"]),
        (TORCH, ["/mnt/torch.whl"], ["/mnt/torch.whl"]),
        (TORCH, ["/mnt/torch.whl", "triton-rocm"], ["triton-rocm"]),  # the stand-in writes the last one only
        (CUDA, ["/mnt/torch.whl"], []),
        (OTHERS, ["/mnt/torch.whl", "triton-rocm"], ["numpy", "torchmetrics-like"]),
    ],
    ids=["whole", "other torch", "part with torch", "torch and its Triton", "part with CUDA", "no torch in it"],
)
def test_packages_installed(tmp_path: Path, lock: list[str], specs: list[str], installed: list[str]) -> None:
    log, uv, lock_file = tmp_path / "log", tmp_path / "uv", tmp_path / "some.lock"
    log.touch()
    uv.write_text(UV.format(log=log))
    uv.chmod(0o755)
    lock_file.write_text("\n".join(lock) + "\n")
    environment = os.environ | {"UV": str(uv), "PYTHON": "python"}
    environment |= dict(zip(("TORCH_SPEC", "TRITON_SPEC"), specs, strict=False))
    done = subprocess.run([INSTALL, lock_file], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [name for name in log.read_text().split() if name] == installed
