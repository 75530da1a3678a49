from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.errors import ArgumentError
from quire_kernels.rms_norm import reference, rms_norm

Close = Callable[[Tensor, Tensor], None]


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (17, 32), (33, 80), (130, 576), (1, 16384)])
def test_equals_the_reference(
    rows: int,
    width: int,
    dtype: torch.dtype,
    threads: int,
    strided: Callable[..., Tensor],
    assert_close: Close,
    device: torch.device,
) -> None:
    x, weight = strided(rows, width, dtype=dtype), torch.randn(width).to(dtype).to(device)
    assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize(("rows", "width"), [(5, 80), (130, 576), (2, 4096)])
def test_adds_to_the_residual_in_place_and_normalises_the_sum(
    rows: int, width: int, dtype: torch.dtype, strided: Callable[..., Tensor], assert_close: Close, device: torch.device
) -> None:
    x, weight = strided(rows, width, dtype=dtype), torch.randn(width).to(dtype).to(device)
    found, expected = (strided(rows, width, dtype=dtype, gap=gap) for gap in (3, 7))
    expected.copy_(found)
    around = found.as_strided((rows, width + 3), (width + 3, 1))
    assert_close(rms_norm(x, weight, 1e-6, found), reference.rms_norm(x, weight, 1e-6, expected))
    assert torch.equal(found, expected)
    assert bool(around[:, width:].isnan().all()), "wrote outside the rows"


def test_the_heads_of_a_projection_are_rows_of_any_stride(
    dtype: torch.dtype, strided: Callable[..., Tensor], assert_close: Close, device: torch.device
) -> None:
    heads = strided(37, 64, dtype=dtype, gap=64)
    weight = torch.randn(64).to(dtype).to(device)
    assert_close(rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("width", [64, 1536])
def test_row_is_independent_of_other_rows(width: int, device: torch.device) -> None:
    x, weight = torch.randn(19, width, device=device), torch.randn(width, device=device)
    together = rms_norm(x, weight, 1e-5)
    alone = torch.cat([rms_norm(row[None], weight, 1e-5) for row in x[[0, 7, 18]]])
    assert torch.equal(together[[0, 7, 18]], alone)


def test_no_rows_and_rows_of_zeros(device: torch.device) -> None:
    weight = torch.ones(8, device=device)
    assert rms_norm(torch.zeros(0, 8, device=device), weight, 1e-5).shape == (0, 8)
    assert torch.equal(rms_norm(torch.zeros(2, 8, device=device), weight, 1e-5), torch.zeros(2, 8, device=device))


def test_agrees_with_torch(device: torch.device) -> None:
    x, weight = torch.randn(7, 96, device=device), torch.randn(96, device=device)
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
def test_invalid_arguments_are_refused(change: dict[str, Tensor], message: str, device: torch.device) -> None:
    arguments = {"x": torch.zeros(2, 8), "weight": torch.ones(8), **change}
    with pytest.raises(ArgumentError, match=message):
        rms_norm(eps=1e-5, **{name: tensor.to(device) for name, tensor in arguments.items()})
