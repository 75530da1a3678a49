import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.errors import ArgumentError
from quire_kernels.kv_cache import FP8
from quire_kernels.paged_attention import paged_attention, plan_attention, reference
from quire_kernels.paged_attention.plan import Workspace

Close = Callable[[Tensor, Tensor], None]


@pytest.mark.parametrize("chunk", [1, 17, 256, 5000])
def test_chunked_attention_masks_earlier_chunks(
    chunk: int, dtype: torch.dtype, fill_cache: Callable[..., Any], assert_close: Close
) -> None:
    queries, contexts = [1, 1, 1, 3, 40, 35, 1], [1, chunk, chunk + 1, 290, 40, 600, 900]
    filled = fill_cache(contexts, kv_heads=2, head_dim=32, dtype=dtype)
    lengths: dict[str, Any] = {"block_tables": filled.block_tables, "query_lens": queries, "context_lens": contexts}
    q = torch.randn(sum(queries), 4, 32).to(dtype)
    plan = plan_attention(**lengths, block_size=16, window=chunk, chunked=True)
    expected = reference.paged_attention(q, filled.cache, **lengths, scale=0.25, window=chunk, chunked=True)
    assert_close(paged_attention(q, filled.cache, plan, 0.25), expected)


def test_sink_reduces_the_attention_weights(fill_cache: Callable[..., Any]) -> None:
    filled = fill_cache([1], kv_heads=1, head_dim=32, dtype=torch.float32)
    plan = plan_attention(block_tables=filled.block_tables, query_lens=[1], context_lens=[1], block_size=16)
    rule: dict[str, Any] = {"q": torch.zeros(1, 1, 32), "cache": filled.cache, "plan": plan, "scale": 1.0}
    # One token of score 0 with a sink of score ln 3: a quarter is left.
    torch.testing.assert_close(
        paged_attention(**rule, sinks=torch.tensor([3.0]).log()), paged_attention(**rule) / 4, rtol=1e-6, atol=0.0
    )


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


@pytest.mark.parametrize("block", [-1, 4, 1 << 30])
def test_refuses_a_block_table_that_leaves_the_cache(block: int, fill_cache: Callable[..., Any]) -> None:
    filled = fill_cache([20], kv_heads=2, head_dim=32, dtype=torch.float32)
    filled.block_tables[0, 1] = block
    plan = plan_attention(block_tables=filled.block_tables, query_lens=[1], context_lens=[20], block_size=16)
    with pytest.raises(ArgumentError, match="block_tables name a block outside the cache of 4 blocks"):
        paged_attention(torch.zeros(1, 4, 32), filled.cache, plan, 1.0)
