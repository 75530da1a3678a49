"""rms_norm in Triton: a program reads its rows once and keeps them in registers until they are scaled.

y = x / sqrt(mean(x ** 2) + eps) * weight (Zhang and Sennrich, arXiv 1910.07467), in float32; the sum with the residual
is rounded to its dtype first, because later layers read it.

The order of additions in a row depends only on the hidden size, not on the other rows.

With float8 as the result, the norm is rounded to the dtype of its input first, so that the bits are those of two ops.

Legend: T rows, H hidden size.
"""

import torch
import triton.language as tl
from torch import Tensor

from quire_kernels.checks import refuse
from quire_kernels.fp8 import Fp8Rows
from quire_kernels.fp8_linear.device_functions import row_factors, to_float8
from quire_kernels.fp8_linear.kernel import empty_rows
from quire_kernels.triton_runtime.config import config_for
from quire_kernels.triton_runtime.debug import kernel
from quire_kernels.triton_runtime.device import require_device, require_fp8, target_of
from quire_kernels.triton_runtime.launch import Launch, cdiv, launches, next_power_of_2
from quire_kernels.triton_runtime.target import Target

WIDEST = 1 << 15
"""The maximum hidden size that fits into a program's registers."""


@kernel(varying=["rows"])
def _rms_norm_kernel(
    x,  # [T, H]
    weight,  # [H]
    residual,  # [T, H], not read unless ADD
    out,  # [T, H], contiguous
    scales,  # [T, 1] for float8, else None
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
    result = (value * scale[:, None] * weights).to(loaded.dtype)  # [ROWS, BLOCK]
    if scales is not None:
        wide = result.to(tl.float32)
        factor, row_scale = row_factors(tl.max(tl.abs(wide), axis=1)[:, None])  # [ROWS, 1]
        tl.store(scales + row, row_scale, mask=row < rows)
        result = to_float8(wide * factor)
    tl.store(out + row * H + column, result, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    _require(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run(x, weight, eps, residual, out, None)
    return out


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Fp8Rows:
    _require(x)
    require_fp8("rms_norm", x.device, "layers in float8_e4m3fn")
    out = empty_rows(x.shape[0], x.shape[1], x.device)
    _run(x, weight, eps, residual, out.values, out.scales)
    return out


def _run(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: Tensor, scales: Tensor | None) -> None:
    rows, width = x.shape
    if rows:
        launch = _launch(width, residual is not None, target_of(x.device))
        added = x if residual is None else residual
        programs = cdiv(rows, launch.constants["ROWS"])
        launch((programs,), x, weight, added, out, scales, rows, x.stride(0), added.stride(0), eps)


def _require(x: Tensor) -> None:
    require_device("rms_norm", x.device)
    if x.shape[1] > WIDEST:
        refuse("rms_norm", "x", f"has rows of {x.shape[1]}; at most {WIDEST} are taken on a GPU")


@launches
def _launch(width: int, adds: bool, target: Target) -> Launch:
    # Short rows, those of heads, share a program: with one row, it would mostly wait for memory.
    block = next_power_of_2(width)
    options = config_for("rms_norm.norm", target, f"block={block}").options
    return Launch(_rms_norm_kernel, H=width, ADD=adds, BLOCK=block, **options)
