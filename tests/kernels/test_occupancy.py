"""Programs per multiprocessor, held to NVIDIA's and AMD's published limits."""

import pytest

from quire_kernels.triton_runtime.occupancy import register_limit, resident_programs
from quire_kernels.triton_runtime.target import INTERPRETER, Target


@pytest.mark.parametrize(
    ("target", "programs", "warps", "expected"),
    [
        ("sm_90", 4, 4, 128),
        ("sm_90", 3, 4, None),  # 168 registers
        ("sm_90", 2, 4, None),
        ("sm_80", 2, 8, 128),
        ("gfx942", 4, 4, None),
    ],
)
def test_register_limit_fits_all_programs(target: str, programs: int, warps: int, expected: int | None) -> None:
    assert register_limit(Target.named(target), programs, warps) == expected


def test_the_interpreter_has_no_registers() -> None:
    assert register_limit(INTERPRETER, 4, 4) is None


@pytest.mark.parametrize(
    ("target", "registers", "shared_kib", "warps", "expected"),
    [
        ("sm_90", 128, 54, 4, 4),
        ("sm_90", 129, 54, 4, 3),
        ("sm_90", 160, 54, 4, 3),
        ("sm_90", 200, 54, 4, 2),
        ("sm_90", 64, 113, 4, 2),
        ("sm_90", 64, 114, 4, 1),  # CUDA reserves 1 KiB in each block
        ("sm_86", 64, 49, 4, 2),
        ("sm_86", 64, 50, 4, 1),
        ("gfx942", 128, 20, 4, 3),
        ("gfx942", 256, 20, 4, 2),
        ("gfx950", 64, 40, 8, 4),
        ("gfx1100", 96, 40, 8, 3),
    ],
)
def test_registers_and_shared_memory_limit_residents(
    target: str, registers: int, shared_kib: int, warps: int, expected: int
) -> None:
    found = resident_programs(Target.named(target), registers=registers, shared_bytes=shared_kib << 10, num_warps=warps)
    assert found == expected


@pytest.mark.parametrize(("programs", "warps"), [(4, 4), (6, 4), (2, 8), (3, 8)])
def test_a_kernel_at_the_limit_is_resident(programs: int, warps: int) -> None:
    target = Target.named("sm_90")
    limit = register_limit(target, programs, warps)
    assert limit is not None
    assert resident_programs(target, registers=limit, shared_bytes=0, num_warps=warps) >= programs
