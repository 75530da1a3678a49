"""The number of blocks that fit, and the error if there are too few."""

import re
from dataclasses import replace

import pytest
import torch
from fake_runner import FakeRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_parity.shapes import config as model_config

from quire_common.kv_size import CacheGroup, CacheLimits, kv_bytes_per_token
from quire_engine.config import CacheOptions
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.kv_manager import KVManager
from quire_engine.core.options import ModelTraits, SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.sequence import Request
from quire_engine.engine import Engine
from quire_engine.runner.cache_size import CacheDemand, CacheSize, CacheTooSmall, size_cache
from quire_engine.runner.kv_cache import allocate, allocate_swap_space, cache_groups, make_layout, option_problems
from quire_engine.runner.memory import AvailableMemory
from quire_kernels.kv_cache import KVCache

GIB = 1 << 30
MIB = 1 << 20
DEMAND = CacheDemand(
    groups=(CacheGroup(block_bytes=MIB),),
    block_size=16,
    sequence_tokens=1000,
    must_hold_limit=False,
    max_sequences=4,
    max_batched_tokens=64,
)
# One of four layers has full attention; the others have windows of 100 tokens, which need 9 blocks.
MIXED = replace(
    DEMAND, groups=(CacheGroup(block_bytes=3 * MIB, window=100), CacheGroup(block_bytes=MIB)), sequence_tokens=10_000
)
MODEL = model_config(num_layers=3, head_dim=16, hidden_size=64)


def machine(gib: float) -> AvailableMemory:
    return AvailableMemory(size=int(gib * GIB), is_own=False)


def own(mib: int) -> AvailableMemory:
    return AvailableMemory(size=mib * MIB, is_own=True)


def given_size(mib: int, swap_mib: int = 0) -> CacheOptions:
    return CacheOptions(kv_cache_memory_bytes=mib * MIB, swap_space_bytes=swap_mib * MIB)


