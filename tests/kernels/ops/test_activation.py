from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.activation import gelu_tanh_and_mul, reference, silu_and_mul
from quire_kernels.errors import ArgumentError

Op = Callable[[Tensor], Tensor]
OPS = pytest.mark.parametrize("op", [silu_and_mul, gelu_tanh_and_mul])


@OPS
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (17, 33), (130, 320), (1, 4096)])
def test_equals_the_reference(
    op: Op,
    rows: int,
    width: int,
    dtype: torch.dtype,
    threads: int,
    strided: Callable[..., Tensor],
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    gate_up = strided(rows, 2 * width, dtype=dtype)
    assert_close(op(gate_up), getattr(reference, op.__name__)(gate_up))


# The interpreter's numpy warns of infinities, on which the kernels rely as in IEEE 754.
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@OPS
def test_gates_far_from_zero_neither_overflow_nor_vanish(op: Op, device: torch.device) -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, -87.5, -10.0, -1e-4, 0.0, 1e-4, 10.0, 88.5, 90.0, 200.0, 1e30])
    gate_up = torch.cat((gate, torch.ones_like(gate))).unsqueeze(0).to(device)
    torch.testing.assert_close(op(gate_up), getattr(reference, op.__name__)(gate_up), rtol=2e-5, atol=1e-8)


@OPS
def test_zero_rows_give_an_empty_result(op: Op, device: torch.device) -> None:
    assert op(torch.zeros(0, 32, device=device)).shape == (0, 16)


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.zeros(2, 7), r"silu_and_mul: gate_up has shape \(2, 7\); \[rows, 2 \* intermediate size\] is needed"),
        (torch.zeros(8), r"silu_and_mul: gate_up has shape \(8,\)"),
        (torch.zeros(8, 2).t(), "silu_and_mul: gate_up has strides"),
        (torch.zeros(2, 8).double(), "silu_and_mul: gate_up is torch.float64"),
    ],
)
def test_invalid_arguments_are_refused(gate_up: Tensor, message: str, device: torch.device) -> None:
    with pytest.raises(ArgumentError, match=message):
        silu_and_mul(gate_up.to(device))
