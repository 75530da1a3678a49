"""Compilation ahead of time: the required fields of a case, the parsed results, and their bounds.

`make kernels-aot` compiles all kernels in its own process; this uses one small kernel.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.kernels import aot_bounds
from benchmarks.kernels.aot_bounds import Bounds, Measured
from quire_kernels.dispatch import INTERPRETED
from quire_kernels.triton_runtime.target import Target

triton = pytest.importorskip("triton", reason="torch's CPU build comes without triton")
tl = triton.language

from quire_kernels.triton_runtime.aot_case import AotCase  # noqa: E402
from quire_kernels.triton_runtime.launch import Launch  # noqa: E402

needs_compiler = pytest.mark.skipif(INTERPRETED, reason="this process interprets")


@triton.jit
def _scale_kernel(x, out, weight, width, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * width
    value = tl.load(x + row + columns, mask=columns < width, other=0.0).to(tl.float32) * factor
    if weight is not None:
        value *= tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(out + row + columns, value / tl.sum(value, axis=0), mask=columns < width)


CASE = AotCase(
    name="scale bf16",
    launch=Launch(_scale_kernel, BLOCK=1024, num_warps=4),
    signature={"x": "*bf16:16", "out": "*bf16:16", "weight": None, "width": "i32:16", "factor": "fp32"},
)


@needs_compiler
@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", "gfx1100"])
def test_kernel_is_compiled_for_an_absent_gpu(name: str) -> None:
    from quire_kernels.triton_runtime.aot_compile import compile_case

    usage = compile_case("scale", CASE, Target.named(name))
    assert 0 < usage.registers <= 255 and usage.stack_bytes == usage.local_bytes == 0
    assert 0 < usage.shared_bytes < 1024  # the sum over the block's warps


@needs_compiler
@pytest.mark.parametrize("name", ["sm_90", "gfx942"])
def test_register_spills_are_detected(name: str) -> None:
    from quire_kernels.triton_runtime.aot_compile import compile_case

    crowded = Launch(_scale_kernel, BLOCK=65536, num_warps=2)
    usage = compile_case("scale", replace(CASE, launch=crowded), Target.named(name))
    assert usage.stack_bytes + usage.local_bytes > 0


@needs_compiler
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"signature": {"x": "*bf16:16"}}, "scale: scale bf16: sm_90: lacks out, weight"),
        ({"launch": Launch(_scale_kernel, BLOCK=8, WIDE=1)}, "gives WIDE; the kernel's arguments are x, out"),
        ({"signature": {**CASE.signature, "width": "i32:8"}}, "width: '8' is no hint"),
        ({"launch": Launch(_scale_kernel, BLOCK=1000)}, "sm_90: does not compile: .*power of 2"),
    ],
)
def test_a_case_that_does_not_fit_its_kernel_is_refused(changes: dict[str, object], words: str) -> None:
    from quire_kernels.triton_runtime.aot_compile import AotError, compile_case

    with pytest.raises(AotError, match=words):
        compile_case("scale", replace(CASE, **changes), Target(90))  # type: ignore[arg-type]


# --- bounds ---

USAGE = {"registers": 61, "stack_bytes": 0, "local_bytes": 0, "shared_bytes": 33_000}
ONE = Measured(op="norm", case="bf16", target="sm_90", decode_path=True, usage=USAGE)


def bounds_of(**changes: int) -> Bounds:
    return {"norm": {"bf16": {"sm_90": {**aot_bounds.bound_of(USAGE), **changes}}}}


def test_bounds_are_measured_values_rounded_up_to_allocations() -> None:
    assert aot_bounds.bound_of(USAGE) == {
        "registers": 64,
        "stack_bytes": 0,
        "local_bytes": 0,
        "shared_bytes": 33 * 1024,
    }
    assert aot_bounds.updated({}, [ONE], widen=False) == bounds_of()
    assert aot_bounds.complaints([ONE], bounds_of()) == []


@pytest.mark.parametrize(
    ("measured", "bounds", "words"),
    [
        (ONE, {}, "norm: bf16: sm_90: has no bounds yet"),
        (ONE, bounds_of(registers=56), "registers is 61; its bound is 56"),
        (ONE, bounds_of(shared_bytes=1024), "shared_bytes is 33,000; its bound is 1,024"),
        (replace(ONE, usage={**USAGE, "local_bytes": 8}), bounds_of(local_bytes=8), "the decode path must have none"),
        (replace(ONE, usage={**USAGE, "stack_bytes": 8}), bounds_of(stack_bytes=8), "the decode path must have none"),
        (replace(ONE, usage={**USAGE, "shared_bytes": 300_000}), bounds_of(shared_bytes=300_000), "a block there has"),
        (replace(ONE, usage=None, error="norm: bf16: does not compile"), bounds_of(), "norm: bf16: does not compile"),
        (
            replace(ONE, case="fp16"),
            bounds_of() | {"norm": bounds_of()["norm"] | {}},
            "norm: bf16: has bounds, but is no",
        ),
    ],
)
def test_exceeded_bounds_are_named(measured: Measured, bounds: Bounds, words: str) -> None:
    assert any(words in complaint for complaint in aot_bounds.complaints([measured], bounds))


def test_stack_is_allowed_off_the_decode_path_within_its_bound() -> None:
    prefill = replace(ONE, decode_path=False, usage={**USAGE, "stack_bytes": 16})
    assert aot_bounds.complaints([prefill], bounds_of(stack_bytes=16)) == []
    assert aot_bounds.complaints([prefill], bounds_of(stack_bytes=8)) != []


def test_target_without_bounds_is_limited_by_shared_memory_only() -> None:
    elsewhere = replace(ONE, target="sm_89")
    assert aot_bounds.complaints([elsewhere], bounds_of()) == []
    too_much = replace(elsewhere, usage={**USAGE, "shared_bytes": 120_000})
    assert "a block there has 101,376" in aot_bounds.complaints([too_much], bounds_of())[0]


def test_widening_keeps_wider_bounds_and_updating_replaces_them() -> None:
    wide = bounds_of(registers=96, shared_bytes=1024)
    assert aot_bounds.updated(wide, [ONE], widen=True) == bounds_of(registers=96)
    assert aot_bounds.updated(wide, [ONE], widen=False) == bounds_of()


def test_updating_removes_old_cases_and_keeps_other_targets() -> None:
    bounds = bounds_of()
    bounds["norm"]["bf16"]["sm_80"] = bounds["norm"]["old"] = bounds["other"] = {}  # type: ignore[assignment]
    updated = aot_bounds.updated(bounds, [ONE], widen=False)
    assert set(updated) == {"norm", "other"} and set(updated["norm"]) == {"bf16"}
    assert set(updated["norm"]["bf16"]) == {"sm_80", "sm_90"}


def test_bounds_file_round_trips(tmp_path: Path) -> None:
    bounds = bounds_of() | {"activation": {"a": bounds_of()["norm"]["bf16"]}}
    aot_bounds.write(bounds, tmp_path / "bounds.json")
    assert aot_bounds.read(tmp_path / "bounds.json") == bounds
    assert len((tmp_path / "bounds.json").read_text().splitlines()) == 12


def test_target_is_parsed_from_its_name_and_unknown_ones_refused() -> None:
    import argparse

    from benchmarks.kernels.aot import _target

    assert _target("sm_90") == _target("90") == "sm_90" and _target("gfx942") == "gfx942"
    with pytest.raises(argparse.ArgumentTypeError, match="should be one of sm_80"):
        _target("sm_70")
