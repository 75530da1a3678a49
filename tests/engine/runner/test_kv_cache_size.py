"""How many blocks fit, and what is said when too few do."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.config import CacheOptions
from quire_engine.core.kv_layout import kv_bytes_per_token
from quire_engine.core.kv_manager import KVManager
from quire_engine.model.config import ModelConfig
from quire_engine.model.rope import RopeConfig
from quire_engine.runner.kv_cache import (
    CacheDemand,
    CacheSize,
    CacheTooSmall,
    allocate,
    block_bytes,
    make_layout,
    option_problems,
    size_cache,
)
from quire_engine.runner.memory import AvailableMemory

GIB = 1 << 30
DEMAND = CacheDemand(
    block_bytes=1 << 20, block_size=16, model_limit=1000, must_hold_limit=False, max_num_seqs=4, window=None
)
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=30,
    hidden_size=64,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    ropes=(RopeConfig(theta=1e4),) * 3,
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    eos_token_ids=(),
    windows=(None, None, None),
    rotary_dim=16,
    attention_scale=16**-0.5,
    attention_soft_cap=None,
    logit_soft_cap=None,
)


def machine(gib: float) -> AvailableMemory:
    return AvailableMemory(size=int(gib * GIB), is_own=False)


@pytest.mark.parametrize(
    ("options", "available", "expected"),
    [
        (CacheOptions(kv_cache_memory_bytes=100 << 20), None, CacheSize(num_blocks=100, max_model_len=1000)),
        (CacheOptions(kv_cache_memory_bytes=10 << 20), None, CacheSize(num_blocks=10, max_model_len=160)),
        # Never more than all sequences at full length: 4 times 63 blocks.
        (CacheOptions(), machine(64), CacheSize(num_blocks=252, max_model_len=1000)),
        # A quarter of a machine that others use as well.
        (CacheOptions(), machine(0.5), CacheSize(num_blocks=128, max_model_len=1000)),
        # Of its own memory all but the rest for activations.
        (
            CacheOptions(gpu_memory_utilization=0.5),
            AvailableMemory(size=GIB + (200 << 20), is_own=True),
            CacheSize(num_blocks=100, max_model_len=1000),
        ),
        (CacheOptions(), None, CacheSize(num_blocks=252, max_model_len=1000)),
    ],
)
def test_blocks_follow_from_the_budget(
    options: CacheOptions, available: AvailableMemory | None, expected: CacheSize
) -> None:
    assert size_cache(DEMAND, options, available) == expected


@pytest.mark.parametrize(
    ("demand", "options", "words"),
    [
        (
            replace(DEMAND, must_hold_limit=True),
            CacheOptions(kv_cache_memory_bytes=62 << 20),
            [
                "65,011,712 bytes (--kv-cache-memory-bytes)",
                "1,000 tokens",
                "--kv-cache-memory-bytes 66060288",
                "--max-model-len 992",
            ],
        ),
        (DEMAND, CacheOptions(kv_cache_memory_bytes=1000), ["1,000 bytes", "--kv-cache-memory-bytes 66060288"]),
    ],
)
def test_a_cache_too_small_is_refused_with_the_number_that_works(
    demand: CacheDemand, options: CacheOptions, words: list[str]
) -> None:
    result = size_cache(demand, options, machine(8))
    assert isinstance(result, CacheTooSmall)
    assert all(word in result.message for word in words), result.message
    named = replace(options, kv_cache_memory_bytes=66060288)
    assert size_cache(demand, named, machine(8)) == CacheSize(num_blocks=63, max_model_len=1000)


def test_a_window_needs_its_blocks_and_a_step_more_whatever_the_length() -> None:
    demand = replace(DEMAND, window=100, model_limit=101, max_num_seqs=1)
    options = CacheOptions(kv_cache_memory_bytes=8 << 20)
    assert isinstance(refused := size_cache(demand, options, None), CacheTooSmall)
    assert f"--kv-cache-memory-bytes {9 << 20}" in refused.message and "--max-model-len" not in refused.message
    assert size_cache(demand, CacheOptions(kv_cache_memory_bytes=9 << 20), None) == CacheSize(
        num_blocks=9, max_model_len=101
    )
    assert size_cache(demand, CacheOptions(), machine(8)) == CacheSize(num_blocks=9, max_model_len=101)


def test_a_window_is_always_left_room_for_a_chunk_of_more_than_a_block() -> None:
    for window in range(1, 70):
        demand = replace(DEMAND, window=window, model_limit=1000)
        config = replace(MODEL, windows=(window,) * 3)
        manager = KVManager(make_layout(config, 16, demand.fewest_blocks), max_chunk=1000, enable_prefix_caching=True)
        assert manager.max_chunk > 16


def test_layers_with_the_same_window_share_a_group() -> None:
    layout = make_layout(replace(MODEL, windows=(8, None, 8)), 16, 5)
    assert [(group.layers, group.window, group.num_blocks) for group in layout.groups] == [
        ((0, 2), 8, 5),
        ((1,), None, 5),
    ]


@given(
    budget=st.integers(0, 1 << 40),
    limit=st.integers(1, 200_000),
    must_hold=st.booleans(),
    sequences=st.integers(1, 1000),
    explicit=st.booleans(),
)
def test_the_cache_stays_in_its_budget_and_holds_a_longest_sequence(
    budget: int, limit: int, must_hold: bool, sequences: int, explicit: bool
) -> None:
    demand = replace(DEMAND, model_limit=limit, must_hold_limit=must_hold, max_num_seqs=sequences)
    options = CacheOptions(kv_cache_memory_bytes=budget if explicit else None)
    result = size_cache(demand, options, AvailableMemory(size=budget, is_own=False))
    if isinstance(result, CacheSize):
        assert 0 < result.num_blocks * demand.block_bytes <= budget
        assert result.max_model_len <= min(limit, result.num_blocks * 16)
        assert result.max_model_len == limit or not must_hold


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_takes_what_the_formula_says_and_the_allocation_has(dtype: torch.dtype) -> None:
    size = block_bytes(MODEL, dtype, 32)
    per_token = kv_bytes_per_token(layers=3, kv_heads=2, head_dim=16, dtype_bytes=dtype.itemsize)
    assert size == 32 * per_token
    caches = allocate(make_layout(MODEL, 32, 5), MODEL, dtype)
    assert len(caches) == 3
    assert sum(cache.keys.nbytes + cache.values.nbytes for cache in caches) == 5 * size


def test_values_of_uneven_heads_are_counted_with_their_padding() -> None:
    uneven = replace(MODEL, head_dim=20)
    caches = allocate(make_layout(uneven, 16, 4), uneven, torch.float32)
    assert sum(cache.keys.nbytes + cache.values.nbytes for cache in caches) == 4 * block_bytes(
        uneven, torch.float32, 16
    )


def test_block_sizes_the_cpu_cannot_use_are_named() -> None:
    assert option_problems(CacheOptions(block_size=8)) == ["--block-size 8: a multiple of 16 is needed on a CPU"]
    assert not option_problems(CacheOptions(block_size=32))
