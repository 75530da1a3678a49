"""Compilation of kernels for GPUs that are not present, and the resources of the code.

It needs Triton, but no driver. It must run in a process without TRITON_INTERPRET, which Triton reads when a kernel is
defined. For NVIDIA's GPUs registers, stack and local bytes come from Triton's ``cuobjdump``; for AMD's, vector
registers and private memory come from the assembly. Shared memory (AMD: LDS) comes from the compiler.
"""

import importlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.errors import KernelError
from quire_kernels.triton_runtime.aot_case import AotCase
from quire_kernels.triton_runtime.occupancy import resident_programs
from quire_kernels.triton_runtime.target import Target

_PACKAGE = Path(__file__).parent.parent
_OPTIONS = ("num_warps", "num_stages", "maxnreg")
"""The constants of a launch that are the compiler's and not the kernel's."""


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
        return resident_programs(target, registers=self.registers, shared_bytes=self.shared_bytes, num_warps=num_warps)


def ops_with_kernels() -> list[str]:
    return sorted(path.parent.name for path in _PACKAGE.glob("*/kernel.py"))


def cases_of(op: str, target: Target) -> list[AotCase]:
    """Return an op's cases. Raise AotError if it has none, or if two have the same name."""
    module = importlib.import_module(f"quire_kernels.{op}.kernel")
    if not hasattr(module, "aot_cases"):
        raise AotError(f"{op}: its kernel.py lacks aot_cases(target); see triton_runtime/aot_case.py")
    cases: list[AotCase] = module.aot_cases(target)
    names = [case.name for case in cases]
    if twice := {name for name in names if names.count(name) > 1}:
        raise AotError(f"{op}: aot_cases gives {', '.join(sorted(twice))} more than once")
    return cases


def compile_case(op: str, case: AotCase, target: Target) -> Usage:
    """Compile a case and return its resources. Raise AotError with the first words of the compiler's error."""
    where = f"{op}: {case.name}: {target.name}"
    compiled = _compiled(where, case, target)
    return _amd_usage(where, compiled) if target.amd else _nvidia_usage(where, compiled)


def disassemble(op: str, case: AotCase, target: Target) -> str:
    """Compile a case for an NVIDIA GPU and return its machine code as text. Raise AotError as ``compile_case`` does."""
    return _cuobjdump(_compiled(f"{op}: {case.name}: {target.name}", case, target), "-sass").stdout


def _compiled(where: str, case: AotCase, target: Target) -> Any:
    if INTERPRETED:
        raise AotError("TRITON_INTERPRET=1 is set: kernels are interpreted in this process; unset it to compile them")
    source = _source(where, case)
    options = {name: value for name, value in case.launch.constants.items() if name in _OPTIONS}
    try:
        return triton.compile(source, target=_gpu_target(target), options=options)
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


def _source(where: str, case: AotCase) -> ASTSource:
    constexprs = {name: value for name, value in case.launch.constants.items() if name not in _OPTIONS}
    constexprs |= {name: None for name, kind in case.signature.items() if kind is None}
    names = case.launch.kernel.arg_names
    if unknown := [name for name in (*case.signature, *constexprs) if name not in names]:
        raise AotError(f"{where}: gives {', '.join(unknown)}; the kernel's arguments are {', '.join(names)}")
    if missing := [name for name in names if name not in case.signature and name not in constexprs]:
        raise AotError(f"{where}: lacks {', '.join(missing)}")
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, name in enumerate(names):
        kind, _, hint = (case.signature.get(name) or "constexpr").partition(":")
        if hint == "1":
            constexprs[name], kind = 1, "constexpr"
        elif hint == "16":
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif hint:
            raise AotError(f"{where}: {name}: {hint!r} is no hint; :16 and :1 are")
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


def _cuobjdump(compiled: Any, option: str) -> "subprocess.CompletedProcess[str]":
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, cubin.name]
        return subprocess.run(command, capture_output=True, text=True, check=False)


def _nvidia_usage(where: str, compiled: Any) -> Usage:
    result = _cuobjdump(compiled, "--dump-resource-usage")
    resources = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", result.stdout))
    if result.returncode or len(resources) < 3:
        raise AotError(f"{where}: cuobjdump says nothing of its resources: {result.stderr.strip() or result.stdout}")
    return Usage(
        registers=int(resources["REG"]),
        stack_bytes=int(resources["STACK"]),
        local_bytes=int(resources["LOCAL"]),
        shared_bytes=compiled.metadata.shared,
    )
