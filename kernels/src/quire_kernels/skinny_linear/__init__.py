"""A linear layer for few rows, as in a decode step: a GPU reads each weight once, at the speed of its memory.

Libraries select their product by the number of rows, and for one to sixteen they reach 85 to 90 % of a GPU's bandwidth.
This kernel has one tile of rows, and divides the inputs so that all multiprocessors read. Which of the two is faster
differs by shape, GPU and number of rows: the engine measures both when it starts.

Legend: T rows, K inputs, N outputs.
"""

import torch
from torch import Tensor

from quire_kernels.checks import check_dense, check_device, check_storage, refuse
from quire_kernels.dispatch import implementation, runs_triton
from quire_kernels.errors import UnsupportedDeviceError

MAX_ROWS = 16
DTYPES = (torch.bfloat16, torch.float16)


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute y = x W^T + bias, accumulated in float32 and rounded once.

    x        [T, K], T up to ``MAX_ROWS``, bfloat16 or float16, rows at any stride
    weight   [N, K], contiguous, dtype of x
    bias     [N] or None, contiguous, dtype of x
    returns  [T, N], new and contiguous, dtype of x

    All launches on a device share memory for partial sums, so that they must be on one stream, or ordered by events.
    Raise ArgumentError on other shapes, strides, dtypes or devices, UnsupportedDeviceError on a CPU.
    """
    check_storage("skinny_linear", "x", x)
    if x.dtype not in DTYPES:
        refuse("skinny_linear", "x", f"is {x.dtype}; bfloat16 or float16 is needed")
    if x.dim() != 2 or x.shape[0] > MAX_ROWS:
        refuse("skinny_linear", "x", f"has shape {tuple(x.shape)}; up to {MAX_ROWS} rows of inputs are needed")
    if weight.dim() != 2:
        refuse("skinny_linear", "weight", f"has shape {tuple(weight.shape)}; [outputs, inputs] is needed")
    check_dense("skinny_linear", "weight", weight, x.dtype, (weight.shape[0], x.shape[1]))
    if bias is not None:
        check_dense("skinny_linear", "bias", bias, x.dtype, (weight.shape[0],))
    check_device("skinny_linear", x, weight=weight, bias=bias)
    if not runs_triton(x.device.type):
        raise UnsupportedDeviceError("skinny_linear: is for GPUs; on a CPU, packed_linear reads weights once")
    result: Tensor = implementation("skinny_linear", x.device.type).skinny_linear(x, weight, bias)
    return result
