"""The decision which CPU instructions an engine process may use, given the findings: pure functions.

A *level* is the name that people choose and read: ``avx2``, ``avx512``, ``avx512-bf16``, ``amx``. An engine process is
limited to a level by the variables that oneDNN, torch, MKL and our own kernels read when they are loaded. A
variable is set only if the CPU reports more than may be used, and never above a user's own value.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

CpuLevel = Literal["avx2", "avx512", "avx512-bf16", "amx"]

LEVELS: tuple[CpuLevel, ...] = ("avx2", "avx512", "avx512-bf16", "amx")
"""All levels, from the lowest to the highest."""

Trial = Literal["avx2", "avx-vnni", "avx512", "avx512-vnni", "avx512-bf16", "avx512-fp16", "amx-bf16", "amx-int8"]

CLAIMS: Mapping[Trial, frozenset[str]] = {
    "avx2": frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"}),
    "avx-vnni": frozenset({"avx_vnni"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "avx512-vnni": frozenset({"avx512_vnni"}),
    "avx512-bf16": frozenset({"avx512_bf16"}),
    "avx512-fp16": frozenset({"avx512_fp16"}),
    "amx-bf16": frozenset({"amx_tile", "amx_bf16"}),
    "amx-int8": frozenset({"amx_tile", "amx_int8"}),
}
"""The features, by Linux's names, that a CPU with these instructions lists."""

KERNELS_VARIABLE = "QUIRE_KERNELS_LEVEL"
"""The variable that limits our own kernels to one of ``quire_kernels.precompiled.levels``."""

ONEDNN_VARIABLE = "ONEDNN_MAX_CPU_ISA"
ONEDNN_LADDER = ("AVX2", "AVX512_CORE_VNNI", "AVX512_CORE_BF16", "AVX512_CORE_FP16")
"""The limits of oneDNN to try, from the lowest to the highest; without a limit it uses AMX as well."""

_ORDERS: Mapping[str, tuple[str, ...]] = {
    ONEDNN_VARIABLE: (
        "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16",
        "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16", "AVX10_1_512", "AVX10_1_512_AMX",
        "AVX10_1_512_AMX_FP16", "DEFAULT", "ALL",
    ),
    "ATEN_CPU_CAPABILITY": ("default", "avx2", "avx512", "amx"),
    "MKL_ENABLE_INSTRUCTIONS": (
        "SSE4_2", "AVX", "AVX2", "AVX2_E1", "AVX512", "AVX512_E1", "AVX512_E2", "AVX512_E3", "AVX512_E4",
    ),
}  # fmt: skip
"""The values of each library's variable, from the lowest to the highest."""

