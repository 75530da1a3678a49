"""Root-mean-square norm, optionally after an addition to the residual stream.

Legend: T rows, H hidden size.
"""

from torch import Tensor

from quire_kernels.checks import check_dense, check_device, check_like, check_storage, refuse
from quire_kernels.dispatch import implementation
from quire_kernels.fp8 import Fp8Rows
from quire_kernels.fp8_linear import require_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Compute y = x / sqrt(mean(x ** 2) + eps) * weight, row by row (Zhang and Sennrich, 2019).

    x        [T, H], rows at any stride
    weight   [H], contiguous, dtype of x
    residual [T, H]; if given, it becomes x + residual *in place*, and that sum is normalized
    returns  [T, H], new and contiguous, dtype of x

    The computation is in float32. Raise ArgumentError on other shapes, strides, dtypes or devices.
    """
    _check(x, weight, residual)
    return implementation("rms_norm", x.device.type).rms_norm(x, weight, eps, residual)


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Fp8Rows:
    """Return the result of ``rms_norm`` quantized row by row, as ``fp8_linear.quantise_rows`` would, in one launch.

    Raise UnsupportedDeviceError where there is no float8, and else the errors of ``rms_norm``.
    """
    _check(x, weight, residual)
    require_triton("rms_norm", x)
    rows: Fp8Rows = implementation("rms_norm", x.device.type).rms_norm_fp8(x, weight, eps, residual)
    return rows


def _check(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    check_storage("rms_norm", "x", x)
    if x.dim() != 2:
        refuse("rms_norm", "x", f"has shape {tuple(x.shape)}; [rows, hidden size] is needed")
    check_dense("rms_norm", "weight", weight, x.dtype, (x.shape[1],))
    if residual is not None:
        check_like("rms_norm", "residual", residual, x)
    check_device("rms_norm", x, weight=weight, residual=residual)
