"""Compilation of kernels for GPUs that are not present, and the resources of the code.

It needs Triton, but no driver, and a process without TRITON_INTERPRET, which Triton reads when a kernel is defined.
For NVIDIA's GPUs registers, stack and local bytes come from Triton's ``cuobjdump``; for AMD's, vector
registers and private memory come from the assembly. Shared memory (AMD: LDS) comes from the compiler.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.kernels.aot_cases import AotCase
from quire_kernels.errors import KernelError
from quire_kernels.triton_runtime.target import Target

_OPTIONS = ("num_warps", "num_stages", "maxnreg")
"""The constants of a launch that are the compiler's and not the kernel's."""


# The limits of a multiprocessor. Sources: CUDA programming guide, technical specifications by compute capability; AMD's
# instruction set documents of CDNA 3, CDNA 4 and RDNA 3.
_REGISTERS = 1 << 16
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


class AotError(KernelError):
    """A case that does not compile; the message names op, case and target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The resources of a compiled kernel. Registers, stack and local bytes are per thread, shared bytes per block."""

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int

    def resident_programs(self, target: Target, num_warps: int) -> int:
        """Return how many programs fit on one multiprocessor at once."""
        registers = max(self.registers, 1)
        if target.amd:
            unit = _AMD_REGISTER_UNIT[target.amd]
            waves = min(_AMD_MOST_WAVES[target.amd], _AMD_REGISTERS[target.amd] // (-(-registers // unit) * unit))
            return min(_SIMD_UNITS * waves // num_warps, _AMD_SHARED[target.amd] // max(self.shared_bytes, 1))
        of_warp = -(-registers * target.warp_size // _REGISTER_UNIT) * _REGISTER_UNIT
        shared = _SHARED.get(target.capability, 100 << 10)
        return min(_REGISTERS // (of_warp * num_warps), shared // (self.shared_bytes + _RESERVED_SHARED))


def compile_case(op: str, case: AotCase, target: Target) -> Usage:
    """Compile a case and return its resources. Raise AotError with the first words of the compiler's error."""
    where = f"{op}: {case.name}: {target.name}"
    compiled = _compiled(where, case, target)
    return _amd_usage(where, compiled) if target.amd else _nvidia_usage(where, compiled)


def _compiled(where: str, case: AotCase, target: Target) -> Any:
    options = {name: value for name, value in case.launch.constants.items() if name in _OPTIONS}
    try:
        return triton.compile(_source(case), target=_gpu_target(target), options=options)
    # The compiler raises many types, from its own errors to RuntimeError of a failed pass.
    except Exception as error:
        raise AotError(f"{where}: does not compile: {_gist(error)}") from error


def _gpu_target(target: Target) -> GPUTarget:
    backend, architecture = ("hip", target.amd) if target.amd else ("cuda", target.capability)
    return GPUTarget(backend, architecture, target.warp_size)


def _gist(error: Exception) -> str:
    """Return one line of an error.

    A compilation error quotes the source and ends with the reason; an error of the assembler has it in the middle.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    said_by_assembler = [line for line in lines if line.startswith("ptxas")]
    return f"{type(error).__name__}: {(said_by_assembler or lines)[-1]}"


def _source(case: AotCase) -> ASTSource:
    constexprs = {name: value for name, value in case.launch.constants.items() if name not in _OPTIONS}
    constexprs |= {name: None for name, kind in case.signature.items() if kind is None}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, name in enumerate(case.launch.kernel.arg_names):
        kind, _, hint = (case.signature.get(name) or "constexpr").partition(":")
        if hint == "1":
            constexprs[name], kind = 1, "constexpr"
        elif hint == "16":
            attributes[(index,)] = [["tt.divisibility", 16]]
        signature[name] = kind
    return ASTSource(fn=case.launch.kernel, signature=signature, constexprs=constexprs, attrs=attributes)


def _amd_usage(where: str, compiled: Any) -> Usage:
    """Return the resources from the metadata at the end of the assembly (AMDGPU code object, ``.amdgpu_metadata``).

    Private memory is both stack and spilled registers; it counts as local bytes.
    """
    found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", compiled.asm["amdgcn"]))
    if len(found) < 2:
        raise AotError(f"{where}: the assembly says nothing of the kernel's registers and private memory")
    return Usage(
        registers=int(found["vgpr_count"]),
        stack_bytes=0,
        local_bytes=int(found["private_segment_fixed_size"]),
        shared_bytes=compiled.metadata.shared,
    )


def _nvidia_usage(where: str, compiled: Any) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    resources = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", result.stdout))
    if result.returncode or len(resources) < 3:
        raise AotError(f"{where}: cuobjdump says nothing of its resources: {result.stderr.strip() or result.stdout}")
    return Usage(
        registers=int(resources["REG"]),
        stack_bytes=int(resources["STACK"]),
        local_bytes=int(resources["LOCAL"]),
        shared_bytes=compiled.metadata.shared,
    )
