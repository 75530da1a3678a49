"""Low-rank adapters in Triton: empty blocks of captured steps, splits, and slots that do not exist."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from adapter_support.layer_slots import filled_slots
from torch import Tensor

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.lora import TokenGroups, add_adapters, group_tokens, most_blocks, reference

pytestmark = pytest.mark.usefixtures("poisoned")


def moved(groups: TokenGroups | None, device: torch.device) -> TokenGroups:
    assert groups is not None
    return TokenGroups(order=groups.order.to(device), blocks=groups.blocks.to(device))


def padded(groups: TokenGroups | None, *, tokens: int, slots: int) -> TokenGroups:
    """Return the groups with empty blocks behind them, as a captured step has them."""
    order = torch.zeros(tokens, dtype=torch.int32)
    blocks = torch.full((most_blocks(tokens, slots), 3), -1, dtype=torch.int32)
    if groups is not None:
        order[: len(groups.order)], blocks[: len(groups.blocks)] = groups.order, groups.blocks
    return TokenGroups(order=order, blocks=blocks)


def test_empty_blocks_of_a_captured_step_change_nothing(dtype: torch.dtype, device: torch.device) -> None:
    layer = filled_slots(slots=3, max_rank=8, inputs=32, parts=(24,), dtype=dtype, ranks=[8], device=device)
    x, y = torch.randn(20, 32).to(dtype).to(device), torch.randn(20, 24).to(dtype).to(device)
    found, captured = y.clone(), y.clone()
    slots = np.array([2, -1, 0, 2, *[-1] * 16])
    add_adapters(found, x, layer, moved(group_tokens(slots), device))
    add_adapters(captured, x, layer, moved(padded(group_tokens(slots), tokens=20, slots=3), device))
    assert torch.equal(captured, found)
    add_adapters(captured, x, layer, moved(padded(None, tokens=20, slots=3), device))
    assert torch.equal(captured, found)


@pytest.mark.parametrize(("depth", "block"), [(32, 32), (256, 64)])
def test_any_number_of_splits_adds_up(
    depth: int,
    block: int,
    device: torch.device,
    use_blocks: Callable[..., None],
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    layer = filled_slots(slots=2, max_rank=8, inputs=150, parts=(40,), dtype=torch.float32, ranks=[8, 5], device=device)
    x, y = torch.randn(9, 150).to(device), torch.randn(9, 40).to(device)
    groups, expected = moved(group_tokens(np.arange(9) % 2), device), y.clone()
    reference.add_adapters(expected, x, layer, groups)
    use_blocks("lora.shrink", DEPTH=depth, BLOCK_K=block)
    add_adapters(y, x, layer, groups)
    assert_close(y, expected)


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter raises for a wrong value")
def test_missing_slot_is_refused(device: torch.device) -> None:
    layer = filled_slots(slots=2, max_rank=8, inputs=32, parts=(24,), dtype=torch.float32, ranks=[8], device=device)
    x, y = torch.randn(2, 32), torch.randn(2, 24)
    with pytest.raises(Exception, match="name a slot that there is not"):
        add_adapters(y, x, layer, moved(group_tokens(np.array([0, 2])), device))
