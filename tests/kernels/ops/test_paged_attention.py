from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.dispatch import INTERPRETED, runs_triton
from quire_kernels.errors import ArgumentError
from quire_kernels.kv_cache import FP8
from quire_kernels.paged_attention import paged_attention, plan_attention, reference, unsupported

Close = Callable[[Tensor, Tensor], None]
Fill = Callable[..., Any]

HALF = torch.float16 if INTERPRETED else torch.bfloat16

# (queries, context) of each sequence of a batch.
BATCHES = {
    "one token": [(1, 1)],
    "decode at the edges of a block": [(1, 15), (1, 16), (1, 17), (1, 1)],
    "decode over several pieces": [(1, 1000), (1, 255), (1, 256), (1, 257)],
    "drafts": [(5, 300), (1, 33), (3, 3)],
    "whole prompts": [(17, 17), (1, 1), (16, 16), (70, 70)],
    "chunks of prompts with decodes": [(40, 140), (1, 300), (18, 18)],
}


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
    chunked: bool = False,
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
    lengths: dict[str, Any] = {
        "block_tables": filled.block_tables,
        "query_lens": queries,
        "context_lens": contexts,
        "window": window,
        "chunked": chunked,
    }
    plan = plan_attention(**lengths, block_size=block_size)
    rule: dict[str, Any] = {"scale": head_dim**-0.5, "soft_cap": soft_cap, "sinks": sinks}
    out = torch.full(q.shape, torch.nan, dtype=dtype, device=device)
    assert paged_attention(q, filled.cache, plan, **rule, out=out) is out
    return out, reference.paged_attention(q, filled.cache, **lengths, **rule)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_equals_the_reference(
    batch: list[tuple[int, int]],
    dtype: torch.dtype,
    threads: int,
    fill_cache: Fill,
    assert_close: Close,
    device: torch.device,
) -> None:
    assert_close(*attend(fill_cache, batch, heads=3, kv_heads=1, head_dim=32, dtype=dtype, device=device))


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
def test_equals_the_reference_for_head_dims_and_groups(
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


@pytest.mark.parametrize(("window", "block_size"), [(1, 64), (16, 16), (17, 16), (100, 64), (5000, 16)])
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
        (0.5, False, None, None),
        (2.0, True, None, None),
        (50.0, True, 50, None),
        (None, True, 20, None),
        (None, True, None, FP8),
        (20.0, False, 50, FP8),
    ],
)
def test_caps_and_sinks_bend_the_scores(
    soft_cap: float | None,
    has_sinks: bool,
    window: int | None,
    cache_dtype: torch.dtype | None,
    dtype: torch.dtype,
    fill_cache: Fill,
    assert_close: Close,
    device: torch.device,
) -> None:
    if cache_dtype == FP8 and (not runs_triton(device.type) or dtype != torch.float32):
        pytest.skip("float8 is Triton's, and shown in float32")
    sinks = torch.tensor([3.0, -2.0, 0.0, 9.0, -50.0, 1.0], dtype=dtype, device=device) if has_sinks else None
    bends: dict[str, Any] = {"soft_cap": soft_cap, "sinks": sinks, "window": window}
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 64, "cache_dtype": cache_dtype, "dtype": dtype}
    assert_close(*attend(fill_cache, [(1, 300), (3, 20), (18, 70)], **shape, **bends, device=device))


def test_large_scores_do_not_overflow(fill_cache: Fill, assert_close: Close, device: torch.device) -> None:
    filled = fill_cache([300, 30], kv_heads=1, head_dim=32, dtype=torch.float32)
    q = 1e4 * torch.randn(31, 1, 32, device=device)
    lengths: dict[str, Any] = {"block_tables": filled.block_tables, "query_lens": [1, 30], "context_lens": [300, 30]}
    found = paged_attention(q, filled.cache, plan_attention(**lengths, block_size=16), 1.0)
    assert_close(found, reference.paged_attention(q, filled.cache, **lengths, scale=1.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 32)}, r"q has shape \(2, 4, 32\); \[1, heads, 32\] is needed"),
        ({"q": torch.zeros(1, 4, 64)}, r"q has shape \(1, 4, 64\)"),
        ({"q": torch.zeros(1, 3, 32)}, "q has 3 heads; a multiple of the 2 KV heads is needed"),
        ({"q": torch.zeros(1, 4, 32).half()}, "cache holds torch.float32; the dtype of q, torch.float16, is needed"),
        ({"q": torch.zeros(1, 4, 64)[..., ::2]}, "q has strides .*; the last dimension must be dense"),
        ({"q": torch.zeros(1, 4, 64)[..., :32]}, "q has strides .*; the heads of a token must lie side by side"),
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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"block_size": 24}, "block size 24: a multiple of 16 is needed"),
        ({"cache_dtype": torch.float16}, "KV cache dtype torch.float16: torch.bfloat16"),
    ],
)
def test_unsupported_layers_are_reported(change: dict[str, Any], reason: str | None, device: torch.device) -> None:
    layer: dict[str, Any] = {"head_dim": 128, "group": 4, "block_size": 16, "dtype": torch.bfloat16}
    found = unsupported(**{"device_type": device.type, **layer, "cache_dtype": torch.bfloat16, **change})
    assert found is None if reason is None else found is not None and found.startswith(reason)
