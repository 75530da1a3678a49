"""Low-rank adapters of a linear layer: groups of tokens, and their products, against the reference."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from adapter_support.layer_slots import filled_slots
from torch import Tensor

from quire_kernels.errors import ArgumentError
from quire_kernels.lora import BLOCK_ROWS, add_adapters, group_tokens, reference


@pytest.mark.parametrize(
    ("tokens", "slots", "max_rank", "inputs", "parts", "ranks"),
    [
        (1, 1, 8, 64, (48,), [8]),
        (5, 3, 16, 96, (64, 32, 32), [16, 4, 0]),
        (40, 4, 13, 70, (700, 33), [13, 1]),
        (130, 2, 32, 256, (1030,), [32, 9]),
        (64, 16, 8, 128, (96, 96), [8]),
    ],
)
def test_products_equal_the_reference(
    tokens: int,
    slots: int,
    max_rank: int,
    inputs: int,
    parts: tuple[int, ...],
    ranks: list[int],
    dtype: torch.dtype,
    threads: int,
    strided: Callable[..., Tensor],
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    layer = filled_slots(slots=slots, max_rank=max_rank, inputs=inputs, parts=parts, dtype=dtype, ranks=ranks)
    x, y = strided(tokens, inputs, dtype=dtype), strided(tokens, sum(parts), dtype=dtype)
    groups = group_tokens(np.random.default_rng(7).integers(-1, slots, tokens))
    if groups is None:
        groups = group_tokens(np.zeros(tokens, dtype=np.int64))
    assert groups is not None
    expected = y.clone()
    reference.add_adapters(expected, x, layer, groups)
    add_adapters(y, x, layer, groups)
    assert_close(y, expected)


def test_tokens_without_an_adapter_stay_as_they_are(dtype: torch.dtype) -> None:
    layer = filled_slots(slots=2, max_rank=8, inputs=32, parts=(24,), dtype=dtype, ranks=[8])
    x, y = torch.randn(6, 32).to(dtype), torch.randn(6, 24).to(dtype)
    before, groups = y.clone(), group_tokens(np.array([-1, 1, -1, 0, 0, -1]))
    assert groups is not None
    add_adapters(y, x, layer, groups)
    for token in range(6):
        assert torch.equal(y[token], before[token]) == (token in (0, 2, 5))


def test_a_rows_bits_do_not_depend_on_the_batch(dtype: torch.dtype, threads: int) -> None:
    layer = filled_slots(slots=3, max_rank=16, inputs=200, parts=(96, 600), dtype=dtype, ranks=[16, 8])
    x, y = torch.randn(50, 200).to(dtype), torch.randn(50, 696).to(dtype)
    slots = np.arange(50) % 3
    together, groups = y.clone(), group_tokens(slots)
    assert groups is not None
    add_adapters(together, x, layer, groups)
    for token in (0, 17, 49):
        alone, own = y[token : token + 1].clone(), group_tokens(slots[token : token + 1])
        assert own is not None
        add_adapters(alone, x[token : token + 1], layer, own)
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize(
    ("slots", "order", "blocks"),
    [
        ([2, -1, 0, 2], [2, 0, 3], [[0, 0, 1], [2, 1, 3]]),
        ([1, 1, 1], [0, 1, 2], [[1, 0, 3]]),
        ([0, 1], [0, 1], [[0, 0, 1], [1, 1, 2]]),
    ],
)
def test_tokens_are_grouped_by_slot(slots: list[int], order: list[int], blocks: list[list[int]]) -> None:
    groups = group_tokens(np.array(slots))
    assert groups is not None
    assert groups.order.tolist() == order and groups.blocks.tolist() == blocks


def test_long_groups_are_divided_into_blocks() -> None:
    groups = group_tokens(np.array([3] * (2 * BLOCK_ROWS + 1) + [5] * BLOCK_ROWS))
    assert groups is not None
    first, second, third, fourth = 16, 32, 33, 49
    assert groups.blocks.tolist() == [[3, 0, first], [3, first, second], [3, second, third], [5, third, fourth]]


def test_no_groups_without_adapters() -> None:
    assert group_tokens(np.array([-1, -1])) is None and group_tokens(np.zeros(0, dtype=np.int64)) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda x, y: (x[:, :-1], y), "a"),
        (lambda x, y: (x, y[:, :-1]), "y"),
        (lambda x, y: (x[:-1], y), "x"),
        (lambda x, y: (x.double(), y), "x"),
        (lambda x, y: (x.half(), y.half()), "a"),
    ],
)
def test_wrong_arguments_are_named(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], named: str) -> None:
    layer = filled_slots(slots=1, max_rank=8, inputs=16, parts=(8,), dtype=torch.float32, ranks=[8])
    groups = group_tokens(np.zeros(3, dtype=np.int64))
    assert groups is not None
    x, y = change(torch.randn(3, 16), torch.randn(3, 8))
    with pytest.raises(ArgumentError, match=rf"^add_adapters: {named} "):
        add_adapters(y, x, layer, groups)
