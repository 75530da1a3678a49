"""The call of FlashAttention 3 with what its interface documents, computed by torch instead: our results must agree."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.kv_cache import KVCache, allocate_kv_cache
from quire_kernels.paged_attention import paged_attention
from quire_kernels.paged_attention.flash import FlashAttention
from quire_kernels.paged_attention.plan import DevicePlan, allocate_workspace

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 32, 16


def documented(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """Compute attention with the last query at the last key; rows after the last sequence are left as they are."""
    out = torch.full_like(q, torch.nan)
    for sequence, length in enumerate(cache_seqlens.tolist()):
        first, end = cu_seqlens_q[sequence : sequence + 2].tolist()
        count = end - first
        assert count <= max_seqlen_q and causal
        if not count:
            continue
        pages = page_table[sequence, : -(-length // k_cache.shape[1])].long()
        keys, values = (cache[pages].flatten(0, 1)[:length].float() for cache in (k_cache, v_cache))  # [L, HK, D]
        keys, values = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[first:end].float(), keys) * softmax_scale
        before = torch.arange(length - count, length, device=q.device)[:, None] - torch.arange(length, device=q.device)
        hidden = before < -max(window_size[1], 0)
        if window_size[0] >= 0:
            hidden |= before > window_size[0]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


def make_plan(device: torch.device, *, window: int | None, flash: FlashAttention | None) -> DevicePlan:
    """Return a padded step: a prompt, a chunk behind 37 tokens, a decoded token, and a row without a sequence."""
    return DevicePlan(
        block_tables=torch.tensor(
            [[1, 3, 0, 0, 0], [8, 2, 5, 7, 0], [4, 6, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.int32, device=device
        ),
        query_starts=torch.tensor([0, 20, 41, 42, 42], dtype=torch.int32, device=device),
        context_lens=torch.tensor([20, 58, 30, 0], dtype=torch.int32, device=device),
        num_tokens=48,
        max_query_len=48,
        window=window,
        workspace=allocate_workspace(max_tokens=64, heads=HEADS, head_dim=HEAD_DIM, device=device, prompts=flash),
    )


@pytest.fixture
def cache(dtype: torch.dtype, device: torch.device) -> KVCache:
    made = allocate_kv_cache(
        num_blocks=9, block_size=BLOCK, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype, device=device
    )
    made.keys.normal_()
    made.values.normal_()
    return made


@pytest.mark.parametrize("window", [None, 1, 24])
def test_results_equal_our_kernels(
    cache: KVCache, dtype: torch.dtype, window: int | None, device: torch.device
) -> None:
    q = torch.randn(48, HEADS, HEAD_DIM).to(dtype).to(device)
    calls: list[dict[str, Any]] = []

    def function(**given: Any) -> tuple[Tensor, None]:
        calls.append(given)
        return documented(**given), None  # some versions return the sums of exponentials too

    flash = FlashAttention(function=function, from_tokens=48)
    expected = paged_attention(q, cache, make_plan(device, window=window, flash=None), 0.2)
    out = torch.full_like(q, torch.nan)
    found = paged_attention(q, cache, make_plan(device, window=window, flash=flash), 0.2, out=out)
    assert len(calls) == 1 and found is out
    torch.testing.assert_close(found, expected, rtol=4e-3, atol=4e-3)
    assert not found[42:].any(), "rows of padding"


def test_other_steps_and_layers_keep_our_kernels(cache: KVCache, dtype: torch.dtype, device: torch.device) -> None:
    def function(**_: Any) -> Tensor:
        raise AssertionError("the library is called")

    q = torch.randn(48, HEADS, HEAD_DIM).to(dtype).to(device)
    always, later = (FlashAttention(function=function, from_tokens=count) for count in (1, 49))
    options: list[dict[str, Any]] = [
        {"soft_cap": 5.0},
        {"sinks": torch.zeros(HEADS, dtype=dtype, device=device)},
    ]
    for given in options:
        paged_attention(q, cache, make_plan(device, window=None, flash=always), 0.2, **given)
    paged_attention(q, cache, make_plan(device, window=None, flash=later), 0.2)
    plan = make_plan(device, window=None, flash=always)
    decoding = DevicePlan(
        block_tables=plan.block_tables,
        query_starts=torch.arange(5, dtype=torch.int32, device=device),
        context_lens=torch.tensor([20, 58, 30, 1], dtype=torch.int32, device=device),
        num_tokens=4,
        max_query_len=1,
        window=None,
        workspace=plan.workspace,
    )
    paged_attention(q[:4], cache, decoding, 0.2)
