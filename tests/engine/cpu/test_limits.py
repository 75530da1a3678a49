"""The limits of an engine process that follow from what failed on a CPU."""

from typing import Any

import pytest

from quire_engine.cpu.limits import (
    KERNELS,
    KERNELS_VARIABLE,
    LEVELS,
    ONEDNN_VARIABLE,
    CpuLevel,
    CpuLimits,
    Findings,
    least,
    limit_cpu,
)

AVX2, ALDER_LAKE, SKYLAKE, CASCADE_LAKE, ZEN4, SAPPHIRE_RAPIDS = (flags for _, _, flags in KERNELS)
SAPPHIRE_RAPIDS |= {"avx_vnni"}


def limits(flags: frozenset[str], *, environment: dict[str, str] | None = None, **changes: Any) -> CpuLimits:
    option = changes.pop("option", "auto")
    return limit_cpu(flags, Findings(facts=(), **changes), option=option, environment=environment or {})


@pytest.mark.parametrize(
    ("flags", "level", "kernels"),
    [
        (frozenset(), None, None),
        (frozenset({"avx2"}), None, None),
        (AVX2, "avx2", "x86-64-v3"),
        (ALDER_LAKE, "avx2", "x86-64-v3-vnni"),
        (SKYLAKE, "avx512", "x86-64-v4"),
        (CASCADE_LAKE, "avx512", "x86-64-v4-vnni"),
        (ZEN4, "avx512-bf16", "x86-64-v4-bf16"),
        (SAPPHIRE_RAPIDS, "amx", "x86-64-v4-amx"),
        (SAPPHIRE_RAPIDS - {"amx_int8"}, "avx512-bf16", "x86-64-v4-bf16"),
    ],
)
def test_cpu_without_failures_is_not_limited(flags: frozenset[str], level: str, kernels: str) -> None:
    found = limits(flags)
    assert (found.level, found.kernels, found.environment, found.left_out) == (level, kernels, {}, {})
    assert found.multiplies_bfloat16 == (level in ("avx512-bf16", "amx"))


@pytest.mark.parametrize(
    ("changes", "level", "kernels", "onednn", "left_out"),
    [
        pytest.param(
            {"unlimited": "x"}, "amx", None, "AVX512_CORE_FP16", {"oneDNN without a limit": "x"},
            id="AMX traps in oneDNN only",
        ),
        pytest.param(
            {"unlimited": "x", "failed": {"amx": "y"}}, "avx512-bf16", "x86-64-v4-bf16", "AVX512_CORE_FP16",
            {"amx": "y", "oneDNN without a limit": "x"}, id="AMX works nowhere",
        ),
        pytest.param(
            {"unlimited": "x", "failed": {"amx": "y", "avx512-bf16": "z"}}, "avx512", "x86-64-v4-vnni",
            "AVX512_CORE_VNNI", {"amx": "y", "avx512-bf16": "z", "oneDNN without a limit": "x"}, id="no bfloat16",
        ),
        pytest.param(
            {"failed": {"avx512": "y"}}, "avx2", "x86-64-v3-vnni", "AVX2",
            {"amx": "y", "avx512-bf16": "y", "avx512": "y"}, id="nothing above what failed is used",
        ),
        pytest.param(
            {"failed": {"amx": "y"}, "option": "avx512"}, "avx512", "x86-64-v4-vnni", "AVX512_CORE_VNNI",
            {"amx": "y", "avx512-bf16": "--cpu-level avx512"}, id="lower by hand than by a failure",
        ),
        pytest.param(
            {"failed": {"avx512": "y"}, "option": "avx512-bf16"}, "avx2", "x86-64-v3-vnni", "AVX2",
            {"amx": "y", "avx512-bf16": "y", "avx512": "y"}, id="lower by a failure than by hand",
        ),
        pytest.param({"option": "amx"}, "amx", None, None, {}, id="AMX by hand"),
    ],
)  # fmt: skip
def test_cpu_is_limited_to_what_works(
    changes: dict[str, Any], level: str, kernels: str | None, onednn: str | None, left_out: dict[str, str]
) -> None:
    found = limits(SAPPHIRE_RAPIDS, **changes)
    assert (found.level, found.environment.get(KERNELS_VARIABLE)) == (level, kernels)
    assert found.environment.get(ONEDNN_VARIABLE) == onednn
    assert found.left_out == left_out
    assert all(feature in found.sentence and reason in found.sentence for feature, reason in left_out.items())
    assert found.as_json()["left_out"] == [{"feature": key, "reason": value} for key, value in left_out.items()]


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
    ("variable", "users", "limited"),
    [
        (ONEDNN_VARIABLE, "AVX2", "AVX2"),
        (ONEDNN_VARIABLE, "AVX512_CORE_AMX", "AVX512_CORE_VNNI"),
        (ONEDNN_VARIABLE, "SOMETHING_ELSE", "SOMETHING_ELSE"),
        (ONEDNN_VARIABLE, "", "AVX512_CORE_VNNI"),
        (KERNELS_VARIABLE, "x86-64-v3", "x86-64-v3"),
        (KERNELS_VARIABLE, "x86-64-v4-amx", "x86-64-v4-vnni"),
    ],
)
def test_user_limit_is_never_raised(variable: str, users: str, limited: str) -> None:
    found = limits(ZEN4, option="avx512", environment={variable: users})
    assert found.environment[variable] == limited
    assert any(variable in feature for feature in found.left_out) == bool(users)


def test_user_limit_stays_without_other_limits() -> None:
    assert ONEDNN_VARIABLE not in limits(ZEN4, environment={ONEDNN_VARIABLE: "AVX2"}).environment


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
