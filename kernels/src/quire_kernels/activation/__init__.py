"""Gated activations of the feed-forward layers.

Legend: T rows, I intermediate size.
"""

from torch import Tensor

from quire_kernels.checks import check_storage, refuse
from quire_kernels.dispatch import implementation
from quire_kernels.fp8 import Fp8Rows
from quire_kernels.fp8_linear import require_triton


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute y = gate / (1 + exp(-gate)) * up, the activation of SwiGLU (Shazeer, arXiv 2002.05202).

    gate_up  [T, 2 I]: I columns of gate, then I of up; rows at any stride
    returns  [T, I], new and contiguous, same dtype

    The computation is in float32. Raise ArgumentError on other shapes, strides or dtypes.
    """
    _check("silu_and_mul", gate_up)
    return implementation("activation", gate_up.device.type).silu_and_mul(gate_up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Compute y = gelu(gate) * up, the activation of GeGLU with the tanh approximation.

    gelu(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x ** 3))) / 2. Arguments, result and errors are those of
    ``silu_and_mul`` (Hendrycks and Gimpel, arXiv 1606.08415; Shazeer, arXiv 2002.05202).
    """
    _check("gelu_tanh_and_mul", gate_up)
    return implementation("activation", gate_up.device.type).gelu_tanh_and_mul(gate_up)


def silu_and_mul_fp8(gate_up: Tensor) -> Fp8Rows:
    """Return the result of ``silu_and_mul`` quantized row by row, as ``fp8_linear.quantise_rows`` would.

    Raise UnsupportedDeviceError where there is no float8, and else the errors of ``silu_and_mul``.
    """
    return _gated_fp8("silu_and_mul", gate_up)


def gelu_tanh_and_mul_fp8(gate_up: Tensor) -> Fp8Rows:
    """Return the result of ``gelu_tanh_and_mul`` quantized row by row; see ``silu_and_mul_fp8``."""
    return _gated_fp8("gelu_tanh_and_mul", gate_up)


def _gated_fp8(op: str, gate_up: Tensor) -> Fp8Rows:
    _check(op, gate_up)
    require_triton(op, gate_up)
    rows: Fp8Rows = implementation("activation", gate_up.device.type).gated_fp8(op, gate_up)
    return rows


def _check(op: str, gate_up: Tensor) -> None:
    check_storage(op, "gate_up", gate_up)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        refuse(op, "gate_up", f"has shape {tuple(gate_up.shape)}; [rows, 2 * intermediate size] is needed")
