"""The limits of an engine process that follow from findings about a CPU."""

from typing import Any

import pytest

from quire_engine.cpu.limits import (
    CLAIMS,
    KERNELS_VARIABLE,
    LEVELS,
    ONEDNN_VARIABLE,
    CpuLevel,
    CpuLimits,
    Findings,
    claimed_trials,
    least,
    limit_cpu,
)

AVX2 = ("avx2",)
ALDER_LAKE = ("avx2", "avx-vnni")
SKYLAKE = ("avx2", "avx512")
CASCADE_LAKE = ("avx2", "avx512", "avx512-vnni")
ZEN4 = ("avx2", "avx512", "avx512-vnni", "avx512-bf16")
SAPPHIRE_RAPIDS = tuple(CLAIMS)


def limits(claimed: tuple[Any, ...], *, environment: dict[str, str] | None = None, **changes: Any) -> CpuLimits:
    option, died_at = changes.pop("option", "auto"), changes.pop("died_at", ())
    findings = Findings(claimed=claimed, **changes)
    return limit_cpu(findings, option=option, died_at=died_at, environment=environment or {})


@pytest.mark.parametrize(
    ("claimed", "level", "kernels"),
    [
        ((), None, None),
        (AVX2, "avx2", "x86-64-v3"),
        (ALDER_LAKE, "avx2", "x86-64-v3-vnni"),
        (SKYLAKE, "avx512", "x86-64-v4"),
        (CASCADE_LAKE, "avx512", "x86-64-v4-vnni"),
        (ZEN4, "avx512-bf16", "x86-64-v4-bf16"),
        (SAPPHIRE_RAPIDS, "amx", "x86-64-v4-amx"),
    ],
)
def test_cpu_without_failures_is_not_limited(claimed: tuple[str, ...], level: str, kernels: str) -> None:
    found = limits(claimed)
    assert (found.level, found.kernels, found.environment, found.left_out) == (level, kernels, {}, ())


@pytest.mark.parametrize(
    ("changes", "level", "kernels", "onednn"),
    [
        pytest.param(
            {"onednn_limit": "AVX512_CORE_FP16", "onednn_failed": {"none": "bfloat16: killed by SIGILL"}},
            "amx", None, "AVX512_CORE_FP16", id="AMX traps in oneDNN only",
        ),
        pytest.param(
            {
                "failed": {"amx-bf16": "killed by SIGILL", "amx-int8": "killed by SIGILL"},
                "onednn_limit": "AVX512_CORE_FP16",
                "onednn_failed": {"none": "bfloat16: killed by SIGILL"},
            },
            "avx512-bf16", "x86-64-v4-bf16", "AVX512_CORE_FP16", id="AMX works nowhere",
        ),
        pytest.param(
            {"failed": {"amx-int8": "wrong results"}},
            "amx", "x86-64-v4-bf16", None, id="only oneDNN can use AMX",
        ),
        pytest.param(
            {"failed": {"avx512-bf16": "killed by SIGILL"}, "onednn_limit": "AVX512_CORE_VNNI"},
            "avx512", "x86-64-v4-vnni", "AVX512_CORE_VNNI", id="no products of bfloat16",
        ),
        pytest.param(
            {"failed": {"avx512": "killed by SIGILL"}, "onednn_limit": "AVX2"},
            "avx2", "x86-64-v3-vnni", "AVX2", id="no AVX-512",
        ),
        pytest.param({"option": "avx2"}, "avx2", "x86-64-v3-vnni", "AVX2", id="AVX2 by hand"),
        pytest.param({"option": "avx512"}, "avx512", "x86-64-v4-vnni", "AVX512_CORE_VNNI", id="AVX-512 by hand"),
        pytest.param(
            {"option": "avx512-bf16"}, "avx512-bf16", "x86-64-v4-bf16", "AVX512_CORE_FP16", id="AVX512-BF16 by hand"
        ),
        pytest.param({"option": "amx"}, "amx", None, None, id="AMX by hand"),
        pytest.param({"died_at": ("amx",)}, "avx512-bf16", "x86-64-v4-bf16", "AVX512_CORE_FP16", id="died at AMX"),
        pytest.param({"died_at": ("amx", "avx512-bf16")}, "avx512", "x86-64-v4-vnni", "AVX512_CORE_VNNI", id="twice"),
        pytest.param({"died_at": ("avx512",), "option": "avx2"}, "avx2", "x86-64-v3-vnni", "AVX2", id="by hand lower"),
        pytest.param({"died_at": ("avx2",)}, "avx2", "x86-64-v3-vnni", "AVX2", id="nothing is lower than AVX2"),
    ],
)  # fmt: skip
def test_cpu_is_limited_to_working_instructions(
    changes: dict[str, Any], level: str, kernels: str | None, onednn: str | None
) -> None:
    found = limits(SAPPHIRE_RAPIDS, **changes)
    assert found.level == level
    assert found.environment.get(KERNELS_VARIABLE) == kernels
    assert found.environment.get(ONEDNN_VARIABLE) == onednn
    assert bool(found.left_out) == bool(found.environment)


