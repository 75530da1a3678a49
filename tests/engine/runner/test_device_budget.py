"""The KV cache's share of a GPU, computed from given figures."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.kv_size import CacheGroup
from quire_engine.config import CacheOptions
from quire_engine.runner.cache_size import CacheDemand, CacheSize, CacheTooSmall
from quire_engine.runner.device_budget import DeviceUse, graphs_bytes, size_device_cache
from quire_engine.runner.memory import AvailableMemory

GIB, MIB = 1 << 30, 1 << 20
# An 80 GB card, alone, with an 8 B model.
USE = DeviceUse(
    total=80 * GIB, free=61 * GIB, before=GIB // 2, weights=16 * GIB, activations=5 * GIB // 2, graphs=GIB // 2
)
DEMAND = CacheDemand(
    groups=(CacheGroup(block_bytes=2 * MIB),),
    block_size=16,
    sequence_tokens=8192,
    must_hold_limit=False,
    max_sequences=256,
    max_batched_tokens=2048,
)
MIXED = replace(DEMAND, groups=(CacheGroup(block_bytes=MIB), CacheGroup(block_bytes=5 * MIB, window=1024)))


@pytest.mark.parametrize(
    ("options", "use", "cache_bytes"),
    [
        # 0.9 of 80 less 19 of weights, activations and graphs, and less the block to which padding is written.
        (CacheOptions(), USE, 53 * GIB - 2 * MIB),
        (CacheOptions(gpu_memory_utilization=0.5), USE, 21 * GIB - 2 * MIB),
        # All of it: what CUDA used before this process is not available.
        (CacheOptions(gpu_memory_utilization=1.0), USE, 60 * GIB + GIB // 2 - 256 * MIB - 2 * MIB),
        # Another process has 30 GiB, so the free memory is less than the share.
        (CacheOptions(), replace(USE, free=31 * GIB, before=30 * GIB), 30 * GIB + GIB // 2 - 256 * MIB - 2 * MIB),
        # Two processes with half of a GPU each do not disturb each other.
        (CacheOptions(gpu_memory_utilization=0.45), replace(USE, free=25 * GIB, before=36 * GIB), 17 * GIB - 2 * MIB),
        (CacheOptions(kv_cache_memory_bytes=10 * GIB), USE, 10 * GIB),
        # Swap space is in host memory.
        (CacheOptions(swap_space_bytes=8 * GIB), USE, 53 * GIB - 2 * MIB),
    ],
)
def test_kv_cache_gets_the_memory_left_of_the_share(options: CacheOptions, use: DeviceUse, cache_bytes: int) -> None:
    size = size_device_cache(DEMAND, options, use, AvailableMemory(size=64 * GIB, is_own=False))
    assert isinstance(size, CacheSize), size
    assert size.num_blocks == (cache_bytes // (2 * MIB),)
    assert size.num_swap_blocks == (options.swap_space_bytes // (2 * MIB),)
    assert size.max_model_len == 8192 and size.sequences == cache_bytes // (2 * MIB) // 512


def test_groups_get_at_most_the_blocks_they_can_use() -> None:
    size = size_device_cache(replace(MIXED, max_sequences=8), CacheOptions(), USE, None)
    assert isinstance(size, CacheSize)
    assert size.num_blocks == (8 * 512, (8 * (64 + 2) + 128) * 3 // 2)
    assert size.sequences == 8


@pytest.mark.parametrize(
    ("options", "use", "words"),
    [
        (
            CacheOptions(kv_cache_memory_bytes=70 * GIB),
            USE,
            ["--kv-cache-memory-bytes 75161927680 does not fit", "weights take 17,179,869,184", "at most "],
        ),
        (
            CacheOptions(kv_cache_memory_bytes=GIB),
            replace(USE, free=GIB, before=60 * GIB),
            ["other processes took 64,424,509,440 before", "at most 266338304 would fit"],
        ),
        (
            CacheOptions(kv_cache_memory_bytes=GIB),
            replace(USE, free=0),
            ["use a GPU with more memory, or one that is free"],
        ),
        (
            CacheOptions(swap_space_bytes=65 * GIB),
            USE,
            ["--swap-space-bytes 69793218560 must fit into the 68,719,476,736 bytes of host memory", "at most"],
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_a_remedy(
    options: CacheOptions, use: DeviceUse, words: list[str]
) -> None:
    refused = size_device_cache(DEMAND, options, use, AvailableMemory(size=64 * GIB, is_own=False))
    assert isinstance(refused, CacheTooSmall)
    assert all(word in refused.message for word in words), refused.message
    if named := re.search(r"at most (\d+) would fit", refused.message):
        smaller = replace(
            options,
            **{name: int(named[1]) for name in ("kv_cache_memory_bytes", "swap_space_bytes") if getattr(options, name)},
        )
        assert isinstance(
            size_device_cache(DEMAND, smaller, use, AvailableMemory(size=64 * GIB, is_own=False)), CacheSize
        )


def test_a_share_too_small_names_the_share_that_is_enough() -> None:
    demand = replace(DEMAND, must_hold_limit=True)
    refused = size_device_cache(demand, CacheOptions(gpu_memory_utilization=0.24), USE, None)
    assert isinstance(refused, CacheTooSmall)
    assert "--gpu-memory-utilization 0.24 of 85,899,345,920 bytes" in refused.message
    assert "--kv-cache-dtype fp8" in refused.message
    named = re.search(r"use --gpu-memory-utilization ([0-9.]+),", refused.message)
    assert named is not None, refused.message
    enough = size_device_cache(demand, CacheOptions(gpu_memory_utilization=float(named[1])), USE, None)
    assert isinstance(enough, CacheSize) and enough.max_model_len == 8192


def test_remedies_name_no_useless_share_or_dtype() -> None:
    full = replace(USE, total=24 * GIB, free=GIB // 2 + 200 * MIB)
    refused = size_device_cache(replace(DEMAND, must_hold_limit=True), CacheOptions(kv_cache_dtype="fp8"), full, None)
    assert isinstance(refused, CacheTooSmall)
    advice = refused.message.partition(": use ")[2]
    assert "--gpu-memory-utilization" not in advice and "fp8" not in advice
    assert "a GPU with more memory" in advice and "--max-num-batched-tokens" in advice


@given(
    total=st.integers(1, 200),
    weights=st.integers(0, 150),
    activations=st.integers(0, 20),
    graphs=st.integers(0, 4),
    before=st.integers(0, 200),
    share=st.floats(0.01, 1.0),
)
def test_budget_is_within_free_memory_and_the_share(
    total: int, weights: int, activations: int, graphs: int, before: int, share: float
) -> None:
    use = DeviceUse(
        total=total * GIB,
        free=max(0, total - weights - activations - before) * GIB,
        before=before * GIB,
        weights=weights * GIB,
        activations=activations * GIB,
        graphs=graphs * GIB,
    )
    size = size_device_cache(DEMAND, CacheOptions(gpu_memory_utilization=share), use, None)
    if isinstance(size, CacheSize):
        assert size.kv_cache_bytes + 2 * MIB <= use.free - use.graphs
        assert size.kv_cache_bytes + use.own <= use.total * share
    else:
        assert "too small for one sequence" in size.message


@pytest.mark.parametrize(
    ("measured", "count", "expected"),
    [
        ((), 0, 0),
        ((300,), 1, 300),
        ((300,), 24, 300 + 23 * 2),
        ((300, 0, 2, 1), 24, 300 + 23 * 2),
        ((300, 4, 2, 6), 24, 300 + 23 * 4),
    ],
)
def test_graphs_share_the_largest_ones_memory(measured: tuple[int, ...], count: int, expected: int) -> None:
    assert graphs_bytes([size * MIB for size in measured], count) == expected * MIB
