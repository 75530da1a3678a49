from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.embedding import embed, reference
from quire_kernels.errors import ArgumentError


@pytest.mark.parametrize("scale", [None, 24.0])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (1, 576), (7, 33), (300, 576)])
def test_equals_the_reference(
    tokens: int,
    width: int,
    scale: float | None,
    dtype: torch.dtype,
    threads: int,
    strided: Callable[..., Tensor],
    device: torch.device,
) -> None:
    table = strided(50, width, dtype=dtype)
    token_ids = torch.randint(50, (tokens,)).to(device)
    expected = reference.embed(token_ids, table, scale)
    assert torch.equal(embed(token_ids, table, scale), expected)
    out = torch.empty_like(expected)
    assert embed(token_ids, table, scale, out=out) is out and torch.equal(out, expected)


def test_no_tokens(device: torch.device) -> None:
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    assert embed(nothing, torch.ones(5, 8, device=device)).shape == (0, 8)


@pytest.mark.skipif(INTERPRETED, reason="a GPU does not check tokens")
@pytest.mark.parametrize("token_id", [-1, 50])
def test_token_outside_the_table_is_refused(token_id: int) -> None:
    with pytest.raises(ArgumentError, match="token_ids leave the table of 50 tokens"):
        embed(torch.tensor([3, token_id]), torch.ones(50, 8))


@pytest.mark.parametrize(
    ("token_ids", "table", "out"),
    [
        (torch.zeros(2, dtype=torch.int32), torch.ones(5, 8), None),
        (torch.zeros(2, 1, dtype=torch.int64), torch.ones(5, 8), None),
        (torch.zeros(2, dtype=torch.int64), torch.ones(5), None),
        (torch.zeros(2, dtype=torch.int64), torch.ones(5, 8), torch.ones(2, 7)),
        (torch.zeros(2, dtype=torch.int64), torch.ones(5, 8), torch.ones(2, 8, dtype=torch.float16)),
    ],
)
def test_other_arguments_are_refused(token_ids: Tensor, table: Tensor, out: Tensor | None) -> None:
    with pytest.raises(ArgumentError, match="embed: "):
        embed(token_ids, table, out=out)
