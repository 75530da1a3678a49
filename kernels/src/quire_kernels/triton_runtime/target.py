"""The GPU on which a kernel is launched or for which it is compiled (the part that selects its configuration)."""

from dataclasses import dataclass

import torch

AMD_ARCHITECTURES = ("gfx942", "gfx950", "gfx1100")
"""AMD's GPUs for which every kernel is compiled and its registers and LDS are bounded; none has run on one yet."""


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU. Ahead-of-time compilation knows its architecture only.

    ``capability`` is 90 for NVIDIA's compute capability 9.0, and 0 in the interpreter and for AMD, which have none.
    ``amd`` is AMD's name of the architecture, such as "gfx942", and empty for others.
    """

    capability: int
    device_name: str | None = None
    amd: str = ""

    @classmethod
    def named(cls, name: str) -> "Target":
        """Return the target of an architecture's name, such as "sm_90" or "gfx942"."""
        return cls(int(name.removeprefix("sm_"))) if name.startswith("sm_") else cls(0, amd=name)

    @property
    def name(self) -> str:
        return self.amd or f"sm_{self.capability}"

    @classmethod
    def of_gpu(cls, capability: tuple[int, int], device_name: str, amd: str) -> "Target":
        """Return the target of a GPU that is present. Its compute capability means nothing if it is AMD's."""
        major, minor = capability
        return cls(0, device_name, amd) if amd else cls(10 * major + minor, device_name)

    @property
    def is_interpreter(self) -> bool:
        return self.capability == 0 and not self.amd

    @property
    def warp_size(self) -> int:
        """The threads of a warp (a wave): 64 on AMD's data center GPUs, which have architectures gfx9."""
        return 64 if self.amd.startswith("gfx9") else 32

    @property
    def converts_fp8(self) -> bool:
        """True if kernels may convert from and to float8 e4m3fn: from Ada on, and from AMD's gfx950 on."""
        return self.capability >= 89 or self.amd == "gfx950"


def amd_architecture(index: int) -> str:
    """Return AMD's name of a GPU's architecture without its features (gfx942, not gfx942:xnack-); "" for NVIDIA's."""
    if torch.version.hip is None:
        return ""
    return str(torch.cuda.get_device_properties(index).gcnArchName).partition(":")[0]


INTERPRETER = Target(capability=0, device_name="interpreter")
