"""Gated activations in Triton. Each program computes a part of one row.

silu(x) = x / (1 + exp(-x)) (Shazeer, arXiv 2002.05202). gelu with tanh is x (1 + tanh(u)) / 2, where u = sqrt(2 / pi)
(x + 0.044715 x ** 3) (Hendrycks and Gimpel, arXiv 1606.08415). This equals x / (1 + exp(-2 u)), so the device needs
only exp. All computations are in float32. With float8 as the result, a program has a whole row, because its scale
depends on all of it, and rounds to the dtype of its input first, so that the bits are those of two ops.

Legend: T rows, W intermediate size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.fp8 import Fp8Rows
from quire_kernels.fp8_linear.device_functions import row_factors, to_float8
from quire_kernels.fp8_linear.kernel import empty_rows, quantise_rows
from quire_kernels.triton_runtime.config import config_for
from quire_kernels.triton_runtime.device import require_device, require_fp8, target_of
from quire_kernels.triton_runtime.launch import Launch, cdiv, launches, next_power_of_2
from quire_kernels.triton_runtime.target import Target

WIDEST_ROW = 1 << 15
"""The maximum intermediate size of a row that fits into a program's registers."""


@triton.jit
def _gated(gate_up, column, inside, W: tl.constexpr, GELU: tl.constexpr):
    """Return the activation of the columns of a row, in the dtype of ``gate_up``, the row's first element."""
    loaded = tl.load(gate_up + column, mask=inside, other=0.0)
    up = tl.load(gate_up + W + column, mask=inside, other=0.0).to(tl.float32)
    gate = loaded.to(tl.float32)
    exponent = -gate
    if GELU:
        exponent *= 1.5957691216057308 * (1.0 + 0.044715 * gate * gate)  # 2 sqrt(2 / pi)
    # Above 88, exp exceeds the range of float32, and the quotient is 0 there anyway.
    power = tl.exp(tl.minimum(exponent, 88.0))
    return (gate / (1.0 + power) * up).to(loaded.dtype)


@triton.jit
def _gated_kernel(
    gate_up,  # [T, 2 W]
    out,  # [T, W], contiguous
    row_stride,
    W: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < W
    tl.store(out + row * W + column, _gated(gate_up + row * row_stride, column, inside, W, GELU), mask=inside)


@triton.jit
def _gated_fp8_kernel(
    gate_up,  # [T, 2 W]
    out,  # [T, W] float8, contiguous
    scales,  # [T, 1]
    row_stride,
    W: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < W
    value = _gated(gate_up + row * row_stride, column, inside, W, GELU).to(tl.float32)
    factor, scale = row_factors(tl.max(tl.abs(value), axis=0))
    tl.store(scales + row, scale)
    tl.store(out + row * W + column, to_float8(value * factor), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return _run("silu_and_mul", gate_up, gelu=False)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    return _run("gelu_tanh_and_mul", gate_up, gelu=True)


def _run(op: str, gate_up: Tensor, *, gelu: bool) -> Tensor:
    require_device(op, gate_up.device)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        launch = _launch(width, gelu, target_of(gate_up.device))
        launch((rows, cdiv(width, launch.constants["BLOCK"])), gate_up, out, gate_up.stride(0))
    return out


def gated_fp8(op: str, gate_up: Tensor) -> Fp8Rows:
    require_device(op, gate_up.device)
    require_fp8(op, gate_up.device, "layers in float8_e4m3fn")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gelu = op == "gelu_tanh_and_mul"
    if width > WIDEST_ROW:
        return quantise_rows(_run(op, gate_up, gelu=gelu))
    out = empty_rows(rows, width, gate_up.device)
    if rows:
        launch = _fp8_launch(width, gelu, target_of(gate_up.device))
        launch((rows,), gate_up, out.values, out.scales, gate_up.stride(0))
    return out


@launches
def _launch(width: int, gelu: bool, target: Target) -> Launch:
    widest = next_power_of_2(width)
    options = config_for("activation.gated", target, f"block={widest}").options
    options["BLOCK"] = min(options["BLOCK"], widest)
    return Launch(_gated_kernel, W=width, GELU=gelu, **options)


@launches
def _fp8_launch(width: int, gelu: bool, target: Target) -> Launch:
    block = next_power_of_2(width)
    options = config_for("activation.gated_row", target, f"block={block}").options
    return Launch(_gated_fp8_kernel, W=width, GELU=gelu, BLOCK=block, **options)
