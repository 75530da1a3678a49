"""Linear layers with weights and activations in float8 (e4m3): one scale per output, and one per row of activations.

The product is torch's own (``torch._scaled_mm``, row-wise: cuBLASLt or CUTLASS on a GPU), which writes bfloat16. Norms
and activations quantize their results themselves (``rms_norm.rms_norm_fp8``, ``activation.silu_and_mul_fp8``); other
inputs are quantized by ``quantise_rows``. All of them round alike, so that a result does not depend on which did.

Legend: T rows, K inputs, N outputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels.checks import check_dense, check_device, check_storage, refuse
from quire_kernels.dispatch import implementation, runs_triton
from quire_kernels.errors import UnsupportedDeviceError
from quire_kernels.fp8 import DTYPE, Fp8Rows
from quire_kernels.fp8 import quantise_rows as reference_rows

SIZE_UNIT = 16
"""Inputs and outputs of a product must be multiples of this."""
_ROWS_AT_ONCE = 4096
"""The rows of a weight that are in float32 at once while it is quantized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weights:
    """A quantized weight in the layout of the product."""

    transposed: Tensor  # [K, N] float8_e4m3fn, a view of dense rows [N, K]
    scales: Tensor  # [1, N] float32
    bias: Tensor | None  # [N] bfloat16
    dtype: torch.dtype
    """The dtype of the weight before, and of activations and results."""

    @property
    def inputs(self) -> int:
        return self.transposed.shape[0]

    @property
    def outputs(self) -> int:
        return self.transposed.shape[1]


def quantise_weight(weight: Tensor, bias: Tensor | None = None) -> Fp8Weights:
    """Return ``weight`` [N, K], at any strides, with one scale per output; ``bias`` [N] is rounded to bfloat16.

    Raise ArgumentError if N or K is no multiple of ``SIZE_UNIT``.
    """
    if weight.dim() != 2 or any(size % SIZE_UNIT for size in weight.shape):
        refuse("fp8_linear", "weight", f"has shape {tuple(weight.shape)}; multiples of {SIZE_UNIT} are needed")
    if bias is not None:
        check_dense("fp8_linear", "bias", bias, weight.dtype, (weight.shape[0],))
    values = torch.empty(weight.shape, dtype=DTYPE, device=weight.device)  # [N, K]
    scales = torch.empty((1, weight.shape[0]), dtype=torch.float32, device=weight.device)
    for begin in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = reference_rows(weight[begin : begin + _ROWS_AT_ONCE])
        values[begin : begin + _ROWS_AT_ONCE] = rows.values
        scales[0, begin : begin + _ROWS_AT_ONCE] = rows.scales[:, 0]
    return Fp8Weights(
        transposed=values.t(),
        scales=scales,
        bias=None if bias is None else bias.to(torch.bfloat16),
        dtype=weight.dtype,
    )


def quantise_rows(x: Tensor) -> Fp8Rows:
    """Return ``x`` [T, K] quantized row by row; see ``quire_kernels.fp8``.

    x  float32, bfloat16 or float16, rows at any stride

    Raise ArgumentError on other shapes, strides or dtypes, UnsupportedDeviceError where there is no float8.
    """
    check_storage("fp8_linear", "x", x)
    if x.dim() != 2:
        refuse("fp8_linear", "x", f"has shape {tuple(x.shape)}; [rows, inputs] is needed")
    require_triton("fp8_linear", x)
    rows: Fp8Rows = implementation("fp8_linear", x.device.type).quantise_rows(x)
    return rows


def fp8_linear(x: Tensor | Fp8Rows, weights: Fp8Weights) -> Tensor:
    """Compute y = x W^T + bias from quantized rows, or from ``x`` [T, K], which is then quantized.

    returns  [T, N], new and contiguous, of the dtype of the weight before it was quantized. It is rounded to bfloat16

    Raise ArgumentError on other shapes, dtypes or devices.
    """
    rows = quantise_rows(x) if isinstance(x, Tensor) else x
    values, scales = rows.values, rows.scales
    if values.dim() != 2 or values.shape[1] != weights.inputs:
        refuse("fp8_linear", "x", f"has shape {tuple(values.shape)}; rows of {weights.inputs} inputs are needed")
    check_dense("fp8_linear", "x", values, DTYPE, tuple(values.shape))
    check_dense("fp8_linear", "scales of x", scales, torch.float32, (values.shape[0], 1))
    check_device("fp8_linear", values, scales=scales)
    if not values.shape[0]:
        return values.new_empty((0, weights.outputs), dtype=weights.dtype)
    y = torch._scaled_mm(
        values,
        weights.transposed,
        scale_a=scales,
        scale_b=weights.scales,
        bias=weights.bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return y if weights.dtype == torch.bfloat16 else y.to(weights.dtype)


def require_triton(op: str, x: Tensor) -> None:
    """Raise UnsupportedDeviceError on a CPU, where only Triton's interpreter quantizes to float8."""
    if not runs_triton(x.device.type):
        raise UnsupportedDeviceError(f"{op}: float8 is for GPUs; on a CPU, weights are quantized to int8")
