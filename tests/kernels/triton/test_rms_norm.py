from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.errors import ArgumentError
from quire_kernels.rms_norm import reference, rms_norm

Close = Callable[[Tensor, Tensor], None]


@pytest.mark.parametrize(
    ("rows", "width"), [(1, 1), (17, 32), (33, 80), (3, 96), (17, 576), (3, 1536), (3, 4096), (1, 16384)]
)
def test_equals_the_reference(
    rows: int, width: int, dtype: torch.dtype, strided: Callable[..., Tensor], assert_close: Close, device: torch.device
) -> None:
    x, weight = strided(rows, width, dtype=dtype), torch.randn(width).to(dtype).to(device)
    assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize(("rows", "width"), [(5, 80), (3, 576), (2, 4096)])
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


def test_a_row_too_wide_is_refused(device: torch.device) -> None:
    x = torch.zeros(1, (1 << 15) + 16, device=device)
    with pytest.raises(ArgumentError, match="rms_norm: x has rows of 32784; at most 32768 are taken on a GPU"):
        rms_norm(x, torch.zeros(x.shape[1], device=device), 1e-5)
