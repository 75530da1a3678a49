"""Triton attention compared with the reference: dims, groups, block sizes, kinds of batches and score modifiers."""

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

# (queries, context) of each sequence of a batch.
ONE_TOKEN = [(1, 1)]
EDGES = [(1, 15), (1, 16), (1, 17), (1, 1)]
DECODE = [(1, 1000), (1, 257)]
VERIFY = [(5, 300), (1, 33), (3, 3)]
PROMPTS = [(17, 17), (1, 1), (16, 16), (70, 70)]
MIXED = [(40, 140), (1, 300), (18, 18)]


def attend(
    fill_cache: Fill,
    batch: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the results of the kernel and the reference for a random batch. The kernel's result overwrites NaN."""
    queries, contexts = [q for q, _ in batch], [c for _, c in batch]
    filled = fill_cache(
        contexts, kv_heads=kv_heads, head_dim=head_dim, dtype=cache_dtype or dtype, block_size=block_size
    )
    if cache_dtype == FP8:
        filled.cache.key_scale.copy_(torch.linspace(0.5, 2.0, kv_heads))
        filled.cache.value_scale.copy_(torch.linspace(1.5, 0.25, kv_heads))
    q = torch.randn(sum(queries), heads + 2, head_dim).to(dtype).to(device)[:, :heads]  # as in a fused projection
    plan = plan_attention(
        block_tables=filled.block_tables,
        query_lens=queries,
        context_lens=contexts,
        block_size=block_size,
        window=window,
    )
    rule: dict[str, Any] = {"scale": head_dim**-0.5, "soft_cap": soft_cap, "sinks": sinks}
    out = torch.full(q.shape, torch.nan, dtype=dtype, device=device)
    assert paged_attention(q, filled.cache, plan, **rule, out=out) is out
    lengths = {"block_tables": filled.block_tables, "query_lens": queries, "context_lens": contexts}
    return out, reference.paged_attention(q, filled.cache, **lengths, window=window, **rule)


@pytest.mark.parametrize("batch", [ONE_TOKEN, EDGES, DECODE, VERIFY, PROMPTS, MIXED])
def test_equals_the_reference(
    batch: list[tuple[int, int]], fill_cache: Fill, assert_close: Close, device: torch.device
) -> None:
    assert_close(*attend(fill_cache, batch, heads=2, kv_heads=1, head_dim=32, device=device))


# Each dim with a group, a block size and a dtype; every one with decoding in splits, drafts and a prompt.
@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "dtype"),
    [
        (32, 8, 128, HALF),
        (64, 1, 32, HALF),
        (80, 3, 16, HALF),
        (80, 4, 64, torch.float32),
        (96, 4, 64, HALF),
        (128, 8, 16, HALF),
        (128, 1, 128, torch.float32),
        (256, 3, 32, HALF),
    ],
)
def test_result_equals_the_reference_for_all_shapes(
    head_dim: int,
    group: int,
    block_size: int,
    dtype: torch.dtype,
    fill_cache: Fill,
    assert_close: Close,
    device: torch.device,
) -> None:
    batch = [(1, 270), (19, 45), (2, 17)]
    shape = {"heads": group, "kv_heads": 1, "head_dim": head_dim, "block_size": block_size}
    assert_close(*attend(fill_cache, batch, **shape, dtype=dtype, device=device))


def test_a_group_wider_than_a_tile_gets_a_wider_tile(
    fill_cache: Fill, assert_close: Close, device: torch.device
) -> None:
    shape = {"heads": 71, "kv_heads": 1, "head_dim": 64, "block_size": 48}
    assert_close(*attend(fill_cache, [(1, 70), (2, 20)], **shape, device=device))


@pytest.mark.parametrize(("window", "block_size"), [(1, 64), (16, 16), (100, 16), (100, 64)])
def test_window_masks_earlier_tokens(
    window: int, block_size: int, fill_cache: Fill, assert_close: Close, device: torch.device
) -> None:
    batch = [(1, 1), (1, 300), (3, 130), (70, 200)]
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 32, "block_size": block_size}
    assert_close(*attend(fill_cache, batch, **shape, window=window, device=device))


