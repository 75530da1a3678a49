from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.errors import ArgumentError
from quire_kernels.linear import linear, reference

# Sums of many products, rounded once but added in another order.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
SHAPES = [(1, 1), (33, 77), (96, 64), (576, 1536), (1000, 200)]


def weights(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (torch.randn(outputs, inputs) / inputs**0.5).to(dtype), torch.randn(outputs).to(dtype)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 16, 17])
def test_equals_the_reference(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, strided: Callable[..., Tensor]
) -> None:
    weight, bias = weights(outputs, inputs, dtype)
    x = strided(rows, inputs, dtype=dtype)
    for given in (bias, None):
        found, tolerance = linear(x, weight, given), TOLERANCES[dtype]
        assert found.is_contiguous()
        torch.testing.assert_close(found, reference.linear(x, weight, given), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_row_has_the_same_bits_in_every_batch_and_place(
    outputs: int, inputs: int, dtype: torch.dtype, threads: int, strided: Callable[..., Tensor]
) -> None:
    weight, bias = weights(outputs, inputs, dtype)
    x = torch.randn(67, inputs).to(dtype)
    together = linear(x, weight, bias)
    for count in (1, 2, 7, 15, 16, 17, 33):
        for first in (0, 5, 31):
            assert torch.equal(linear(x[first : first + count], weight, bias), together[first : first + count])
    order = torch.randperm(67)
    assert torch.equal(linear(x[order], weight, bias), together[order])
    apart = strided(67, inputs, dtype=dtype, gap=3)
    apart.copy_(x)
    assert torch.equal(linear(apart, weight, bias), together)


def test_zero_rows_give_an_empty_result() -> None:
    assert linear(torch.zeros(0, 8), torch.zeros(5, 8)).shape == (0, 5)


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
def test_invalid_operands_are_refused(change: dict[str, Tensor], message: str) -> None:
    arguments = {"x": torch.zeros(2, 8), "weight": torch.zeros(5, 8), "bias": torch.zeros(5), **change}
    with pytest.raises(ArgumentError, match=message):
        linear(**arguments)
