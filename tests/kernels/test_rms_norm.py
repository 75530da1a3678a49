from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.errors import ArgumentError
from quire_kernels.rms_norm import reference, rms_norm

Close = Callable[[Tensor, Tensor], None]


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 256), (3, 33), (17, 576), (130, 576)])
def test_equals_the_reference(
    rows: int, width: int, dtype: torch.dtype, threads: int, strided: Callable[..., Tensor], assert_close: Close
) -> None:
    x, weight = strided(rows, width, dtype=dtype), torch.randn(width).to(dtype)
    assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 80), (130, 576)])
def test_adds_to_the_residual_in_place_and_normalises_the_sum(
    rows: int, width: int, dtype: torch.dtype, strided: Callable[..., Tensor], assert_close: Close
) -> None:
    x, weight = strided(rows, width, dtype=dtype), torch.randn(width).to(dtype)
    found = torch.randn(rows, width).to(dtype)
    expected = found.clone()
    assert_close(rms_norm(x, weight, 1e-6, found), reference.rms_norm(x, weight, 1e-6, expected))
    assert torch.equal(found, expected)


def test_a_row_of_zeros_stays_zero_by_its_epsilon() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5), torch.zeros(2, 8))


def test_agrees_with_torch() -> None:
    x, weight = torch.randn(7, 96), torch.randn(96)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (96,), weight, 1e-5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(8)}, r"rms_norm: x has shape \(8,\); \[rows, hidden size\] is needed"),
        ({"x": torch.zeros(2, 8).int()}, "rms_norm: x is torch.int32; float32, bfloat16 or float16 is needed"),
        ({"x": torch.zeros(8, 2).t()}, r"rms_norm: x has strides \(1, 2\); the last dimension must be dense"),
        ({"weight": torch.ones(7)}, r"rms_norm: weight is .*; a contiguous torch.float32 \(8,\) is needed"),
        ({"weight": torch.ones(8).half()}, "rms_norm: weight is torch.float16"),
        ({"residual": torch.zeros(3, 8)}, r"rms_norm: residual is .*\(3, 8\); torch.float32 \(2, 8\) is needed"),
    ],
)
def test_invalid_arguments_are_refused(change: dict[str, Tensor], message: str) -> None:
    arguments = {"x": torch.zeros(2, 8), "weight": torch.ones(8), "residual": None, **change}
    with pytest.raises(ArgumentError, match=message):
        rms_norm(arguments["x"], arguments["weight"], 1e-5, arguments["residual"])
