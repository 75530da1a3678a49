"""Rows of activations in float8 (e4m3), each with a scale of its own: what norms and activations give to fp8 layers.

A row x becomes q = round(x * (448 / a)) and the scale s = a / 448, where a is its largest magnitude, so that x is about
q s (dynamic quantization per token; the format: Micikevicius et al., arXiv 2209.05433). Both divisions and the product
are in float32, and q is rounded to nearest even. A row with NaN or infinity gives NaN.

Legend: T rows, K columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number in the format."""
SMALLEST_MAGNITUDE = 1e-30
"""The least value of a: it keeps 448 / a finite for a row of zeros, or nearly so."""


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    values: Tensor  # [T, K] float8_e4m3fn
    scales: Tensor  # [T, 1] float32

    def dequantised(self) -> Tensor:
        """Return the rows [T, K] in float32."""
        return self.values.float() * self.scales


def quantise_rows(x: Tensor) -> Fp8Rows:
    """Return ``x`` [T, K] quantized, by torch's own operations: the reference, and the quantization of weights."""
    wide = x.float()
    # amax is NaN if any element is; the element itself then is NaN after the rounding.
    largest = wide.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST_MAGNITUDE)  # [T, 1]
    # A number divided by a tensor would be the product with its reciprocal, which is rounded twice.
    return Fp8Rows((wide * (torch.full_like(largest, LARGEST) / largest)).to(DTYPE), largest / LARGEST)
