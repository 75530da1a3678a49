"""Compilation ahead of time: the parsed results, and the programs that fit on a multiprocessor.

`make kernels-aot` compiles all kernels in its own process; this uses one small kernel.
"""

from dataclasses import replace

import pytest

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.triton_runtime.target import Target

triton = pytest.importorskip("triton", reason="torch's CPU build comes without triton")
tl = triton.language

from benchmarks.kernels.aot_cases import AotCase  # noqa: E402
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
    from benchmarks.kernels.aot_compile import compile_case

    usage = compile_case("scale", CASE, Target.named(name))
    assert 0 < usage.registers <= 255 and usage.stack_bytes == usage.local_bytes == 0
    assert 0 < usage.shared_bytes < 1024  # the sum over the block's warps


@needs_compiler
def test_register_spills_are_detected() -> None:
    from benchmarks.kernels.aot_compile import compile_case

    crowded = Launch(_scale_kernel, BLOCK=8192, num_warps=1)
    usage = compile_case("scale", replace(CASE, launch=crowded), Target(90))
    assert usage.stack_bytes + usage.local_bytes > 0


@needs_compiler
def test_compilers_reason_is_reported() -> None:
    from benchmarks.kernels.aot_compile import AotError, compile_case

    with pytest.raises(AotError, match="scale: scale bf16: sm_90: does not compile: .*power of 2"):
        compile_case("scale", replace(CASE, launch=Launch(_scale_kernel, BLOCK=1000)), Target(90))


@pytest.mark.parametrize(
    ("target", "registers", "shared_kib", "warps", "expected"),
    [
        ("sm_90", 128, 54, 4, 4),
        ("sm_90", 129, 54, 4, 3),
        ("sm_90", 64, 113, 4, 2),
        ("sm_90", 64, 114, 4, 1),  # CUDA reserves 1 KiB in each block
        ("sm_86", 64, 50, 4, 1),
        ("gfx942", 256, 20, 4, 2),
        ("gfx950", 64, 40, 8, 4),
        ("gfx1100", 96, 40, 8, 3),
    ],
)
def test_registers_and_shared_memory_limit_residents(
    target: str, registers: int, shared_kib: int, warps: int, expected: int
) -> None:
    from benchmarks.kernels.aot_compile import Usage

    usage = Usage(registers=registers, stack_bytes=0, local_bytes=0, shared_bytes=shared_kib << 10)
    assert usage.resident_programs(Target.named(target), warps) == expected


@pytest.mark.parametrize(
    ("target", "programs", "warps", "expected"),
    [("sm_90", 4, 4, 128), ("sm_90", 3, 4, None), ("sm_80", 2, 8, 128), ("gfx942", 4, 4, None)],
)
def test_register_limit_fits_all_programs(target: str, programs: int, warps: int, expected: int | None) -> None:
    from quire_kernels.paged_attention.tiles import register_limit

    assert register_limit(Target.named(target), programs, warps) == expected
