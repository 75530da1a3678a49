"""rms_norm in Triton: a program reads its rows once and keeps them in registers until they are scaled.

y = x / sqrt(mean(x ** 2) + eps) * weight (Zhang and Sennrich, arXiv 1910.07467), in float32; the sum with the residual
is rounded to its dtype first, because later layers read it.

The order of additions in a row depends only on the hidden size, not on the other rows.

Legend: T rows, H hidden size.
"""

import torch
import triton.language as tl
from torch import Tensor

from quire_kernels.checks import refuse
from quire_kernels.triton_runtime.aot_case import AotCase
from quire_kernels.triton_runtime.config import config_for
from quire_kernels.triton_runtime.debug import kernel
from quire_kernels.triton_runtime.device import require_device, target_of
from quire_kernels.triton_runtime.launch import Launch, launches
from quire_kernels.triton_runtime.sizes import cdiv, next_power_of_2
from quire_kernels.triton_runtime.target import Target

WIDEST = 1 << 15
"""The maximum hidden size that fits into a program's registers."""


@kernel(varying=["rows"])
def _rms_norm_kernel(
    x,  # [T, H]
    weight,  # [H]
    residual,  # [T, H], not read unless ADD
    out,  # [T, H], contiguous
    rows,
    x_stride,
    residual_stride,
    eps,
    H: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = (row < rows) & (column < H)
    loaded = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    value = loaded.to(tl.float32)
    if ADD:
        target = residual + row * residual_stride + column
        value += tl.load(target, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(loaded.dtype)
        tl.store(target, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / H + eps)  # [ROWS]
    weights = tl.load(weight + column, mask=column < H, other=0.0).to(tl.float32)
    tl.store(out + row * H + column, (value * scale[:, None] * weights).to(loaded.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    require_device("rms_norm", x.device)
    rows, width = x.shape
    if width > WIDEST:
        refuse("rms_norm", "x", f"has rows of {width}; at most {WIDEST} are taken on a GPU")
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        launch = _launch(width, residual is not None, target_of(x.device))
        added = x if residual is None else residual
        programs = cdiv(rows, launch.constants["ROWS"])
        launch((programs,), x, weight, added, out, rows, x.stride(0), added.stride(0), eps)
    return out


@launches
def _launch(width: int, adds: bool, target: Target) -> Launch:
    return Launch(_rms_norm_kernel, H=width, ADD=adds, **_options(width, target))


def _options(width: int, target: Target) -> dict[str, int]:
    # Short rows, those of heads, share a program: with one row, it would mostly wait for memory.
    block = next_power_of_2(width)
    return {"BLOCK": block, **config_for("rms_norm.norm", target, f"block={block}").options}


def aot_cases(target: Target) -> list[AotCase]:
    def case(dtype: str, width: int, *, add: bool) -> AotCase:
        launch = _options(width, target)
        num_warps, num_stages = launch.pop("num_warps"), launch.pop("num_stages")
        pointers = dict.fromkeys(("x", "weight", "residual", "out"), f"*{dtype}:16")
        strides = {"x_stride": "i32:16", "residual_stride": "i32:16"}
        return AotCase(
            name=f"{dtype} {width}{' residual' if add else ''}",
            kernel=_rms_norm_kernel,
            signature={**pointers, "rows": "i32", **strides, "eps": "fp32"},
            constexprs={"H": width, "ADD": add, **launch},
            num_warps=num_warps,
            num_stages=num_stages,
            decode_path=True,
        )

    return [
        *(case("bf16", width, add=True) for width in (576, 4096, 8192, 16384)),
        *(case("bf16", width, add=False) for width in (128, 4096)),
        case("fp16", 4096, add=True),
        case("fp32", 576, add=True),
    ]
