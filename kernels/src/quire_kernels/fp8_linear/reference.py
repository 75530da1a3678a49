"""fp8_linear in plain torch: the reference for every implementation."""

from torch import Tensor

from quire_kernels.fp8 import quantise_rows


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the product with a weight [N, K] that is not quantized yet, in float64."""
    rows, outputs = quantise_rows(x), quantise_rows(weight)
    product = rows.values.double() @ outputs.values.double().t()  # [T, N]
    product *= rows.scales.double() * outputs.scales.double().t()
    return (product if bias is None else product + bias.double()).to(x.dtype)
