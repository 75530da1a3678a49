"""What a ``kernel.py`` says of its kernels so that they can be compiled ahead of time, on a machine without a GPU.

Each ``<op>/kernel.py`` exposes ``aot_cases(target: Target) -> list[AotCase]``: one case per kernel and per variant of
it that is launched in service (dtype, head dim, flags), with the warps, stages and blocks that ``config_for`` gives on
that target. ``make kernels-aot`` compiles them all and holds their registers, stack and shared memory to bounds kept in
the repository. This module knows neither Triton nor torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AotCase:
    """One compilation.

    name         unique within the op, the same on every target: the key of its bounds
    kernel       the ``@triton.jit`` function
    signature    every argument that is no constexpr, by name, in Triton's words: "*bf16", "*i32", "i32", "fp32", "u64".
                 A suffix says what the launcher finds out about a value: ":16" divisible by 16 (almost every pointer,
                 and strides of dense tensors), ":1" equal to 1
    constexprs   every constexpr argument, by name; None for an optional tensor that is not given
    decode_path  runs in a decode step: may use neither stack nor local memory on sm_90
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, object] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    decode_path: bool = False
