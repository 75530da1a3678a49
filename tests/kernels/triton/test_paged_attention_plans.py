"""Plans of Triton attention: splits, their workspace, padding, changing buffers, and bitwise reproducibility."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.errors import ArgumentError
from quire_kernels.paged_attention import paged_attention, plan_attention, reference
from quire_kernels.paged_attention.plan import (
    DevicePlan,
    ScheduleKey,
    Workspace,
    allocate_workspace,
    fixed_split_tokens,
    workspace_partials,
)
from quire_kernels.paged_attention.schedule import MAX_SHORT_QUERIES, Rule
from quire_kernels.paged_attention.tiles import short_rows

Close = Callable[[Tensor, Tensor], None]
Fill = Callable[..., Any]

HEADS, KV_HEADS, HEAD_DIM = 2, 1, 32


def workspace(device: torch.device, *, partials: int, tokens: int = 80, split_tokens: int | None = None) -> Workspace:
    made = allocate_workspace(
        max_tokens=tokens,
        heads=HEADS,
        head_dim=HEAD_DIM,
        partials=partials,
        device=device,
        split_tokens=split_tokens,
    )
    made.buffer.fill_(torch.nan)
    return made


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Sequences in a cache, with a query for each of their tokens."""

    filled: Any
    queries: list[Tensor]
    space: Workspace

    def attend(self, *chosen: tuple[int, int, int], padding: int = 0) -> list[Tensor]:
        """Return the results of (sequence, tokens before, queries), each a chunk of its sequence, as one batch."""
        device = self.filled.block_tables.device
        rows = [index for index, _, _ in chosen]
        plan = plan_attention(
            block_tables=self.filled.block_tables[rows].contiguous(),
            query_lens=[count for _, _, count in chosen],
            context_lens=[before + count for _, before, count in chosen],
            block_size=16,
            workspace=self.space,
            deterministic=self.space.split_tokens is not None,
        )
        assert isinstance(plan, DevicePlan)
        parts = [self.queries[index][before : before + count] for index, before, count in chosen]
        if padding:
            empty = torch.zeros(padding, dtype=torch.int32, device=device)
            plan = dataclasses.replace(
                plan,
                block_tables=torch.cat((plan.block_tables, empty[:, None].expand(-1, plan.block_tables.shape[1]))),
                query_starts=torch.cat((plan.query_starts, plan.query_starts[-1:].expand(padding))),
                context_lens=torch.cat((plan.context_lens, empty)),
                num_tokens=plan.num_tokens + padding,
            )
            parts.append(torch.full((padding, HEADS, HEAD_DIM), torch.nan, device=device))
        q = torch.cat(parts)
        out = torch.full_like(q, torch.nan)
        paged_attention(q, self.filled.cache, plan, 0.25, out=out)
        assert not out[len(q) - padding :].any(), "a row of padding is not 0"
        return list(out[: len(q) - padding].split([count for _, _, count in chosen]))


