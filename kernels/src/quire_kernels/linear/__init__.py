"""A linear layer in which each row's result depends on that row alone: its bits are the same in every batch.

Ordinary matrix multiplication selects its tiles, and with them the order of additions, by the number of rows, so a
request's logits depend on the rest of the batch. Here order and instructions depend only on the weight's shape (He and
Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference", 2025). This is slower, and is used in deterministic
mode (``--deterministic``).

Legend: T rows, K inputs, N outputs.
"""

from torch import Tensor

from quire_kernels.checks import check_dense, check_device, check_storage, refuse
from quire_kernels.dispatch import implementation


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute y = x W^T + bias, accumulated in float32 and rounded once.

    x        [T, K], rows at any stride
    weight   [N, K], contiguous, dtype of x
    bias     [N] or None, contiguous, dtype of x
    returns  [T, N], new and contiguous, dtype of x

    Row t of the result has the same bits in every batch that contains row t of x, at any position, on one device and
    with one number of threads. Raise ArgumentError on other shapes, strides, dtypes or devices.
    """
    check_storage("linear", "x", x)
    if x.dim() != 2:
        refuse("linear", "x", f"has shape {tuple(x.shape)}; [rows, inputs] is needed")
    if weight.dim() != 2:
        refuse("linear", "weight", f"has shape {tuple(weight.shape)}; [outputs, inputs] is needed")
    check_dense("linear", "weight", weight, x.dtype, (weight.shape[0], x.shape[1]))
    if bias is not None:
        check_dense("linear", "bias", bias, x.dtype, (weight.shape[0],))
    check_device("linear", x, weight=weight, bias=bias)
    return implementation("linear", x.device.type).linear(x, weight, bias)
