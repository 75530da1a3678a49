"""The number of programs of a kernel that fit on one multiprocessor at once, by their registers and shared memory.

A persistent kernel launches as many programs as fit and divides its work among them. If fewer fit than were launched,
the rest begins when the first have finished, and the launch takes up to twice as long.

Sources: CUDA programming guide, table of technical specifications by compute capability; AMD's instruction set
documents of CDNA 3, CDNA 4 and RDNA 3.
"""

from quire_kernels.triton_runtime.target import Target

_REGISTERS = 1 << 16
_LOWEST_FREE = 160
"""From this many registers per thread on, the compiler is left free: a limit made it spill where it had not before."""
_REGISTER_UNIT = 256
"""The unit in which a warp of NVIDIA's GPUs gets registers."""
_RESERVED_SHARED = 1 << 10
"""The bytes of shared memory that CUDA reserves in each block."""
_SHARED = {80: 164 << 10, 87: 164 << 10, 90: 228 << 10, 100: 228 << 10, 103: 228 << 10}
"""Bytes of a multiprocessor by compute capability, where it has more than the 100 KiB of the others."""
_AMD_SHARED = {"gfx942": 64 << 10, "gfx950": 160 << 10, "gfx1100": 128 << 10}
_AMD_REGISTERS = {"gfx942": 512, "gfx950": 512, "gfx1100": 1536}
"""Vector registers of a SIMD unit, by lane. A compute unit (gfx1100: a workgroup processor) has four."""
_AMD_MOST_WAVES = {"gfx942": 8, "gfx950": 8, "gfx1100": 16}
_AMD_REGISTER_UNIT = {"gfx942": 8, "gfx950": 8, "gfx1100": 24}
_SIMD_UNITS = 4


def register_limit(target: Target, programs: int, num_warps: int) -> int | None:
    """Return the registers per thread with which ``programs`` of ``num_warps`` warps fit on a multiprocessor.

    None: the compiler needs no limit, or takes none (in the interpreter and for AMD).
    """
    if target.is_interpreter or target.amd:
        return None
    limit = _REGISTERS // (programs * num_warps * target.warp_size) // 8 * 8
    return limit if limit < _LOWEST_FREE else None


def resident_programs(target: Target, *, registers: int, shared_bytes: int, num_warps: int) -> int:
    """Return how many programs with these resources fit on a multiprocessor; ``registers`` are those of a thread."""
    if target.amd:
        unit = _AMD_REGISTER_UNIT[target.amd]
        waves = min(_AMD_MOST_WAVES[target.amd], _AMD_REGISTERS[target.amd] // (-(-max(registers, 1) // unit) * unit))
        return min(_SIMD_UNITS * waves // num_warps, _AMD_SHARED[target.amd] // max(shared_bytes, 1))
    of_warp = -(-max(registers, 1) * target.warp_size // _REGISTER_UNIT) * _REGISTER_UNIT
    shared = _SHARED.get(target.capability, 100 << 10)
    return min(_REGISTERS // (of_warp * num_warps), shared // (shared_bytes + _RESERVED_SHARED))
