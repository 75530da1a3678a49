"""Compilation ahead of time: the required fields of a case, and the parsed results.

`make kernels-aot` compiles all kernels in its own process; this uses one small kernel.
"""

from dataclasses import replace

import pytest

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
def test_register_spills_are_detected() -> None:
    from quire_kernels.triton_runtime.aot_compile import compile_case

    crowded = Launch(_scale_kernel, BLOCK=8192, num_warps=1)
    usage = compile_case("scale", replace(CASE, launch=crowded), Target(90))
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
