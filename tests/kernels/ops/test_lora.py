"""Low-rank adapters of a linear layer: groups of tokens, and their products, against the reference."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from adapter_support.layer_slots import filled_slots
from torch import Tensor

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.errors import ArgumentError
from quire_kernels.lora import BLOCK_ROWS, LayerSlots, TokenGroups, add_adapters, group_tokens, reference

pytestmark = pytest.mark.usefixtures("poisoned")


def grouped(slots: list[int] | np.ndarray, device: torch.device) -> TokenGroups:
    groups = group_tokens(np.asarray(slots))
    assert groups is not None
    return TokenGroups(order=groups.order.to(device), blocks=groups.blocks.to(device))


def expected_of(y: Tensor, x: Tensor, layer: LayerSlots, slots: np.ndarray) -> Tensor:
    on_cpu = LayerSlots(a=layer.a.cpu(), b=layer.b.cpu(), ranks=layer.ranks.cpu(), ends=layer.ends.cpu())
    expected = y.cpu().clone()
    reference.add_adapters(expected, x.cpu(), on_cpu, grouped(slots, torch.device("cpu")))
    return expected


@pytest.mark.parametrize(
    ("tokens", "slots", "max_rank", "inputs", "parts", "ranks"),
    [
        (1, 1, 8, 64, (48,), [8]),
        (5, 3, 16, 96, (64, 32, 32), [16, 4, 0]),
        (40, 4, 13, 70, (700, 33), [13, 1]),
        (130, 2, 32, 300, (1030,), [32, 9]),
        (64, 16, 8, 128, (96, 96), [8]),
        (20, 3, 100, 40, (40, 24), [100, 65, 8]),
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
    device: torch.device,
    strided: Callable[..., Tensor],
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    layer = filled_slots(
        slots=slots, max_rank=max_rank, inputs=inputs, parts=parts, dtype=dtype, ranks=ranks, device=device
    )
    x, y = strided(tokens, inputs, dtype=dtype), strided(tokens, sum(parts), dtype=dtype)
    of_tokens = np.random.default_rng(7).integers(-1, slots, tokens)
    of_tokens[0] = slots - 1
    expected = expected_of(y, x, layer, of_tokens)
    around = y.as_strided((tokens, sum(parts) + 5), (sum(parts) + 5, 1))
    add_adapters(y, x, layer, grouped(of_tokens, device))
    assert_close(y.cpu(), expected)
    assert bool(around[:, sum(parts) :].isnan().all()), "wrote outside the rows"


def test_rows_and_parts_without_an_adapter_stay_as_they_are(dtype: torch.dtype, device: torch.device) -> None:
    layer = filled_slots(slots=2, max_rank=8, inputs=32, parts=(24, 40), dtype=dtype, ranks=[8, 0], device=device)
    x, y = torch.randn(5, 32).to(dtype).to(device), -torch.zeros(5, 64, dtype=dtype, device=device)
    add_adapters(y, x, layer, grouped([-1, 1, -1, 0, 0], device))
    written = (y != 0) | ~torch.signbit(y)
    assert written.any(dim=1).tolist() == [False, True, False, True, True]
    assert not written[1, :24].any(), "part 0 of slot 1 has rank 0"
    assert not written[3:, 24:].any(), "part 1 of slot 0 has rank 0"


def test_a_rows_bits_do_not_depend_on_the_batch(dtype: torch.dtype, threads: int, device: torch.device) -> None:
    layer = filled_slots(slots=3, max_rank=16, inputs=200, parts=(96, 600), dtype=dtype, ranks=[16, 8], device=device)
    x, y = torch.randn(50, 200).to(dtype).to(device), torch.randn(50, 696).to(dtype).to(device)
    if INTERPRETED:
        # The interpreter's products are numpy's, whose order of addition depends on the place of a row in its block.
        # With few bits, every order has the same sum.
        for tensor in (layer.a, layer.b, x):
            tensor.copy_((tensor * 16).round() / 16)
    slots, together = np.arange(50) % 3, y.clone()
    add_adapters(together, x, layer, grouped(slots, device))
    for token in (0, 17, 49):
        alone = y[token : token + 1].clone()
        add_adapters(alone, x[token : token + 1], layer, grouped(slots[token : token + 1], device))
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
    groups = grouped(slots, torch.device("cpu"))
    assert groups.order.tolist() == order and groups.blocks.tolist() == blocks


def test_long_groups_are_divided_into_blocks() -> None:
    groups = grouped([3] * (2 * BLOCK_ROWS + 1) + [5] * BLOCK_ROWS, torch.device("cpu"))
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
def test_wrong_arguments_are_named(
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], named: str, device: torch.device
) -> None:
    layer = filled_slots(slots=1, max_rank=8, inputs=16, parts=(8,), dtype=torch.float32, ranks=[8], device=device)
    x, y = change(torch.randn(3, 16, device=device), torch.randn(3, 8, device=device))
    with pytest.raises(ArgumentError, match=rf"^add_adapters: {named} "):
        add_adapters(y, x, layer, grouped([0, 0, 0], device))
