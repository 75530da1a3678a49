import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.errors import ArgumentError
from quire_kernels.kv_cache import FP8
from quire_kernels.paged_attention import paged_attention, plan_attention, reference, unsupported
from quire_kernels.paged_attention.plan import Workspace

Close = Callable[[Tensor, Tensor], None]

# (queries, context) of each sequence of a batch.
BATCHES = {
    "one token": [(1, 1)],
    "decode at the edges of a block": [(1, 1), (1, 15), (1, 16), (1, 17)],
    "decode over several pieces": [(1, 255), (1, 256), (1, 257), (1, 1000)],
    "whole prompts": [(1, 1), (15, 15), (16, 16), (17, 17), (300, 300)],
    "chunks of prompts with decodes": [(33, 290), (1, 77), (16, 600), (2, 2)],
}


def attend(
    fill_cache: Callable[..., Any],
    batch: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    window: int | None = None,
    chunked: bool = False,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the results of the kernel and the reference for a random batch."""
    queries, contexts = [q for q, _ in batch], [c for _, c in batch]
    filled = fill_cache(contexts, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, block_size=block_size)
    q = torch.randn(sum(queries), heads + 2, head_dim).to(dtype)[:, :heads]  # strided tokens
    plan = plan_attention(
        block_tables=filled.block_tables,
        query_lens=queries,
        context_lens=contexts,
        block_size=block_size,
        window=window,
        chunked=chunked,
    )
    bends: dict[str, Any] = {"soft_cap": soft_cap, "sinks": sinks}
    found = paged_attention(q, filled.cache, plan, head_dim**-0.5, **bends)
    expected = reference.paged_attention(
        q,
        filled.cache,
        block_tables=filled.block_tables,
        query_lens=queries,
        context_lens=contexts,
        scale=head_dim**-0.5,
        window=window,
        chunked=chunked,
        **bends,
    )
    return found, expected


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_equals_the_reference(
    batch: list[tuple[int, int]],
    dtype: torch.dtype,
    threads: int,
    fill_cache: Callable[..., Any],
    assert_close: Close,
) -> None:
    assert_close(*attend(fill_cache, batch, heads=6, kv_heads=2, head_dim=32, dtype=dtype))


@pytest.mark.parametrize("head_dim", [20, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_equals_the_reference_for_head_dims_and_groups(
    head_dim: int, group: int, fill_cache: Callable[..., Any], assert_close: Close
) -> None:
    batch = [(1, 17), (19, 40), (3, 270)]
    assert_close(*attend(fill_cache, batch, heads=2 * group, kv_heads=2, head_dim=head_dim))


@pytest.mark.parametrize("block_size", [16, 32, 64, 512])
def test_equals_the_reference_for_block_sizes(
    block_size: int, fill_cache: Callable[..., Any], assert_close: Close
) -> None:
    batch = [(1, 33), (20, 65), (1, 700)]
    assert_close(*attend(fill_cache, batch, heads=4, kv_heads=1, head_dim=64, block_size=block_size))


@pytest.mark.parametrize("window", [1, 5, 16, 17, 300, 5000])
def test_window_masks_earlier_tokens(window: int, fill_cache: Callable[..., Any], assert_close: Close) -> None:
    batch = [(1, 1), (1, 40), (3, 290), (40, 40), (35, 600), (1, 900)]
    assert_close(*attend(fill_cache, batch, heads=4, kv_heads=2, head_dim=32, window=window))


@pytest.mark.parametrize("chunk", [1, 5, 16, 17, 256, 300, 5000])
def test_chunked_attention_masks_earlier_chunks(
    chunk: int, dtype: torch.dtype, fill_cache: Callable[..., Any], assert_close: Close
) -> None:
    batch = [(1, 1), (1, chunk), (1, chunk + 1), (3, 290), (40, 40), (35, 600), (1, 900)]
    found = attend(fill_cache, batch, heads=4, kv_heads=2, head_dim=32, dtype=dtype, window=chunk, chunked=True)
    assert_close(*found)


@pytest.mark.parametrize("soft_cap", [0.5, 2.0, 50.0])
@pytest.mark.parametrize("window", [None, 20])
def test_a_soft_cap_bounds_the_scores(
    soft_cap: float, window: int | None, fill_cache: Callable[..., Any], assert_close: Close
) -> None:
    batch = [(1, 1), (1, 40), (3, 290), (40, 40), (35, 600), (1, 900)]
    assert_close(*attend(fill_cache, batch, heads=4, kv_heads=2, head_dim=32, window=window, soft_cap=soft_cap))


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (20, None), (None, 2.0)])
def test_sinks_change_the_scores(
    window: int | None,
    soft_cap: float | None,
    dtype: torch.dtype,
    fill_cache: Callable[..., Any],
    assert_close: Close,
) -> None:
    batch = [(1, 1), (1, 40), (3, 290), (40, 40), (35, 600), (1, 900)]  # with and without splits
    bends: dict[str, Any] = {
        "sinks": torch.tensor([3.0, -2.0, 0.0, 9.0, -50.0, 1.0], dtype=dtype),
        "window": window,
        "soft_cap": soft_cap,
    }
    assert_close(*attend(fill_cache, batch, heads=6, kv_heads=2, head_dim=32, dtype=dtype, **bends))


def test_sink_reduces_the_attention_weights(fill_cache: Callable[..., Any]) -> None:
    filled = fill_cache([1], kv_heads=1, head_dim=32, dtype=torch.float32)
    plan = plan_attention(block_tables=filled.block_tables, query_lens=[1], context_lens=[1], block_size=16)
    rule: dict[str, Any] = {"q": torch.zeros(1, 1, 32), "cache": filled.cache, "plan": plan, "scale": 1.0}
    # One token of score 0 with a sink of score ln 3: a quarter is left.
    torch.testing.assert_close(
        paged_attention(**rule, sinks=torch.tensor([3.0]).log()), paged_attention(**rule) / 4, rtol=1e-6, atol=0.0
    )


def test_output_is_written_to_the_given_tensor(fill_cache: Callable[..., Any]) -> None:
    filled = fill_cache([40], kv_heads=1, head_dim=32, dtype=torch.float32)
    plan = plan_attention(block_tables=filled.block_tables, query_lens=[20], context_lens=[40], block_size=16)
    q, out = torch.randn(20, 2, 32), torch.full((20, 2, 32), torch.nan)
    assert paged_attention(q, filled.cache, plan, 1.0, out=out) is out
    assert torch.equal(out, paged_attention(q, filled.cache, plan, 1.0))


def test_deterministic_tokens_have_the_same_bits_in_all_steps(
    dtype: torch.dtype, fill_cache: Callable[..., Any]
) -> None:
    filled = fill_cache([900, 90], kv_heads=2, head_dim=64, dtype=dtype)
    queries = [torch.randn(length, 6, 64).to(dtype) for length in (900, 90)]

    def run(*chosen: tuple[int, int, int]) -> list[Tensor]:
        """Return the results of (sequence, tokens before, queries) as one batch."""
        plan = plan_attention(
            block_tables=filled.block_tables[[index for index, _, _ in chosen]].contiguous(),
            query_lens=[count for _, _, count in chosen],
            context_lens=[before + count for _, before, count in chosen],
            block_size=16,
            deterministic=True,
        )
        q = torch.cat([queries[index][before : before + count] for index, before, count in chosen])
        return list(paged_attention(q, filled.cache, plan, 0.125).split([count for _, _, count in chosen]))

    whole = run((0, 850, 50))[0]
    parts = [
        run((0, 850, 17))[0],
        run((1, 89, 1), (0, 867, 1))[1],
        run((0, 868, 3))[0],
        run((0, 871, 29), (1, 3, 9))[0],
    ]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(("query", "context"), [(1, 33), (1, 900), (20, 300)])
def test_bfloat16_error_is_near_its_rounding(query: int, context: int, fill_cache: Callable[..., Any]) -> None:
    filled = fill_cache([context], kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    batch = {"block_tables": filled.block_tables, "query_lens": [query], "context_lens": [context]}
    q = torch.randn(query, 6, 64).bfloat16()
    found = paged_attention(q, filled.cache, plan_attention(**batch, block_size=16), 0.125)
    exact = reference.paged_attention(q.float(), filled.cache, **batch, scale=0.125)

    def error(x: Tensor) -> float:
        return float(((x.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).mean())

    assert error(found) < 2.0 * error(exact.bfloat16())


@pytest.mark.parametrize("deterministic", [False, True])
def test_nan_propagates_to_the_result(deterministic: bool, fill_cache: Callable[..., Any]) -> None:
    """The test includes pieces of a long context that are attended separately and merged."""
    filled = fill_cache([600], kv_heads=1, head_dim=32, dtype=torch.float32)
    plan = plan_attention(
        block_tables=filled.block_tables,
        query_lens=[1],
        context_lens=[600],
        block_size=16,
        deterministic=deterministic,
    )
    filled.cache.keys[filled.block_tables[0, 0]] = torch.nan
    assert paged_attention(torch.randn(1, 1, 32), filled.cache, plan, 1.0).isnan().all()


def test_blocks_before_a_window_are_not_read(fill_cache: Callable[..., Any]) -> None:
    filled = fill_cache([600], kv_heads=1, head_dim=32, dtype=torch.float32)
    q = torch.randn(1, 1, 32)
    plan = plan_attention(
        block_tables=filled.block_tables, query_lens=[1], context_lens=[600], block_size=16, window=20
    )
    before = paged_attention(q, filled.cache, plan, 1.0)
    filled.block_tables[0, : (600 - 20) // 16] = 1 << 30  # freed, so not even the block number may be used
    assert torch.equal(paged_attention(q, filled.cache, plan, 1.0), before)


def test_row_is_independent_of_its_batch_and_of_threads(dtype: torch.dtype, fill_cache: Callable[..., Any]) -> None:
    contexts = [700, 40, 350]
    queries = [1, 17, 3]
    filled = fill_cache(contexts, kv_heads=2, head_dim=64, dtype=dtype)
    q = torch.randn(sum(queries), 6, 64).to(dtype)

    def run(chosen: list[int], rows: list[Tensor]) -> Tensor:
        plan = plan_attention(
            block_tables=filled.block_tables[chosen].contiguous(),
            query_lens=[queries[i] for i in chosen],
            context_lens=[contexts[i] for i in chosen],
            block_size=16,
        )
        return paged_attention(torch.cat([rows[i] for i in chosen]), filled.cache, plan, 0.125)

    parts = list(q.split(queries))
    together = run([0, 1, 2], parts).split(queries)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = [run([i], parts) for i in range(3)]
    torch.set_num_threads(before)
    assert all(torch.equal(x, y) for x, y in zip(together, alone, strict=True))


def test_large_scores_do_not_overflow(fill_cache: Callable[..., Any], assert_close: Close) -> None:
    filled = fill_cache([50], kv_heads=1, head_dim=32, dtype=torch.float32)
    q = 1e4 * torch.randn(1, 1, 32)
    lengths = {"block_tables": filled.block_tables, "query_lens": [1], "context_lens": [50]}
    plan = plan_attention(**lengths, block_size=16)
    assert_close(
        paged_attention(q, filled.cache, plan, 1.0),
        reference.paged_attention(q, filled.cache, **lengths, scale=1.0),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_tables": torch.zeros(1, 4)}, "block_tables is torch.float32"),
        ({"block_tables": torch.zeros(4, 1, dtype=torch.int32).t()}, None),
        ({"block_tables": torch.zeros(1, 8, dtype=torch.int32)[:, ::2]}, "block_tables is .* with strides"),
        ({"query_lens": [1, 1]}, "query_lens, context_lens count 2, 1; block_tables has 1 rows"),
        ({"query_lens": [0]}, "query_lens has 0 at sequence 0; 1 to its context length 40 is needed"),
        ({"query_lens": [41]}, "query_lens has 41 at sequence 0"),
        ({"context_lens": [65]}, "context_lens has 65 at sequence 0; 4 blocks of 16 hold fewer"),
        ({"window": 0}, "window is 0; at least 1 token is needed"),
        ({"chunked": True}, "chunked is set; a window and a CPU are needed"),
    ],
)
def test_plan_refuses_inconsistent_arguments(change: dict[str, Any], message: str | None) -> None:
    lengths: dict[str, Any] = {
        "block_tables": torch.zeros(1, 4, dtype=torch.int32),
        "query_lens": [1],
        "context_lens": [40],
        "block_size": 16,
    }
    if message is None:
        assert plan_attention(**{**lengths, **change}).num_tokens == 1
        return
    with pytest.raises(ArgumentError, match=f"plan_attention: {message}"):
        plan_attention(**{**lengths, **change})


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (torch.zeros(2, 4, 32), r"q has shape \(2, 4, 32\); \[1, heads, 32\] is needed"),
        (torch.zeros(1, 4, 64), r"q has shape \(1, 4, 64\)"),
        (torch.zeros(1, 3, 32), "q has 3 heads; a multiple of the 2 KV heads is needed"),
        (torch.zeros(1, 4, 32).half(), "cache holds torch.float32; the dtype of q, torch.float16, is needed"),
        (torch.zeros(1, 4, 64)[..., ::2], "q has strides .*; the last dimension must be dense"),
        (torch.zeros(1, 4, 64)[..., :32], "q has strides .*; the heads of a token must lie side by side"),
    ],
)
def test_invalid_queries_are_refused(q: Tensor, message: str, fill_cache: Callable[..., Any]) -> None:
    filled = fill_cache([20], kv_heads=2, head_dim=32, dtype=torch.float32)
    plan = plan_attention(block_tables=filled.block_tables, query_lens=[1], context_lens=[20], block_size=16)
    with pytest.raises(ArgumentError, match=f"paged_attention: {message}"):
        paged_attention(q, filled.cache, plan, 1.0)


def test_options_of_triton_only_are_refused(fill_cache: Callable[..., Any]) -> None:
    filled = fill_cache([20], kv_heads=2, head_dim=32, dtype=torch.float32)
    lengths: dict[str, Any] = {"query_lens": [1], "context_lens": [20], "block_size": 16}
    space = Workspace(buffer=torch.empty(1), partials=1, split_tokens=None, max_tokens=1)
    with pytest.raises(ArgumentError, match="plan_attention: workspace is given; attention on a CPU has none"):
        plan_attention(block_tables=filled.block_tables, **lengths, workspace=space)
    plan = plan_attention(block_tables=filled.block_tables, **lengths)
    quantised = dataclasses.replace(filled.cache, keys=filled.cache.keys.to(FP8), values=filled.cache.values.to(FP8))
    with pytest.raises(ArgumentError, match="paged_attention: cache holds torch.float8_e4m3fn"):
        paged_attention(torch.zeros(1, 4, 32), quantised, plan, 1.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"head_dim": 512}, None),
        ({"block_size": 24}, "block size 24: a multiple of 16 is needed"),
        ({"cache_dtype": FP8}, "KV cache dtype torch.float8_e4m3fn: torch.bfloat16 is needed on cpu"),
    ],
)
def test_unsupported_layers_are_reported(change: dict[str, Any], reason: str | None) -> None:
    layer: dict[str, Any] = {"head_dim": 128, "group": 4, "block_size": 16, "dtype": torch.bfloat16}
    assert unsupported(**{"device_type": "cpu", **layer, "cache_dtype": torch.bfloat16, **change}) == reason


@pytest.mark.parametrize("block", [-1, 4, 1 << 30])
def test_refuses_a_block_table_that_leaves_the_cache(block: int, fill_cache: Callable[..., Any]) -> None:
    filled = fill_cache([20], kv_heads=2, head_dim=32, dtype=torch.float32)
    filled.block_tables[0, 1] = block
    plan = plan_attention(block_tables=filled.block_tables, query_lens=[1], context_lens=[20], block_size=16)
    with pytest.raises(ArgumentError, match="block_tables name a block outside the cache of 4 blocks"):
        paged_attention(torch.zeros(1, 4, 32), filled.cache, plan, 1.0)
