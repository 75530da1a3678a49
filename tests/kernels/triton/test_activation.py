from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.activation import gelu_tanh_and_mul, reference, silu_and_mul

Close = Callable[[Tensor, Tensor], None]
OPERATIONS = [
    pytest.param(silu_and_mul, reference.silu_and_mul, id="silu"),
    pytest.param(gelu_tanh_and_mul, reference.gelu_tanh_and_mul, id="gelu"),
]


@pytest.mark.parametrize(("operation", "expected"), OPERATIONS)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 96), (17, 33), (2, 1536), (1, 4096)])
def test_equals_the_reference(
    operation: Callable[[Tensor], Tensor],
    expected: Callable[[Tensor], Tensor],
    rows: int,
    width: int,
    dtype: torch.dtype,
    strided: Callable[..., Tensor],
    assert_close: Close,
) -> None:
    gate_up = strided(rows, 2 * width, dtype=dtype)
    assert_close(operation(gate_up), expected(gate_up))


@pytest.mark.parametrize(("operation", "expected"), OPERATIONS)
def test_gates_far_from_zero_neither_overflow_nor_vanish(
    operation: Callable[[Tensor], Tensor],
    expected: Callable[[Tensor], Tensor],
    assert_close: Close,
    device: torch.device,
) -> None:
    gates = torch.tensor([[-200.0, -90.0, -10.0, -1e-4, 0.0, 1e-4, 10.0, 90.0, 200.0]], device=device)
    gate_up = torch.cat((gates, torch.ones_like(gates)), dim=1)
    assert_close(operation(gate_up), expected(gate_up))


@pytest.mark.parametrize("operation", [silu_and_mul, gelu_tanh_and_mul])
def test_zero_rows_give_an_empty_result(operation: Callable[[Tensor], Tensor], device: torch.device) -> None:
    assert operation(torch.zeros(0, 32, device=device)).shape == (0, 16)
