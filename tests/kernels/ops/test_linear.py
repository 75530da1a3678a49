from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.errors import ArgumentError
from quire_kernels.linear import linear, reference

# Sums of many products, rounded once but added in another order.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def weights(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    return weight.to(device), torch.randn(outputs).to(dtype).to(device)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(1, 1, 1), (3, 33, 77), (17, 96, 64), (35, 130, 96), (1, 300, 600), (40, 200, 330)],
)
def test_equals_the_reference(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, strided: Callable[..., Tensor], device: torch.device
) -> None:
    weight, bias = weights(outputs, inputs, dtype, device)
    x = strided(rows, inputs, dtype=dtype)
    for given in (bias, None):
        found, tolerance = linear(x, weight, given), TOLERANCES[dtype]
        assert found.is_contiguous()
        torch.testing.assert_close(found, reference.linear(x, weight, given), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("outputs", "inputs"), [(33, 77), (130, 590)])
def test_row_has_the_same_bits_in_every_batch_and_place(
    outputs: int, inputs: int, dtype: torch.dtype, strided: Callable[..., Tensor], device: torch.device
) -> None:
    weight, bias = weights(outputs, inputs, dtype, device)
    x = torch.randn(67, inputs).to(dtype).to(device)
    together = linear(x, weight, bias)
    for first, count in ((0, 1), (66, 1), (7, 16), (15, 17), (11, 33)):
        assert torch.equal(linear(x[first : first + count], weight, bias), together[first : first + count])
    order = torch.randperm(67)[:50].to(device)
    assert torch.equal(linear(x[order], weight, bias), together[order])
    apart = strided(67, inputs, dtype=dtype, gap=3)
    apart.copy_(x)
    assert torch.equal(linear(apart, weight, bias), together)


def test_rows_outside_the_matrix_are_not_accessed(device: torch.device) -> None:
    weight, _ = weights(33, 64, torch.float32, device)
    x = torch.full((9, 64), torch.nan, device=device)
    x[4] = 1.0
    found = linear(x, weight)
    assert bool(found[4].isfinite().all()) and bool(found[[0, 3, 5, 8]].isnan().all())
    assert linear(x[:0], weight).shape == (0, 33)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(8)}, r"linear: x has shape \(8,\); \[rows, inputs\] is needed"),
        ({"x": torch.zeros(2, 8).int()}, "linear: x is torch.int32"),
        ({"x": torch.zeros(8, 2).t()}, "linear: x has strides"),
        ({"weight": torch.zeros(8)}, r"linear: weight has shape \(8,\); \[outputs, inputs\] is needed"),
        ({"weight": torch.zeros(5, 7)}, r"linear: weight is .*; a contiguous torch.float32 \(5, 8\) is needed"),
        ({"weight": torch.zeros(5, 8).half()}, "linear: weight is torch.float16"),
        ({"bias": torch.zeros(8)}, r"linear: bias is .*; a contiguous torch.float32 \(5,\) is needed"),
    ],
)
def test_invalid_operands_are_refused(change: dict[str, Tensor], message: str, device: torch.device) -> None:
    arguments = {"x": torch.zeros(2, 8), "weight": torch.zeros(5, 8), "bias": torch.zeros(5), **change}
    with pytest.raises(ArgumentError, match=message):
        linear(**{name: tensor.to(device) for name, tensor in arguments.items()})
