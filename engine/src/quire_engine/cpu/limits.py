"""The decision which CPU instructions an engine process may use: a pure function of what failed.

A *level* is the name that people choose and read: ``avx2``, ``avx512``, ``avx512-bf16``, ``amx``. An engine process is
limited to a level by the variables that oneDNN, torch, MKL and our own kernels read when they are loaded. A
variable is set only if the CPU reports more than may be used, and never above a user's own value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

CpuLevel = Literal["avx2", "avx512", "avx512-bf16", "amx"]

LEVELS: tuple[CpuLevel, ...] = ("avx2", "avx512", "avx512-bf16", "amx")
"""All levels, from the lowest to the highest."""

_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _V4 | {"avx512_vnni", "avx512_bf16"}
KERNELS: tuple[tuple[str, CpuLevel, frozenset[str]], ...] = (
    ("x86-64-v3", "avx2", _V3),
    ("x86-64-v3-vnni", "avx2", _V3 | {"avx_vnni"}),
    ("x86-64-v4", "avx512", _V4),
    ("x86-64-v4-vnni", "avx512", _V4 | {"avx512_vnni"}),
    ("x86-64-v4-bf16", "avx512-bf16", _BF16),
    ("x86-64-v4-amx", "amx", _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}),
)
"""The levels of our kernels, from the lowest to the highest, and the flags (Linux's names) that a CPU of each lists.

A contract test checks the names and flags against ``quire_kernels``.
"""

KERNELS_VARIABLE = "QUIRE_KERNELS_LEVEL"
"""The variable that limits our own kernels to one of ``quire_kernels.precompiled.levels``."""
ONEDNN_VARIABLE = "ONEDNN_MAX_CPU_ISA"

ORDERS: Mapping[str, tuple[str, ...]] = {
    ONEDNN_VARIABLE: (
        "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16",
        "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16", "AVX10_1_512", "AVX10_1_512_AMX",
        "AVX10_1_512_AMX_FP16", "DEFAULT", "ALL",
    ),
    "ATEN_CPU_CAPABILITY": ("default", "avx2", "avx512", "amx"),
    "MKL_ENABLE_INSTRUCTIONS": (
        "SSE4_2", "AVX", "AVX2", "AVX2_E1", "AVX512", "AVX512_E1", "AVX512_E2", "AVX512_E3", "AVX512_E4",
    ),
    KERNELS_VARIABLE: tuple(name for name, _, _ in KERNELS),
}  # fmt: skip
"""The values of each library's variable, from the lowest to the highest."""

_LIBRARIES: Mapping[CpuLevel, Mapping[str, str]] = {
    "avx2": {
        ONEDNN_VARIABLE: "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {ONEDNN_VARIABLE: "AVX512_CORE_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX512_E2"},
    "avx512-bf16": {ONEDNN_VARIABLE: "AVX512_CORE_FP16", "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3"},
    # On some virtual machines oneDNN's tiles trap although our own work (ADR 0058).
    "amx": {ONEDNN_VARIABLE: "AVX512_CORE_FP16"},
}
"""The limits of torch's libraries at a level below the CPU's, or at the CPU's own where they fail without a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The failures on a machine; a file in the cache folder."""

    facts: tuple[str, ...]
    unlimited: str | None = None
    """The failure of the self-test at the CPU's own level without limits for torch's libraries."""
    failed: dict[CpuLevel, str] = field(default_factory=dict)
    """The failure of each level in the self-test or in an engine process; nothing above it is used either."""


NOTHING_FAILED = Findings(facts=())


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLimits:
    """The CPU instructions that an engine process may use."""

    level: CpuLevel | None
    """None for a CPU without AVX2, which has no limit."""
    kernels: str | None
    """The level of our own kernels, by its name in ``quire_kernels``."""
    environment: dict[str, str]
    left_out: dict[str, str] = field(default_factory=dict)
    """The features that the CPU reports and the engine does not use, and the reason for each."""

    @property
    def lower(self) -> CpuLevel | None:
        """The next lower level, or None."""
        place = 0 if self.level is None else LEVELS.index(self.level)
        return LEVELS[place - 1] if place else None

    @property
    def multiplies_bfloat16(self) -> bool:
        """True if the hardware multiplies bfloat16; without it the emulation is hundreds of times slower."""
        return self.level in ("avx512-bf16", "amx")

    def as_json(self) -> dict[str, Any]:
        """Return the limits as JSON for other programs."""
        return {
            "level": self.level,
            "kernels": self.kernels,
            "environment": self.environment,
            "left_out": [{"feature": feature, "reason": reason} for feature, reason in self.left_out.items()],
        }

    @property
    def sentence(self) -> str:
        """The level and the unused features, for logs and reports."""
        level = self.level or "below avx2"
        if not self.left_out:
            return f"level {level}; everything that the CPU claims works"
        reasons = "; ".join(f"{feature} ({reason})" for feature, reason in self.left_out.items())
        return f"level {level}; left out: {reasons}"


def limit_cpu(
    flags: frozenset[str],
    findings: Findings = NOTHING_FAILED,
    *,
    option: CpuLevel | Literal["auto"] = "auto",
    environment: Mapping[str, str],
) -> CpuLimits:
    """Return what may be used of a CPU: up to ``option``, and below every level that failed.

    ``environment`` is the user's: a limit that it sets counts as well.
    """
    left_out: dict[str, str] = {}
    if findings.unlimited is not None:
        left_out["oneDNN without a limit"] = findings.unlimited
    for name in ORDERS:
        if environment.get(name):
            left_out[f"all above {name}={environment[name]}"] = "set in the environment"
    listed = [(name, level) for name, level, needed in KERNELS if needed <= flags]
    if not listed:
        return CpuLimits(level=None, kernels=None, environment={}, left_out=left_out)
    claimed = listed[-1][1]
    excluded = _excluded(claimed, findings, option)
    kernels, level = [each for each in listed if each[1] not in excluded][-1]
    ours: dict[str, str] = {}
    if level != claimed or findings.unlimited is not None:
        ours.update(_LIBRARIES[level])
    if level != claimed:
        ours[KERNELS_VARIABLE] = kernels
    limited = {name: least(name, value, environment.get(name)) for name, value in ours.items()}
    return CpuLimits(level=level, kernels=kernels, environment=limited, left_out={**excluded, **left_out})


def _excluded(claimed: CpuLevel, findings: Findings, option: str) -> dict[str, str]:
    """Return the levels that may not be used, the highest first, and the reason for each; the lowest always may."""
    found: dict[str, str] = {}
    lowest_failed = min(findings.failed, key=LEVELS.index, default=None)
    for place in range(LEVELS.index(claimed), 0, -1):
        level = LEVELS[place]
        if lowest_failed is not None and place >= LEVELS.index(lowest_failed):
            found[level] = findings.failed.get(level, findings.failed[lowest_failed])
        elif option != "auto" and place > LEVELS.index(option):
            found[level] = f"--cpu-level {option}"
    return found


def least(variable: str, *values: str | None) -> str:
    """Return the lowest of the values. An unknown value is a user's own, and is returned unchanged."""
    given = [value for value in values if value]
    order = ORDERS[variable]
    unknown = [value for value in given if value not in order]
    return unknown[-1] if unknown else min(given, key=order.index)