@pytest.mark.parametrize(
    ("options", "available", "blocks", "longest"),
    [
        (given_size(100), None, 100, 1000),
        (given_size(10), None, 10, 160),
        # Never more than all sequences at full length: 4 times 63 blocks.
        (CacheOptions(), machine(64), 252, 1000),
        # A quarter of a machine that other processes use as well.
        (CacheOptions(), machine(0.5), 128, 1000),
        # All of its own memory except the part for activations.
        (CacheOptions(gpu_memory_utilization=0.5), own(1224), 100, 1000),
        # The same without the swap space.
        (CacheOptions(gpu_memory_utilization=0.5, swap_space_bytes=30 * MIB), own(1224), 70, 1000),
        (CacheOptions(swap_space_bytes=256 * MIB), machine(0.5), 64, 1000),
        (CacheOptions(), None, 252, 1000),
    ],
)
def test_blocks_follow_from_the_budget(
    options: CacheOptions, available: AvailableMemory | None, blocks: int, longest: int
) -> None:
    size = size_cache(DEMAND, options, available)
    assert isinstance(size, CacheSize), size
    assert (size.num_blocks, size.max_model_len) == ((blocks,), longest)
    assert size.kv_cache_bytes == blocks * MIB
    assert size.num_swap_blocks == (options.swap_space_bytes // MIB,)


@pytest.mark.parametrize(
    ("demand", "options", "words"),
    [
        (
            replace(DEMAND, must_hold_limit=True),
            given_size(62),
            [
                "65,011,712 bytes (--kv-cache-memory-bytes)",
                "1,000 tokens",
                "--kv-cache-memory-bytes 66060288",
                "--max-model-len 992",
            ],
        ),
        (
            DEMAND,
            CacheOptions(kv_cache_memory_bytes=1000),
            ["a KV cache of 1,000 bytes", "use --kv-cache-memory-bytes 66060288"],
        ),
        (
            DEMAND,
            CacheOptions(swap_space_bytes=300 * MIB),
            ["a KV cache of 0 bytes (the available memory without --swap-space-bytes 314572800)"],
        ),
    ],
)
def test_too_small_cache_is_refused_with_a_working_size(
    demand: CacheDemand, options: CacheOptions, words: list[str]
) -> None:
    result = size_cache(demand, options, own(700))
    assert isinstance(result, CacheTooSmall)
    assert all(word in result.message for word in words), result.message
    size = size_cache(demand, CacheOptions(kv_cache_memory_bytes=66060288), own(700))
    assert isinstance(size, CacheSize) and (size.num_blocks, size.max_model_len) == ((63,), 1000)


@given(
    groups=st.lists(st.tuples(st.integers(1, 5000), st.none() | st.integers(1, 300)), min_size=1, max_size=4),
    limit=st.integers(1, 5000),
    must_hold=st.booleans(),
    budget=st.integers(0, 10_000),
    sequences=st.integers(1, 40),
    tokens=st.integers(1, 300),
)
def test_sizes_named_by_a_refusal_work(
    groups: list[tuple[int, int | None]], limit: int, must_hold: bool, budget: int, sequences: int, tokens: int
) -> None:
    """Windows are shorter than the limit, as ``without_idle_windows`` ensures."""
    demand = CacheDemand(
        groups=tuple(
            CacheGroup(block_bytes=size, window=window if window is not None and window < limit else None)
            for size, window in groups
        ),
        block_size=16,
        sequence_tokens=limit,
        must_hold_limit=must_hold,
        max_sequences=sequences,
        max_batched_tokens=tokens,
    )
    result = size_cache(demand, CacheOptions(kv_cache_memory_bytes=budget), None)
    if isinstance(result, CacheSize):
        assert result.kv_cache_bytes <= budget
        return
    named = {flag: int(number) for flag, number in re.findall(r"(--[a-z-]+) (\d+)", result.message)}
    enough = size_cache(demand, CacheOptions(kv_cache_memory_bytes=named["--kv-cache-memory-bytes"]), None)
    assert isinstance(enough, CacheSize) and enough.max_model_len == limit
    if "--max-model-len" in named:
        shorter = replace(demand, sequence_tokens=named["--max-model-len"])
        assert isinstance(size_cache(shorter, CacheOptions(kv_cache_memory_bytes=budget), None), CacheSize)


def test_window_needs_its_blocks_and_one_step_at_any_length() -> None:
    demand = replace(
        DEMAND, groups=(CacheGroup(block_bytes=MIB, window=100),), sequence_tokens=50_000, must_hold_limit=True
    )
    refused = size_cache(demand, given_size(8), None)
    assert isinstance(refused, CacheTooSmall)
    assert f"--kv-cache-memory-bytes {9 << 20}" in refused.message and "--max-model-len" not in refused.message
    size = size_cache(demand, given_size(9), None)
    assert isinstance(size, CacheSize) and (size.num_blocks, size.max_model_len) == ((9,), 50_000)


def test_windowed_group_gets_its_maximum_others_the_rest() -> None:
    # 4 windows of 7 + 2 blocks and a step of 4, and half as much again: 60 blocks.
    size = size_cache(MIXED, given_size(1000), None)
    assert isinstance(size, CacheSize)
    assert (size.num_blocks, size.max_model_len) == ((60, 820), 10_000)
    alone = size_cache(replace(MIXED, groups=MIXED.groups[:1]), CacheOptions(), machine(64))
    assert isinstance(alone, CacheSize) and alone.num_blocks == (60,)


def test_groups_share_equally_if_windows_need_everything() -> None:
    size = size_cache(MIXED, given_size(160), None)
    assert isinstance(size, CacheSize) and (size.num_blocks, size.max_model_len) == ((40, 40), 640)


def test_windowed_cache_uses_no_more_memory_than_needed() -> None:
    size = size_cache(MIXED, CacheOptions(), machine(64))
    assert isinstance(size, CacheSize) and size.num_blocks == (60, 4 * 625)


def test_every_group_swaps_the_same_share_of_its_blocks() -> None:
    size = size_cache(MIXED, given_size(1000, swap_mib=250), machine(8))
    assert isinstance(size, CacheSize) and size.num_swap_blocks == (15, 205)


@pytest.mark.parametrize(
    ("options", "available", "message"),
    [
        (
            given_size(100, swap_mib=50),
            own(120),
            "--kv-cache-memory-bytes 104857600 and --swap-space-bytes 52428800 come to 157,286,400 bytes; they must fit"
            " into the 125,829,120 bytes that are available: --swap-space-bytes of at most 20971520 would fit",
        ),
        (
            given_size(100, swap_mib=1),
            own(90),
            "--kv-cache-memory-bytes 104857600 and --swap-space-bytes 1048576 come to 105,906,176 bytes; they must fit"
            " into the 94,371,840 bytes that are available: a smaller KV cache would fit",
        ),
        (
            CacheOptions(swap_space_bytes=9 * GIB),
            machine(8),
            "--swap-space-bytes 9663676416 must fit into the 8,589,934,592 bytes that are available: --swap-space-bytes"
            " of at most 1073741824 would fit",
        ),
        (
            CacheOptions(kv_cache_memory_bytes=100 * MIB, swap_space_bytes=1000),
            machine(8),
            "--swap-space-bytes 1000 is less than one block of each layer: 1048576 is the minimum, 0 disables it",
        ),
    ],
)
def test_swap_space_has_to_fit_and_to_hold_a_block(
    options: CacheOptions, available: AvailableMemory, message: str
) -> None:
    assert size_cache(DEMAND, options, available) == CacheTooSmall(message=message)
    if fitting := re.search(r"at most (\d+) would|: (\d+) is the minimum", message):
        named = replace(options, swap_space_bytes=int(fitting[1] or fitting[2]))
        assert isinstance(size_cache(DEMAND, named, available), CacheSize)


def test_minimum_swap_space_in_the_error_is_enough() -> None:
    refused = size_cache(MIXED, given_size(1000, swap_mib=1), machine(8))
    assert isinstance(refused, CacheTooSmall)
    least = int(refused.message.split(": ")[1].split()[0])
    options = CacheOptions(kv_cache_memory_bytes=1000 * MIB, swap_space_bytes=least)
    size = size_cache(MIXED, options, machine(8))
    assert isinstance(size, CacheSize) and min(size.num_swap_blocks) == 1


def test_window_leaves_room_for_a_chunk_of_more_than_a_block() -> None:
    for window in range(1, 70):
        group = CacheGroup(block_bytes=1, window=window)
        layout = make_layout(replace(MODEL, windows=(window,) * 3), 16, size_of(DEMAND.fewest_blocks(group)))
        assert KVManager(layout, max_chunk=1000, enable_prefix_caching=True, share_prefixes="tenant").max_chunk > 16


@settings(max_examples=25, deadline=None)
@given(
    window=st.integers(1, 60),
    sequences=st.integers(1, 5),
    tokens=st.integers(5, 80),
    prompts=st.lists(st.integers(1, 150), min_size=1, max_size=12),
    overlap=st.booleans(),
)
def test_windows_with_maximum_blocks_never_wait(
    window: int, sequences: int, tokens: int, prompts: list[int], overlap: bool
) -> None:
    limits = CacheLimits(block_size=16, sequence_tokens=10**9, max_sequences=sequences, max_batched_tokens=tokens)
    most = limits.most_blocks(CacheGroup(block_bytes=1, window=window))
    groups = (KVCacheGroup(layers=(0,), num_blocks=most * 2 // 3, window=window),)
    layout = KVCacheLayout(block_size=16, groups=groups)
    options = SchedulerOptions(max_num_seqs=sequences, max_num_batched_tokens=tokens, enable_prefix_caching=False)
    scheduler = Scheduler(options, ModelTraits(max_model_len=200), layout)
    engine = Engine(scheduler=scheduler, runner=FakeRunner(layout=layout, vocab_size=9), overlap=overlap)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for key, length in enumerate(prompts):
        assert engine.add(Request(key=key, prompt_token_ids=[1] * length, params=params, seed=0)) is None
    while engine.has_work:
        engine.step()
    assert not engine.counters.preemptions


def size_of(*num_blocks: int) -> CacheSize:
    return CacheSize(
        num_blocks=num_blocks,
        num_swap_blocks=(0,) * len(num_blocks),
        max_model_len=1,
        kv_cache_bytes=1,
        sequences=1,
    )


def test_layers_with_the_same_window_share_a_group() -> None:
    mixed = replace(MODEL, windows=(8, None, 8))
    layout = make_layout(mixed, 16, replace(size_of(5, 7), num_swap_blocks=(2, 3)))
    assert [(g.layers, g.window, g.num_blocks, g.num_swap_blocks) for g in layout.groups] == [
        ((0, 2), 8, 5, 2),
        ((1,), None, 7, 3),
    ]
    groups = cache_groups(mixed, torch.float32, 16)
    assert [group.window for group in groups] == [8, None]
    assert groups[0].block_bytes == 2 * groups[1].block_bytes


@given(
    budget=st.integers(0, 1 << 40),
    limit=st.integers(1, 200_000),
    must_hold=st.booleans(),
    sequences=st.integers(1, 1000),
    explicit=st.booleans(),
)
def test_cache_fits_its_budget_and_a_longest_sequence(
    budget: int, limit: int, must_hold: bool, sequences: int, explicit: bool
) -> None:
    demand = replace(DEMAND, sequence_tokens=limit, must_hold_limit=must_hold, max_sequences=sequences)
    options = CacheOptions(kv_cache_memory_bytes=budget if explicit else None)
    result = size_cache(demand, options, AvailableMemory(size=budget, is_own=False))
    if isinstance(result, CacheSize):
        assert 0 < result.num_blocks[0] * MIB == result.kv_cache_bytes <= budget
        assert result.max_model_len <= min(limit, result.num_blocks[0] * 16)
        assert result.max_model_len == limit or not must_hold


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_bytes_match_the_formula_and_the_allocation(dtype: torch.dtype) -> None:
    (group,) = cache_groups(MODEL, dtype, 32)
    per_token = kv_bytes_per_token(layers=3, kv_heads=2, head_dim=16, dtype_bytes=dtype.itemsize)
    assert group.block_bytes == 32 * per_token
    layout = make_layout(MODEL, 32, replace(size_of(5), num_swap_blocks=(2,)))
    caches = allocate(layout, MODEL, dtype)
    space = allocate_swap_space(layout, caches)
    assert (len(caches), len(space)) == (3, 3)
    assert bytes_of(caches) == 5 * group.block_bytes and bytes_of(space) == 2 * group.block_bytes
    assert allocate_swap_space(make_layout(MODEL, 32, size_of(5)), caches) == ()


def bytes_of(caches: tuple[KVCache, ...]) -> int:
    return sum(cache.keys.nbytes + cache.values.nbytes for cache in caches)


def test_values_of_uneven_heads_are_counted_with_their_padding() -> None:
    uneven = replace(MODEL, head_dim=20)
    (group,) = cache_groups(uneven, torch.float32, 16)
    assert bytes_of(allocate(make_layout(uneven, 16, size_of(4)), uneven, torch.float32)) == 4 * group.block_bytes


def test_block_sizes_that_attention_cannot_use_are_named() -> None:
    assert option_problems(CacheOptions(block_size=8)) == ["--block-size 8: a multiple of 16 is needed"]
    assert not option_problems(CacheOptions(block_size=32))
