"""The description of a kernel for ahead-of-time compilation on a machine without a GPU.

Each ``<op>/kernel.py`` exposes ``aot_cases(target: Target) -> list[AotCase]``: one case per kernel and per variant that
is launched in service (dtype, head dim, flags), with the warps, stages and blocks that ``config_for`` returns for that
target. ``make kernels-aot`` compiles them all and compares their registers, stack and shared memory with bounds in the
repository. This module imports neither Triton nor torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AotCase:
    """One compilation of a kernel.

    name         unique within the op, the same on every target: the key of its bounds
    kernel       the ``@triton.jit`` function
    signature    every argument that is not a constexpr, by name, with Triton's types: "*bf16", "*i32", "i32", "fp32",
                 "u64". A suffix is what the launcher would find out about a value: ":16" divisible by 16 (almost every
                 pointer, and strides of dense tensors), ":1" equal to 1
    constexprs   every constexpr argument, by name; None for an optional tensor that is absent
    decode_path  whether it runs in a decode step: then it may use neither stack nor local memory on GPUs of data
                 centers (``NO_SPILL_TARGETS`` of the bounds)
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, object] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None
    """The registers per thread to which the launch limits the compiler; None leaves it free."""
    programs_per_sm: int = 1
    """The programs that a persistent launch expects to run on one multiprocessor at once."""
    decode_path: bool = False
