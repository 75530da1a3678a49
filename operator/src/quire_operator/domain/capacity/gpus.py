"""Common GPUs by name, and their actual memory.

The memory is what the driver reports, in MiB: less than the nominal size on NVIDIA's GPUs.
"""

import re
from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    memory_bytes: int
    has_fp8: bool
    """True for ``--quantization fp8``: from compute capability 8.9 on (Ada, Hopper), and not on AMD in this version."""

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("MI")


GPUS: tuple[Gpu, ...] = tuple(
    Gpu(name=name, memory_bytes=mebibytes * MIB, has_fp8=not name.startswith(("T4", "A10", "MI")))
    for name, mebibytes in (
        ("T4 16GB", 15_360),
        ("A10G 24GB", 23_028),
        ("L4 24GB", 23_034),
        ("RTX 4090 24GB", 24_564),
        ("A100 40GB", 40_960),
        ("L40S 48GB", 46_068),
        ("H100 80GB", 81_559),
        ("A100 80GB", 81_920),
        ("H200 141GB", 143_771),
        ("B200 180GB", 183_359),
        ("MI300X 192GB", 196_592),
        ("MI325X 256GB", 262_128),
        ("MI355X 288GB", 294_896),
    )
)
"""Sorted by memory, the smallest first."""
_MAKERS_AND_SOCKETS = frozenset({"nvidia", "tesla", "geforce", "amd", "instinct", "sxm", "sxm4", "sxm5", "pcie", "oam"})
"""Words in the names of drivers and node labels that do not change which of ``GPUS`` is meant."""


def find_gpu(text: str) -> Gpu | None:
    """Return the GPU that ``text`` names ("H100 80GB", "h100", "NVIDIA-A10G").

    Return None if it is ambiguous or a MIG slice, as in the node label "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb".
    """
    wanted = set(_words(text)) - _MAKERS_AND_SOCKETS
    if "mig" in wanted:
        return None
    exact = [gpu for gpu in GPUS if wanted >= set(_words(gpu.name))]
    if len(exact) == 1:
        return exact[0]
    partial = [gpu for gpu in GPUS if wanted and wanted <= set(_words(gpu.name))]
    return partial[0] if len(partial) == 1 else None


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())
