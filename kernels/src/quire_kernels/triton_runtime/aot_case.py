"""The description of a launch for ahead-of-time compilation on a machine without a GPU.

Each ``<op>/kernel.py`` exposes ``aot_cases(target: Target) -> list[AotCase]``: one case per kernel and per variant that
is launched in service (dtype, head dim, flags), with the launch that the op itself uses on that target.
``make kernels-aot`` compiles them all and compares their registers, stack and shared memory with bounds in the
repository.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quire_kernels.triton_runtime.launch import Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class AotCase:
    """One compilation of a kernel.

    name             unique within the op, the same on every target: the key of its bounds
    launch           the kernel and its constants
    signature        every other argument, by name, with Triton's types: "*bf16", "*i32", "i32", "fp32", "u64"; None for
                     an optional argument that is absent. A suffix is what the launcher would find out about a value:
                     ":16" divisible by 16 (almost every pointer, and strides of dense tensors), ":1" equal to 1
    programs_per_sm  the programs that a persistent launch expects to run on one multiprocessor at once
    decode_path      whether it runs in a decode step: then it may use neither stack nor local memory on GPUs of data
                     centers (``NO_SPILL_TARGETS`` of the bounds)
    """

    name: str
    launch: Launch
    signature: Mapping[str, str | None]
    programs_per_sm: int = 1
    decode_path: bool = True