def test_every_library_is_limited_to_avx2() -> None:
    assert limits(ZEN4, option="avx2").environment == {
        KERNELS_VARIABLE: "x86-64-v3",
        ONEDNN_VARIABLE: "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }


@pytest.mark.parametrize("option", LEVELS)
def test_level_missing_on_the_cpu_becomes_the_next_lower(option: CpuLevel) -> None:
    found = limits(SKYLAKE, option=option)
    assert found.level == ("avx2" if option == "avx2" else "avx512")
    assert bool(found.environment) == (option == "avx2")


@pytest.mark.parametrize(
    ("users", "onednn"),
    [
        ("AVX2", "AVX2"),
        ("AVX512_CORE_AMX", "AVX512_CORE_VNNI"),
        ("SOMETHING_ELSE", "SOMETHING_ELSE"),
        ("", "AVX512_CORE_VNNI"),
    ],
)
def test_user_limit_is_never_raised(users: str, onednn: str) -> None:
    found = limits(ZEN4, option="avx512", environment={ONEDNN_VARIABLE: users})
    assert found.environment[ONEDNN_VARIABLE] == onednn
    assert any(ONEDNN_VARIABLE in each.feature for each in found.left_out) == bool(users)


def test_user_limit_stays_without_other_limits() -> None:
    assert ONEDNN_VARIABLE not in limits(ZEN4, environment={ONEDNN_VARIABLE: "AVX2"}).environment


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        ({}, {}),
        ({"option": "avx512"}, {"avx512-bf16": "--cpu-level avx512"}),
        (
            {"failed": {"avx512": "killed by SIGILL"}},
            {
                "avx512": "killed by SIGILL",
                "avx512-vnni": "what it builds on does not work",
                "avx512-bf16": "what it builds on does not work",
            },
        ),
        ({"died_at": ("avx512-bf16",)}, {"avx512-bf16": "an engine process was killed by SIGILL at level avx512-bf16"}),
        ({"failed": {"onednn-float32": "wrong results"}}, {"onednn-float32": "wrong results"}),
    ],
)
def test_excluded_features_are_listed_with_their_reason(changes: dict[str, Any], left_out: dict[str, str]) -> None:
    found = limits(ZEN4, **changes)
    assert {each.feature: each.reason for each in found.left_out} == left_out
    assert all(feature in found.sentence and reason in found.sentence for feature, reason in left_out.items())


def test_backends_with_failed_trials_are_avoided_by_the_engine() -> None:
    assert limits(ZEN4, failed={"onednn-float32": "killed by SIGILL", "avx512-bf16": "x"}).avoid == ("onednn-float32",)


def test_cpu_features_are_read_from_cpuinfo_flags() -> None:
    flags = CLAIMS["avx2"] | CLAIMS["avx512"] | {"amx_tile", "avx512_vnni"}
    assert claimed_trials(flags) == ("avx2", "avx512", "avx512-vnni")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (("AVX2", "AVX512_CORE"), "AVX2"),
        (("AVX512_CORE_FP16", None), "AVX512_CORE_FP16"),
        ((None, "ALL", "AVX512_CORE_AMX"), "AVX512_CORE_AMX"),
    ],
)
def test_lowest_of_several_limits_applies(values: tuple[str | None, ...], expected: str) -> None:
    assert least(ONEDNN_VARIABLE, *values) == expected