def test_blocks_before_a_window_are_not_read(fill_cache: Fill, device: torch.device) -> None:
    filled = fill_cache([600, 500], kv_heads=1, head_dim=32, dtype=torch.float32)
    q = torch.randn(41, 1, 32, device=device)
    lengths = {"query_lens": [1, 40], "context_lens": [600, 500], "block_size": 16, "window": 20}
    before = paged_attention(q, filled.cache, plan_attention(block_tables=filled.block_tables, **lengths), 1.0)
    filled.block_tables[0, : (600 - 20) // 16] = 1 << 30  # freed, so not even the block number may be used
    filled.block_tables[1, : (500 - 39 - 20) // 16] = 1 << 30
    after = paged_attention(q, filled.cache, plan_attention(block_tables=filled.block_tables, **lengths), 1.0)
    assert torch.equal(after, before)


# The score modifiers, in pairs, with decoding in splits, drafts and a prompt.
@pytest.mark.parametrize(
    ("soft_cap", "has_sinks", "window", "cache_dtype"),
    [
        (2.0, False, None, None),
        (50.0, True, 50, None),
        (None, True, None, FP8),
        (2.0, True, None, None),
        (20.0, False, 50, FP8),
    ],
)
def test_caps_sinks_and_float8_match_the_reference(
    soft_cap: float | None,
    has_sinks: bool,
    window: int | None,
    cache_dtype: torch.dtype | None,
    fill_cache: Fill,
    assert_close: Close,
    device: torch.device,
) -> None:
    batch = [(1, 300), (3, 20), (18, 70)]
    sinks = torch.tensor([3.0, -2.0, 0.0, 9.0, -50.0, 1.0], device=device) if has_sinks else None
    bends: dict[str, Any] = {"soft_cap": soft_cap, "sinks": sinks, "window": window}
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 64, "cache_dtype": cache_dtype}
    assert_close(*attend(fill_cache, batch, **shape, **bends, device=device))


def test_half_precision_with_all_options_combined(fill_cache: Fill, assert_close: Close, device: torch.device) -> None:
    bends: dict[str, Any] = {
        "soft_cap": 30.0,
        "window": 200,
        "sinks": torch.randn(4).to(HALF).to(device),
    }
    shape = {"heads": 4, "kv_heads": 1, "head_dim": 80, "dtype": HALF, "cache_dtype": FP8}
    assert_close(*attend(fill_cache, MIXED, **shape, **bends, device=device))


def test_large_scores_do_not_overflow(fill_cache: Fill, assert_close: Close, device: torch.device) -> None:
    filled = fill_cache([300, 30], kv_heads=1, head_dim=32, dtype=torch.float32)
    q = 1e4 * torch.randn(31, 1, 32, device=device)
    lengths: dict[str, Any] = {"block_tables": filled.block_tables, "query_lens": [1, 30], "context_lens": [300, 30]}
    found = paged_attention(q, filled.cache, plan_attention(**lengths, block_size=16), 1.0)
    assert_close(found, reference.paged_attention(q, filled.cache, **lengths, scale=1.0))


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 32)}, r"q has shape \(2, 4, 32\); \[1, heads, 32\] is needed"),
        ({"q": torch.zeros(1, 3, 32)}, "q has 3 heads; a multiple of the 2 KV heads is needed"),
        ({"q": torch.zeros(1, 4, 32).half()}, "cache holds torch.float32; the dtype of q, torch.float16, is needed"),
        ({"q": torch.zeros(1, 4, 64)[..., ::2]}, "q has strides .*; the last dimension must be dense"),
        ({"q": torch.zeros(1, 4, 64)[..., :32]}, "q has strides .*; the heads of a token must lie side by side"),
        ({"q": torch.zeros(1, 258, 32)}, "q has 129 query heads for each KV head: up to 128 are needed"),
        ({"scale": 0.0}, "scale is 0.0; a number above 0 is needed"),
        ({"soft_cap": -1.0}, "soft_cap is -1.0; a number above 0 is needed"),
        ({"sinks": torch.zeros(3)}, r"sinks is torch.float32 \(3,\) .*; a contiguous torch.float32 \(4,\) is needed"),
        ({"sinks": torch.zeros(4, dtype=torch.int32)}, "sinks is torch.int32; float32, bfloat16 or float16 is needed"),
        ({"out": torch.zeros(1, 4, 64)[..., :32]}, "out is .* with strides"),
    ],
)
def test_invalid_arguments_are_refused(
    change: dict[str, Any], message: str, fill_cache: Fill, device: torch.device
) -> None:
    filled = fill_cache([20], kv_heads=2, head_dim=32, dtype=torch.float32)
    plan = plan_attention(block_tables=filled.block_tables, query_lens=[1], context_lens=[20], block_size=16)
    arguments = {"q": torch.zeros(1, 4, 32), "cache": filled.cache, "plan": plan, "scale": 1.0, **change}
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    with pytest.raises(ArgumentError, match=f"paged_attention: {message}"):
        paged_attention(**moved)


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
        ({}, None),
        ({"cache_dtype": FP8}, None),
        ({"head_dim": 257}, "head dim 257: up to 256 is needed"),
        ({"group": 129}, "129 query heads for each KV head: up to 128 are needed"),
        ({"block_size": 24}, "block size 24: a multiple of 16 is needed"),
        ({"dtype": torch.float64}, "dtype torch.float64: float32, bfloat16 or float16 is needed"),
        ({"cache_dtype": torch.float16}, "KV cache dtype torch.float16: torch.bfloat16, or float8_e4m3fn, is needed"),
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
