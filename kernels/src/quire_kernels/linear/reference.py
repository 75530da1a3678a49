"""linear in plain torch: the reference for every implementation."""

from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    wide = x.double() @ weight.double().t()  # [T, N]
    return (wide if bias is None else wide + bias.double()).to(x.dtype)
