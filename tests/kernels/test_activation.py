from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.activation import gelu_tanh_and_mul, reference, silu_and_mul
from quire_kernels.errors import ArgumentError


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 704), (5, 33), (130, 320)])
@pytest.mark.parametrize("op", [silu_and_mul, gelu_tanh_and_mul])
def test_equals_the_reference(
    op: Callable[[Tensor], Tensor],
    rows: int,
    width: int,
    dtype: torch.dtype,
    threads: int,
    strided: Callable[..., Tensor],
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    gate_up = strided(rows, 2 * width, dtype=dtype)
    assert_close(op(gate_up), getattr(reference, op.__name__)(gate_up))


@pytest.mark.parametrize("op", [silu_and_mul, gelu_tanh_and_mul])
def test_equals_the_reference_at_the_ends_of_the_range(op: Callable[[Tensor], Tensor]) -> None:
    gate = torch.tensor([-1e30, -200.0, -87.5, -1.0, 0.0, 1.0, 88.5, 1e30])
    gate_up = torch.cat((gate, torch.ones(8))).unsqueeze(0)
    expected = getattr(reference, op.__name__)(gate_up)
    torch.testing.assert_close(op(gate_up), expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.zeros(2, 7), r"silu_and_mul: gate_up has shape \(2, 7\); \[rows, 2 \* intermediate size\] is needed"),
        (torch.zeros(8), r"silu_and_mul: gate_up has shape \(8,\)"),
        (torch.zeros(8, 2).t(), "silu_and_mul: gate_up has strides"),
        (torch.zeros(2, 8).double(), "silu_and_mul: gate_up is torch.float64"),
    ],
)
def test_invalid_arguments_are_refused(gate_up: Tensor, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        silu_and_mul(gate_up)