_BY_LEVEL: Mapping[CpuLevel, Mapping[str, str]] = {
    "avx2": {
        ONEDNN_VARIABLE: "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {ONEDNN_VARIABLE: "AVX512_CORE_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX512_E2"},
    "avx512-bf16": {ONEDNN_VARIABLE: "AVX512_CORE_FP16", "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3"},
    "amx": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The findings of the trials on a machine."""

    claimed: tuple[Trial, ...]
    """The instructions that the CPU lists."""
    failed: dict[str, str] = field(default_factory=dict)
    """The reason why a reported instruction or a ``library`` trial must not be used."""
    onednn_limit: str | None = None
    """The highest limit of oneDNN at which all its trials are correct; None if it needs no limit."""
    onednn_failed: dict[str, str] = field(default_factory=dict)
    """The trials that failed at a higher limit of oneDNN (``none`` means no limit)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A feature that the CPU reports and the engine does not use."""

    feature: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLimits:
    """The CPU instructions that an engine process may use."""

    level: CpuLevel | None
    """None for a CPU without AVX2, which has no limit."""
    kernels: str | None
    """The level of our own kernels, by its name in ``quire_kernels``."""
    environment: dict[str, str]
    left_out: tuple[LeftOut, ...] = ()
    avoid: tuple[str, ...] = ()
    """The library trials that failed: the engine process must not run this code."""

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
            "left_out": [{"feature": each.feature, "reason": each.reason} for each in self.left_out],
        }

    @property
    def sentence(self) -> str:
        """The level and the unused features, for logs and reports."""
        level = self.level or "below avx2"
        if not self.left_out:
            return f"level {level}; everything that the CPU claims works"
        return f"level {level}; left out: " + "; ".join(f"{each.feature} ({each.reason})" for each in self.left_out)


def claimed_trials(flags: frozenset[str]) -> tuple[Trial, ...]:
    """Return the instructions that a CPU with these flags reports."""
    return tuple(trial for trial, needed in CLAIMS.items() if needed <= flags)


def limit_cpu(
    findings: Findings,
    *,
    option: CpuLevel | Literal["auto"] = "auto",
    died_at: tuple[CpuLevel, ...] = (),
    environment: Mapping[str, str],
) -> CpuLimits:
    """Return what may be used: what works, up to ``option`` and below every level at which an engine has died.

    ``environment`` is the user's: a limit that it sets counts as well.
    """
    works = frozenset(findings.claimed) - findings.failed.keys()
    claimed = _highest(frozenset(findings.claimed), onednn_tiles=True)
    ceiling, reason = _ceiling(option, died_at)
    level = _lower_of(_highest(works, onednn_tiles=_onednn_has_tiles(findings)), ceiling)
    kernels = _kernel_level(works, level)
    ours: dict[str, str] = {}
    if kernels is not None and kernels != _kernel_level(frozenset(findings.claimed), claimed):
        ours[KERNELS_VARIABLE] = kernels
    if level is not None and level != claimed:
        ours.update(_BY_LEVEL[level])
    if findings.onednn_limit is not None:
        ours[ONEDNN_VARIABLE] = least(ONEDNN_VARIABLE, ours.get(ONEDNN_VARIABLE), findings.onednn_limit)
    limited = {name: least(name, value, environment.get(name)) for name, value in ours.items()}
    return CpuLimits(
        level=level,
        kernels=kernels,
        environment=limited,
        left_out=tuple(_left_out(findings, works, level, reason, environment)),
        avoid=tuple(name for name in findings.failed if name not in CLAIMS),
    )


def _ceiling(option: str, died_at: tuple[CpuLevel, ...]) -> tuple[CpuLevel, str]:
    """Return the highest level that may be used, and why it is not a higher one."""
    asked = LEVELS[-1] if option == "auto" else cast("CpuLevel", option)
    if died_at:
        lowest = min(died_at, key=LEVELS.index)
        below = LEVELS[max(0, LEVELS.index(lowest) - 1)]
        if LEVELS.index(below) < LEVELS.index(asked):
            return below, f"an engine process was killed by SIGILL at level {lowest}"
    return asked, f"--cpu-level {option}"


def _highest(instructions: frozenset[str], *, onednn_tiles: bool) -> CpuLevel | None:
    if "avx2" not in instructions:
        return None
    if "avx512" not in instructions:
        return "avx2"
    if "avx512-bf16" not in instructions or "avx512-vnni" not in instructions:
        return "avx512"
    tiles = {"amx-bf16", "amx-int8"} <= instructions
    return "amx" if tiles or (onednn_tiles and "amx-bf16" in instructions) else "avx512-bf16"


def _onednn_has_tiles(findings: Findings) -> bool:
    return findings.onednn_limit is None


def _lower_of(found: CpuLevel | None, ceiling: CpuLevel) -> CpuLevel | None:
    return None if found is None else min(found, ceiling, key=LEVELS.index)


def _kernel_level(instructions: frozenset[str], level: CpuLevel | None) -> str | None:
    """Return the level of our kernels; a contract test checks the names and features against ``quire_kernels``."""
    if level is None:
        return None
    if level == "avx2":
        return "x86-64-v3-vnni" if "avx-vnni" in instructions else "x86-64-v3"
    if "avx512-vnni" not in instructions:
        return "x86-64-v4"
    if level == "avx512":
        return "x86-64-v4-vnni"
    return "x86-64-v4-amx" if level == "amx" and {"amx-bf16", "amx-int8"} <= instructions else "x86-64-v4-bf16"


def least(variable: str, *values: str | None) -> str:
    """Return the lowest of the values. An unknown value is a user's own, and is returned unchanged."""
    given = [value for value in values if value]
    order = _ORDERS.get(variable, ())
    unknown = [value for value in given if value not in order]
    return unknown[-1] if unknown else min(given, key=order.index)


def _left_out(
    findings: Findings,
    works: frozenset[str],
    level: CpuLevel | None,
    reason: str,
    environment: Mapping[str, str],
) -> Iterator[LeftOut]:
    for trial in findings.claimed:
        if trial in findings.failed:
            yield LeftOut(feature=trial, reason=findings.failed[trial])
        elif level is not None and trial in _FROM and LEVELS.index(_FROM[trial]) > LEVELS.index(level):
            why = reason if _is_above(works, level) else "what it builds on does not work"
            yield LeftOut(feature=trial, reason=why)
    for limit, failure in findings.onednn_failed.items():
        feature = "oneDNN without a limit" if limit == "none" else f"oneDNN with {limit}"
        yield LeftOut(feature=feature, reason=failure)
    yield from (LeftOut(feature=name, reason=why) for name, why in findings.failed.items() if name not in CLAIMS)
    for name in _ORDERS:
        if environment.get(name):
            yield LeftOut(feature=f"all above {name}={environment[name]}", reason="set in the environment")


def _is_above(works: frozenset[str], level: CpuLevel) -> bool:
    """Return whether a higher level than this one would work."""
    found = _highest(works, onednn_tiles=False)
    return found is not None and LEVELS.index(found) > LEVELS.index(level)


_FROM: Mapping[Trial, CpuLevel] = {
    "avx512": "avx512",
    "avx512-vnni": "avx512",
    "avx512-bf16": "avx512-bf16",
    "avx512-fp16": "avx512-bf16",
    "amx-bf16": "amx",
    "amx-int8": "amx",
}
"""The lowest level that uses the instructions."""
