"""Levels of x86-64 CPUs for which kernels are compiled ahead of time: one for each variant of the kernels.

``cpu_runtime.features`` tests for AVX-512 and for products of bytes, of bfloat16 and of whole tiles. Every combination
of these four on a CPU with AVX2 is a level here, so that code for a level always uses the same variant as code for the
exact CPU. All other features of the CPU are disabled, so that one cache of machine code serves every CPU of a level.
All functions except ``cpu_flags`` are pure.
"""

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLevel:
    name: str
    cpu: str
    """LLVM's name of a real CPU whose tuning the code gets: with LLVM's own ``x86-64-v4`` sampling was 1.4 times
    slower."""
    features: frozenset[str]
    """LLVM's names of all features that the code may use."""
    storage: tuple[str, ...]
    """torch's names of the types in which models run at this level by default."""

    @property
    def feature_string(self) -> str:
        """Return the features in LLVM's format: those that the code may use; all other known features are disabled."""
        forbidden = sorted(KNOWN - self.features)
        return ",".join((*(f"+{name}" for name in sorted(self.features)), *(f"-{name}" for name in forbidden)))

    @property
    def flags(self) -> frozenset[str]:
        """Return Linux's names of the features."""
        return frozenset(_FLAGS.get(feature, feature) for feature in self.features)


_FLAGS = {
    "64bit": "lm",
    "amx-bf16": "amx_bf16",
    "amx-int8": "amx_int8",
    "amx-tile": "amx_tile",
    "avx512bf16": "avx512_bf16",
    "avx512vnni": "avx512_vnni",
    "avxvnni": "avx_vnni",
    "bmi": "bmi1",
    "crc32": "sse4_2",
    "lzcnt": "abm",
    "sahf": "lahf_lm",
    "sse3": "pni",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
}
"""The features whose names differ between Linux and LLVM."""

# fmt: off
_V3 = frozenset({
    "64bit", "avx", "avx2", "bmi", "bmi2", "cmov", "crc32", "cx16", "cx8", "f16c", "fma", "fxsr",
    "lzcnt", "mmx", "movbe", "popcnt", "sahf", "sse", "sse2", "sse3", "sse4.1", "sse4.2", "ssse3", "xsave",
})
# fmt: on
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_BF16 = _V4 | {"avx512vnni", "avx512bf16"}


# fmt: off
KNOWN = _BF16 | {"avxvnni"} | {
    "adx", "aes", "amx-avx512", "amx-bf16", "amx-complex", "amx-fp16", "amx-fp8", "amx-int8", "amx-movrs",
    "amx-tf32", "amx-tile", "avx10.1", "avx10.2", "avx512bitalg", "avx512fp16", "avx512ifma", "avx512vbmi",
    "avx512vbmi2", "avx512vp2intersect", "avx512vpopcntdq", "avxifma", "avxneconvert", "avxvnniint16",
    "avxvnniint8", "ccmp", "cf", "cldemote", "clflushopt", "clwb", "clzero", "cmpccxadd", "egpr", "enqcmd",
    "fma4", "fsgsbase", "gfni", "hreset", "invpcid", "kl", "lwp", "movdir64b", "movdiri", "movrs", "mwaitx",
    "ndd", "nf", "pclmul", "pconfig", "pku", "ppx", "prefetchi", "prfchw", "ptwrite", "push2pop2", "raoint",
    "rdpid", "rdpru", "rdrnd", "rdseed", "rtm", "serialize", "sgx", "sha", "sha512", "shstk", "sm3", "sm4",
    "sse4a", "tbm", "tsxldtrk", "uintr", "usermsr", "vaes", "vpclmulqdq", "waitpkg", "wbnoinvd", "widekl",
    "xop", "xsavec", "xsaveopt", "xsaves", "zu",
}
"""All CPU features that LLVM 22 knows."""
# fmt: on


def _level(name: str, cpu: str, features: frozenset[str], *storage: str) -> CpuLevel:
    return CpuLevel(name=name, cpu=cpu, features=features, storage=storage)


LEVELS = (
    _level("x86-64-v4-amx", "sapphirerapids", _BF16 | {"amx-tile", "amx-bf16", "amx-int8"}, "bfloat16", "float32"),
    _level("x86-64-v4-bf16", "znver4", _BF16, "bfloat16", "float32"),
    _level("x86-64-v4-vnni", "cascadelake", _V4 | {"avx512vnni"}, "float32"),
    _level("x86-64-v4", "skylake-avx512", _V4, "float32"),
    _level("x86-64-v3-vnni", "alderlake", _V3 | {"avxvnni"}, "float32"),
    _level("x86-64-v3", "haswell", _V3, "float32"),
)
"""All levels, the highest first."""


def highest_level(flags: Set[str]) -> CpuLevel | None:
    """Return the highest level of a CPU with these flags (Linux's names), or None."""
    return next((level for level in LEVELS if flags >= level.flags), None)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the flags of the first CPU; an empty set if the system does not list them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
