"""The quantization of rows to float8 in Triton, for inputs of layers that no norm or activation has quantized.

A program reads its row twice: for the largest magnitude, and, from the cache, to round it.

Legend: T rows, K inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.fp8 import DTYPE, Fp8Rows
from quire_kernels.fp8_linear.device_functions import row_factors, to_float8
from quire_kernels.triton_runtime.config import config_for
from quire_kernels.triton_runtime.device import require_device, require_fp8, target_of
from quire_kernels.triton_runtime.launch import Launch, launches, next_power_of_2
from quire_kernels.triton_runtime.target import Target


@triton.jit
def _quantise_rows_kernel(
    x,  # [T, K]
    out,  # [T, K], contiguous
    scales,  # [T, 1]
    row_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, K, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        value = tl.load(x + row * row_stride + column, mask=column < K, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    factor, scale = row_factors(tl.max(largest, axis=0))
    tl.store(scales + row, scale)
    for begin in range(0, K, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        value = tl.load(x + row * row_stride + column, mask=column < K, other=0.0).to(tl.float32)
        tl.store(out + row * K + column, to_float8(value * factor), mask=column < K)


def quantise_rows(x: Tensor) -> Fp8Rows:
    require_device("fp8_linear", x.device)
    require_fp8("fp8_linear", x.device, "layers in float8_e4m3fn")
    rows, width = x.shape
    quantised = empty_rows(rows, width, x.device)
    if rows:
        _launch(width, target_of(x.device))((rows,), x, quantised.values, quantised.scales, x.stride(0))
    return quantised


def empty_rows(rows: int, width: int, device: torch.device) -> Fp8Rows:
    """Return memory for quantized rows."""
    return Fp8Rows(
        torch.empty((rows, width), dtype=DTYPE, device=device),
        torch.empty((rows, 1), dtype=torch.float32, device=device),
    )


@launches
def _launch(width: int, target: Target) -> Launch:
    options = config_for("fp8_linear.quantise", target).options
    options["BLOCK"] = min(options["BLOCK"], next_power_of_2(width))
    return Launch(_quantise_rows_kernel, K=width, **options)