@pytest.fixture
def sequences(fill_cache: Fill, device: torch.device) -> Callable[..., Sequences]:
    def make(*lengths: int, space: Workspace) -> Sequences:
        filled = fill_cache(list(lengths), kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
        queries = [torch.randn(length, HEADS, HEAD_DIM, device=device) for length in lengths]
        return Sequences(filled=filled, queries=queries, space=space)

    return make


@pytest.fixture
def alike_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's products round a row independently of its place in a tile, as matrix units do."""

    def matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return np.add.reduce(a[:, :, None] * b[None], axis=1, dtype=dtype)

    if INTERPRETED:
        monkeypatch.setattr("triton.runtime.interpreter.np.matmul", matmul)


@pytest.mark.parametrize(("partials", "queries"), [(1, 1), (3, 1), (60, 1), (4, 5), (60, 5), (60, 20)])
def test_any_room_for_splits_equals_the_reference(
    partials: int, queries: int, fill_cache: Fill, assert_close: Close, device: torch.device
) -> None:
    contexts = [900, 300]
    filled = fill_cache(contexts, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
    q = torch.randn(queries + 1, HEADS, HEAD_DIM, device=device)
    sinks = torch.tensor([2.0, -1.0], device=device)
    lengths: dict[str, Any] = {
        "block_tables": filled.block_tables,
        "query_lens": [queries, 1],
        "context_lens": contexts,
        "window": 800,
    }
    plan = plan_attention(**lengths, block_size=16, workspace=workspace(device, partials=partials))
    found = paged_attention(q, filled.cache, plan, 0.25, sinks=sinks)
    assert_close(found, reference.paged_attention(q, filled.cache, **lengths, scale=0.25, sinks=sinks))


def test_workspace_has_partial_results_only_for_split_contexts(
    sequences: Callable[..., Sequences], device: torch.device
) -> None:
    space = workspace(device, partials=8)
    some = sequences(200, 900, space=space)
    some.attend((0, 199, 1))
    assert bool(space.buffer.isnan().all()), "a context of one split left something"
    some.attend((1, 899, 1))
    assert not bool(space.buffer.isnan().all())


def test_rows_of_padding_are_zeros_and_change_nothing(
    sequences: Callable[..., Sequences], device: torch.device
) -> None:
    some = sequences(300, 40, space=workspace(device, partials=64))
    for batch in ([(0, 299, 1), (1, 39, 1)], [(0, 280, 20), (1, 39, 1)], [(0, 270, 30)]):
        for found, expected in zip(some.attend(*batch, padding=3), some.attend(*batch), strict=True):
            assert torch.allclose(found, expected, atol=1e-6)


def test_a_query_with_no_context_gets_zeros(fill_cache: Fill, device: torch.device) -> None:
    filled = fill_cache([20, 16], kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
    plan = DevicePlan(
        block_tables=filled.block_tables,
        query_starts=torch.tensor([0, 1, 2], dtype=torch.int32, device=device),
        context_lens=torch.tensor([20, 0], dtype=torch.int32, device=device),
        num_tokens=2,
        max_query_len=1,
        window=None,
        workspace=workspace(device, partials=8),
    )
    out = paged_attention(torch.ones(2, HEADS, HEAD_DIM, device=device), filled.cache, plan, 1.0)
    assert bool(out[0].isfinite().all()) and not out[1].any()


def test_plan_follows_the_contents_of_its_buffers(fill_cache: Fill, assert_close: Close, device: torch.device) -> None:
    contexts = [500, 33, 70]
    filled = fill_cache(contexts, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
    tables = torch.zeros_like(filled.block_tables)
    starts, lens = (torch.zeros(n, dtype=torch.int32, device=device) for n in (4, 3))
    space = workspace(device, partials=24)
    buffers: dict[str, Any] = {"block_tables": tables, "query_starts": starts, "context_lens": lens}
    plan = DevicePlan(**buffers, num_tokens=3, max_query_len=1, window=None, workspace=space)
    q, out = (torch.full((3, HEADS, HEAD_DIM), torch.nan, device=device) for _ in range(2))
    for chosen in ([0, 1, 2], [2], [1, 0]):
        count = len(chosen)
        tables[:count] = filled.block_tables[chosen]
        starts.copy_(torch.arange(4).clamp(max=count))
        lens.zero_()
        lens[:count] = torch.tensor([contexts[i] for i in chosen])
        q[:count] = torch.randn(count, HEADS, HEAD_DIM)
        plan.restart()
        assert paged_attention(q, filled.cache, plan, 0.25, out=out) is out
        expected = reference.paged_attention(
            q[:count],
            filled.cache,
            block_tables=filled.block_tables[chosen],
            query_lens=[1] * count,
            context_lens=[contexts[i] for i in chosen],
            scale=0.25,
        )
        assert_close(out[:count], expected)
        assert not out[count:].any()


@pytest.mark.skipif(INTERPRETED, reason="needs CUDA graphs")
def test_a_captured_launch_replays_over_other_lengths(
    fill_cache: Fill, assert_close: Close, device: torch.device
) -> None:
    filled = fill_cache([900, 60], kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    lens = torch.tensor([5, 5], dtype=torch.int32, device=device)
    plan = DevicePlan(
        block_tables=filled.block_tables,
        query_starts=starts,
        context_lens=lens,
        num_tokens=2,
        max_query_len=1,
        window=None,
        workspace=workspace(device, partials=16),
    )
    q = torch.randn(2, HEADS, HEAD_DIM, device=device)
    out = torch.full_like(q, torch.nan)
    paged_attention(q, filled.cache, plan, 0.25, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.restart()
        paged_attention(q, filled.cache, plan, 0.25, out=out)
    for contexts in ([900, 60], [17, 1]):
        lens.copy_(torch.tensor(contexts))
        graph.replay()
        lengths: dict[str, Any] = {"query_lens": [1, 1], "context_lens": contexts}
        expected = reference.paged_attention(q, filled.cache, block_tables=filled.block_tables, **lengths, scale=0.25)
        assert_close(out, expected)


def test_a_decoding_row_has_the_same_bits_in_every_batch(
    sequences: Callable[..., Sequences], device: torch.device
) -> None:
    """Neither short nor long chunks of other sequences, nor the room that they leave, change its path."""
    some = sequences(900, 300, 90, 800, space=workspace(device, partials=64))
    without_room = dataclasses.replace(some, space=workspace(device, partials=1))
    alone = some.attend((0, 899, 1))[0]
    for batch in ([(0, 899, 1), (1, 296, 4)], [(0, 899, 1), (2, 10, 30), (3, 799, 1)], [(3, 790, 10), (0, 899, 1)]):
        for each in (some, without_room):
            found = each.attend(*batch, padding=1)[batch.index((0, 899, 1))]
            assert torch.equal(found, alone)


def test_chunk_is_bitwise_independent_of_its_batch(sequences: Callable[..., Sequences], device: torch.device) -> None:
    some = sequences(700, 900, 40, space=workspace(device, partials=200))
    alone = some.attend((1, 880, 20))[0]
    assert torch.equal(some.attend((0, 699, 1), (1, 880, 20), (2, 10, 30))[1], alone)
    assert not bool(some.space.buffer.isnan().all()), "the chunk's context was not split"


@pytest.mark.usefixtures("alike_rows")
def test_fixed_splits_give_a_token_the_same_bits_in_all_steps(
    sequences: Callable[..., Sequences], device: torch.device
) -> None:
    some = sequences(420, 90, space=workspace(device, partials=160, split_tokens=128))
    whole = some.attend((0, 370, 50))[0]  # a chunk of a prompt
    chunks = some.attend((0, 370, 29), (1, 89, 1)) + some.attend((1, 20, 30), (0, 399, 21))
    assert torch.equal(torch.cat((chunks[0], chunks[3])), whole)
    assert torch.equal(some.attend((1, 50, 1), (0, 390, 7), padding=2)[1], whole[20:27])  # drafts to verify
    for place in (0, 14, 49):  # decoding, alone and in a batch
        assert torch.equal(some.attend((0, 370 + place, 1))[0], whole[place : place + 1])
    assert torch.equal(some.attend((1, 10, 3), (0, 419, 1), (1, 60, 20))[1], whole[49:])


@pytest.mark.usefixtures("alike_rows")
def test_fixed_splits_without_room_give_the_same_bits(
    sequences: Callable[..., Sequences], device: torch.device
) -> None:
    def space(partials: int) -> Workspace:
        return workspace(device, partials=partials, split_tokens=128)

    roomy = sequences(420, 90, 300, space=space(240))
    tight = [dataclasses.replace(roomy, space=space(partials)) for partials in (1, 12)]
    for steps in (((0, 380, 16), (1, 89, 1), (2, 250, 2)), ((0, 400, 20), (2, 290, 3), (1, 80, 1))):
        expected = torch.cat(roomy.attend(*steps))
        assert all(torch.equal(torch.cat(each.attend(*steps)), expected) for each in tight)


def test_fixed_splits_equal_the_reference_with_a_window(
    fill_cache: Fill, assert_close: Close, device: torch.device
) -> None:
    contexts, queries = [420, 300], [1, 40]
    filled = fill_cache(contexts, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
    q = torch.randn(41, HEADS, HEAD_DIM, device=device)
    lengths: dict[str, Any] = {
        "block_tables": filled.block_tables,
        "query_lens": queries,
        "context_lens": contexts,
        "window": 200,
    }
    space = workspace(device, partials=8, split_tokens=128)
    plan = plan_attention(**lengths, block_size=16, workspace=space, deterministic=True)
    expected = reference.paged_attention(q, filled.cache, **lengths, scale=0.25)
    assert_close(paged_attention(q, filled.cache, plan, 0.25), expected)


def test_a_deterministic_plan_needs_fixed_splits(device: torch.device) -> None:
    lengths: dict[str, Any] = {
        "block_tables": torch.zeros(1, 1, dtype=torch.int32, device=device),
        "query_lens": [1],
        "context_lens": [1],
        "block_size": 16,
        "deterministic": True,
    }
    with pytest.raises(ArgumentError, match="plan_attention: workspace fixes no split_tokens"):
        plan_attention(**lengths)
    with pytest.raises(ArgumentError, match="plan_attention: workspace fixes no split_tokens"):
        plan_attention(**lengths, workspace=workspace(device, partials=1))


@pytest.mark.parametrize(
    ("heads", "head_dim", "partials"), [(32, 128, 4032), (64, 128, 2016), (4, 128, 8192), (128, 256, 512)]
)
def test_workspace_size_follows_heads_and_head_dim(heads: int, head_dim: int, partials: int) -> None:
    assert workspace_partials(heads, head_dim) == partials


@pytest.mark.parametrize(("longest", "tokens"), [(100, 512), (65_536, 512), (131_072, 1024), (1_000_000, 1024)])
def test_fixed_splits_are_of_512_or_1024_tokens(longest: int, tokens: int) -> None:
    assert fixed_split_tokens(longest) == tokens


def test_schedules_keep_their_address_for_captured_graphs(
    sequences: Callable[..., Sequences], device: torch.device
) -> None:
    some = sequences(300, 40, space=workspace(device, partials=8))
    key = ScheduleKey(window=None, room=8, rules=(Rule(tile=64, queries=8, fill=4, least=256, most=64),) * 3)
    memory = some.space.schedule_for(key)
    some.attend((0, 299, 1), (1, 20, 20))
    assert some.space.schedule_for(key) is memory


def test_a_batch_larger_than_its_workspace_is_refused(device: torch.device) -> None:
    tables = torch.zeros(1, 10, dtype=torch.int32, device=device)
    lengths: dict[str, Any] = {"block_tables": tables, "query_lens": [30], "context_lens": [100], "block_size": 16}
    with pytest.raises(ArgumentError, match="workspace is for steps of 20 tokens; the batch has 30"):
        plan_attention(**lengths, workspace=workspace(device, partials=1, tokens=20))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; at least 1 is needed"),
        ({"partials": 0}, "partials is 0; at least 1 is needed"),
        ({"split_tokens": 100}, "split_tokens is 100; a positive multiple of 128 is needed"),
    ],
)
def test_unsuitable_workspace_is_refused(change: dict[str, int], message: str, device: torch.device) -> None:
    size: dict[str, Any] = {"max_tokens": 1, "heads": 1, "head_dim": 32, "partials": 1, **change}
    with pytest.raises(ArgumentError, match=f"allocate_workspace: {message}"):
        allocate_workspace(**size, device=device)


def test_tiles_of_few_queries_follow_the_longest_one(device: torch.device) -> None:
    tables = torch.zeros(3, 10, dtype=torch.int32, device=device)
    for queries, longest in (([1, 40, 1], 1), ([1, 40, 4], 4), ([40, 40, 40], 1), ([16, 17, 1], MAX_SHORT_QUERIES)):
        plan = plan_attention(block_tables=tables, query_lens=queries, context_lens=[100] * 3, block_size=16)
        assert isinstance(plan, DevicePlan) and plan.max_short_len == longest


@pytest.mark.parametrize(
    ("max_queries", "group", "head_dim", "query_bytes", "rows"),
    [
        (1, 4, 128, 2, 16),
        (1, 7, 128, 2, 16),
        (5, 5, 128, 2, 32),
        (16, 4, 128, 2, 64),
        (16, 8, 64, 2, 64),
        (16, 4, 256, 2, 32),
        (16, 4, 192, 2, 32),
        (16, 4, 64, 4, 32),
        (16, 4, 32, 4, 64),
        (1, 71, 64, 2, 128),
        (16, 64, 256, 2, 64),
    ],
)
def test_tiles_of_few_queries_are_whole_tokens(
    max_queries: int, group: int, head_dim: int, query_bytes: int, rows: int
) -> None:
    """64 rows of 256 would need more shared memory than Ada and small Blackwells have."""
    assert short_rows(max_queries, group, head_dim, query_bytes) == rows
