"""A linear layer whose every row is a function of that row alone: the same bits whatever else is in the batch.

Ordinary matrix multiplication chooses its tiles, and with them the order in which products are added, by the number of
rows; so a request's logits depend on its neighbours. Here order and instructions follow from the weight's shape alone
(He and Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference", 2025). It costs speed, and is for
``--deterministic``.

Legend: T rows, K inputs, N outputs.
"""

from torch import Tensor

from quire_kernels.checks import check_dense, check_device, check_storage, refuse
from quire_kernels.dispatch import implementation


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + bias, added up in float32 and rounded once.

    x        [T, K], rows at any stride
    weight   [N, K], contiguous, dtype of x
    bias     [N] or None, contiguous, dtype of x
    returns  [T, N], new and contiguous, dtype of x

    Row t of the result has the same bits in every batch that row t of x is in, at whatever place, on one device and
    with one number of threads. Raises ArgumentError on other shapes, strides, dtypes or devices.
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
