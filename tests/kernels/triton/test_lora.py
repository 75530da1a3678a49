"""Low-rank adapters in Triton: their products equal the reference's for any grouping of tokens."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from adapter_support.layer_slots import filled_slots
from torch import Tensor

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.lora import LayerSlots, TokenGroups, add_adapters, group_tokens, most_blocks, reference
from quire_kernels.triton_runtime.config import config_for, launch_config, override
from quire_kernels.triton_runtime.device import target_of

Strided = Callable[..., Tensor]
AssertClose = Callable[[Tensor, Tensor], None]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN, which shows reads before a write."""
    empty = torch.empty

    def poisoned_empty(*shape: object, **options: object) -> Tensor:
        made: Tensor = empty(*shape, **options)  # type: ignore[call-overload]
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned_empty)


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


def expected_of(y: Tensor, x: Tensor, layer: LayerSlots, groups: TokenGroups) -> Tensor:
    on_cpu = LayerSlots(a=layer.a.cpu(), b=layer.b.cpu(), ranks=layer.ranks.cpu(), ends=layer.ends.cpu())
    expected = y.cpu().clone()
    reference.add_adapters(expected, x.cpu(), on_cpu, moved(groups, torch.device("cpu")))
    return expected


@pytest.mark.parametrize(
    ("tokens", "slots", "max_rank", "inputs", "parts", "ranks"),
    [
        (1, 1, 8, 64, (48,), [8]),
        (5, 3, 16, 96, (64, 32, 32), [16, 4, 0]),
        (40, 4, 13, 70, (100, 33), [13, 1]),
        (50, 2, 32, 300, (130,), [32, 9]),
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
    device: torch.device,
    strided: Strided,
    assert_close: AssertClose,
) -> None:
    layer = filled_slots(
        slots=slots, max_rank=max_rank, inputs=inputs, parts=parts, dtype=dtype, ranks=ranks, device=device
    )
    x, y = strided(tokens, inputs, dtype=dtype), strided(tokens, sum(parts), dtype=dtype)
    of_tokens = np.random.default_rng(7).integers(-1, slots, tokens)
    of_tokens[0] = slots - 1
    groups = moved(group_tokens(of_tokens), device)
    expected = expected_of(y, x, layer, groups)
    around = y.as_strided((tokens, sum(parts) + 5), (sum(parts) + 5, 1))
    add_adapters(y, x, layer, groups)
    assert_close(y.cpu(), expected)
    assert bool(around[:, sum(parts) :].isnan().all()), "wrote outside the rows"


def test_rows_and_parts_without_an_adapter_stay_as_they_are(dtype: torch.dtype, device: torch.device) -> None:
    layer = filled_slots(slots=2, max_rank=8, inputs=32, parts=(24, 40), dtype=dtype, ranks=[8, 0], device=device)
    x, y = torch.randn(5, 32).to(dtype).to(device), -torch.zeros(5, 64, dtype=dtype, device=device)
    add_adapters(y, x, layer, moved(group_tokens(np.array([-1, 1, -1, 0, 0])), device))
    written = (y != 0) | ~torch.signbit(y)
    assert written.any(dim=1).tolist() == [False, True, False, True, True]
    assert not written[1, :24].any(), "part 0 of slot 1 has rank 0"
    assert not written[3:, 24:].any(), "part 1 of slot 0 has rank 0"


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


def test_a_rows_bits_do_not_depend_on_the_batch(device: torch.device) -> None:
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    layer = filled_slots(slots=3, max_rank=16, inputs=200, parts=(96,), dtype=dtype, ranks=[16, 8], device=device)
    x, y = torch.randn(40, 200).to(dtype).to(device), torch.randn(40, 96).to(dtype).to(device)
    if INTERPRETED:
        # The interpreter's products are numpy's, whose order of addition depends on the place of a row in its block.
        # With few bits, every order has the same sum.
        for tensor in (layer.a, layer.b, x):
            tensor.copy_((tensor * 16).round() / 16)
    slots, together = np.arange(40) % 3, y.clone()
    add_adapters(together, x, layer, moved(group_tokens(slots), device))
    for token in (0, 17, 39):
        alone = y[token : token + 1].clone()
        own = moved(group_tokens(slots[token : token + 1]), device)
        add_adapters(alone, x[token : token + 1], layer, own)
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize(("depth", "block"), [(32, 32), (256, 64)])
def test_any_number_of_splits_adds_up(depth: int, block: int, device: torch.device, assert_close: AssertClose) -> None:
    layer = filled_slots(slots=2, max_rank=8, inputs=150, parts=(40,), dtype=torch.float32, ranks=[8, 5], device=device)
    x, y = torch.randn(9, 150).to(device), torch.randn(9, 40).to(device)
    groups = moved(group_tokens(np.arange(9) % 2), device)
    expected = expected_of(y, x, layer, groups)
    usual = config_for("lora.shrink", target_of(device), "bytes=4")
    with override("lora.shrink", "bytes=4", launch_config({**usual.options, "DEPTH": depth, "BLOCK_K": block})):
        add_adapters(y, x, layer, groups)
    assert_close(y.cpu(), expected)


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter raises for a wrong value")
def test_missing_slot_is_refused(device: torch.device) -> None:
    layer = filled_slots(slots=2, max_rank=8, inputs=32, parts=(24,), dtype=torch.float32, ranks=[8], device=device)
    x, y = torch.randn(2, 32), torch.randn(2, 24)
    with pytest.raises(Exception, match="name a slot that there is not"):
        add_adapters(y, x, layer, moved(group_tokens(np.array([0, 2])), device))
