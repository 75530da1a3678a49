"""Wide groups, float8, caches beyond 2 ** 31 elements and limits: the parts of attention that only Triton has."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.errors import ArgumentError
from quire_kernels.kv_cache import FP8, KVCache, allocate_kv_cache, write_tokens
from quire_kernels.paged_attention import paged_attention, plan_attention, reference, unsupported

Close = Callable[[Tensor, Tensor], None]
Fill = Callable[..., Any]

HALF = torch.float16 if INTERPRETED else torch.bfloat16


@pytest.mark.parametrize(
    ("batch", "heads", "head_dim", "block_size", "options"),
    [
        # A group wider than a tile gets a wider one.
        ([(1, 70), (2, 20)], 71, 64, 48, {}),
        ([(40, 140), (1, 300), (18, 18)], 4, 80, 16, {"soft_cap": 30.0, "window": 200}),
    ],
)
def test_wide_groups_and_all_options_equal_the_reference(
    batch: list[tuple[int, int]],
    heads: int,
    head_dim: int,
    block_size: int,
    options: dict[str, Any],
    fill_cache: Fill,
    assert_close: Close,
    device: torch.device,
) -> None:
    queries, contexts = [q for q, _ in batch], [c for _, c in batch]
    kind = {"dtype": FP8 if options else HALF, "block_size": block_size}
    filled = fill_cache(contexts, kv_heads=1, head_dim=head_dim, **kind)
    q = torch.randn(sum(queries), heads, head_dim).to(HALF).to(device)
    lengths: dict[str, Any] = {
        "block_tables": filled.block_tables,
        "query_lens": queries,
        "context_lens": contexts,
        "window": options.get("window"),
    }
    rule: dict[str, Any] = {"scale": head_dim**-0.5, "soft_cap": options.get("soft_cap")}
    rule["sinks"] = torch.randn(heads).to(HALF).to(device) if options else None
    found = paged_attention(q, filled.cache, plan_attention(**lengths, block_size=block_size), **rule)
    assert_close(found, reference.paged_attention(q, filled.cache, **lengths, **rule))


def test_a_cache_of_more_than_two_to_the_31_elements(assert_close: Close, device: torch.device) -> None:
    shape: dict[str, Any] = {"block_size": 128, "kv_heads": 8, "head_dim": 256}
    num_blocks = (1 << 31) // (128 * 8 * 256) + 3
    # On a CPU its pages are allocated when they are written.
    cache = allocate_kv_cache(num_blocks=num_blocks, dtype=torch.float16, device=device, **shape)
    assert cache.keys.numel() > 1 << 31
    table = torch.tensor([[num_blocks - 1, 0], [num_blocks - 2, 1]], dtype=torch.int32, device=device)
    for row, length in zip(table, (140, 20), strict=True):
        places = torch.arange(length, device=device)
        slots = row[places // 128].long() * 128 + places % 128
        write_tokens(cache, slots, *torch.randn(2, length, 8, 256).to(torch.float16).to(device))
    q = torch.randn(21, 8, 256).to(torch.float16).to(device)
    lengths: dict[str, Any] = {"block_tables": table, "query_lens": [1, 20], "context_lens": [140, 20]}
    found = paged_attention(q, cache, plan_attention(**lengths, block_size=128), 0.0625)
    assert_close(found, reference.paged_attention(q, cache, **lengths, scale=0.0625))


@pytest.mark.skipif(not INTERPRETED, reason="an assert on a GPU ends the process")
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("block", [-1, 4, 1 << 30])
def test_a_block_table_that_leaves_the_cache_is_named(block: int, queries: int, fill_cache: Fill) -> None:
    from triton.runtime.errors import InterpreterError

    filled = fill_cache([20], kv_heads=1, head_dim=32, dtype=torch.float32)
    filled.block_tables[0, 1] = block
    plan = plan_attention(block_tables=filled.block_tables, query_lens=[queries], context_lens=[20], block_size=16)
    with pytest.raises(InterpreterError, match="paged_attention: block_tables name a block outside the cache"):
        paged_attention(torch.zeros(queries, 1, 32), filled.cache, plan, 1.0)


def test_refuses_a_group_beyond_its_tiles(fill_cache: Fill, device: torch.device) -> None:
    filled = fill_cache([20], kv_heads=2, head_dim=32, dtype=torch.float32)
    plan = plan_attention(block_tables=filled.block_tables, query_lens=[1], context_lens=[20], block_size=16)
    with pytest.raises(ArgumentError, match="q has 129 query heads for each KV head: up to 128 are needed"):
        paged_attention(torch.zeros(1, 258, 32, device=device), filled.cache, plan, 1.0)


def test_refuses_a_head_dim_beyond_its_tiles(device: torch.device) -> None:
    empty = torch.zeros(1, 1, 16, 320, device=device)
    layout: dict[str, Any] = {"num_blocks": 1, "block_size": 16, "kv_heads": 1, "head_dim": 320}
    cache = KVCache(keys=empty, values=empty, **layout, keys_transposed=False, key_scale=None, value_scale=None)
    tables = torch.zeros(1, 1, dtype=torch.int32, device=device)
    plan = plan_attention(block_tables=tables, query_lens=[1], context_lens=[1], block_size=16)
    with pytest.raises(ArgumentError, match="paged_attention: q has head dim 320: up to 256 is needed"):
        paged_attention(torch.zeros(1, 1, 320, device=device), cache, plan, 1.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cache_dtype": FP8}, None),
        ({"head_dim": 257}, "head dim 257: up to 256 is needed"),
        ({"group": 129}, "129 query heads for each KV head: up to 128 are needed"),
        ({"dtype": torch.float64}, "dtype torch.float64: float32, bfloat16 or float16 is needed"),
    ],
)
def test_unsupported_layers_are_reported(change: dict[str, Any], reason: str | None, device: torch.device) -> None:
    layer: dict[str, Any] = {"head_dim": 128, "group": 4, "block_size": 16, "dtype": torch.bfloat16}
    found = unsupported(**{"device_type": device.type, **layer, "cache_dtype": torch.bfloat16, **change})
    assert found is None if reason is None else found is not None and found.startswith(reason)


@pytest.mark.skipif(INTERPRETED, reason="there is one device")
def test_operands_on_another_device_are_named(fill_cache: Fill, device: torch.device) -> None:
    filled = fill_cache([20], kv_heads=2, head_dim=32, dtype=torch.float32)
    plan = plan_attention(block_tables=filled.block_tables, query_lens=[1], context_lens=[20], block_size=16)
    elsewhere = dataclasses.replace(filled.cache, keys=filled.cache.keys.cpu())
    with pytest.raises(ArgumentError, match="paged_attention: cache is on cpu; cuda:0 is needed"):
        paged_attention(torch.zeros(1, 4, 32, device=device), elsewhere, plan, 1.0)
