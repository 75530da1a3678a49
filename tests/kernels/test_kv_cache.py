"""The KV cache of a CPU: its memory, its tokens, and the swap space. Also the table of rotary embeddings."""

import mmap
import sys
from pathlib import Path

import pytest
import torch

from quire_kernels.errors import ArgumentError
from quire_kernels.kv_cache import KVCache, allocate_kv_cache, allocate_swap_space, read_tokens, write_tokens
from quire_kernels.store_kv import rotary_table, store_kv


def cache_of(kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int = 16, *, num_blocks: int = 9) -> KVCache:
    return allocate_kv_cache(
        num_blocks=num_blocks,
        block_size=block_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def test_the_table_holds_cosines_then_sines_of_each_position() -> None:
    expected = [torch.cos(torch.tensor(3.0)), torch.cos(torch.tensor(1.5)), torch.sin(torch.tensor(3.0))]
    assert rotary_table(torch.tensor([1.0, 0.5]), 4)[3, :3].tolist() == pytest.approx([float(x) for x in expected])


@pytest.mark.parametrize("head_dim", [20, 21])
def test_tokens_written_to_slots_are_read_back_in_order(head_dim: int, dtype: torch.dtype) -> None:
    cache = cache_of(2, head_dim, dtype)
    cache.keys.fill_(torch.nan)
    keys, values = torch.randn(2, 21, 2, head_dim).to(dtype)
    blocks = torch.tensor([7, 2])
    slots = torch.cat((7 * 16 + torch.arange(16), 2 * 16 + torch.arange(5)))
    write_tokens(cache, slots, keys, values)
    read_keys, read_values = read_tokens(cache, blocks, 21)
    assert torch.equal(read_keys, keys.transpose(0, 1)) and torch.equal(read_values, values.transpose(0, 1))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cache_memory_is_allocated_on_first_write() -> None:
    before = resident_bytes()
    cache = cache_of(1, 64, torch.float32, num_blocks=1 << 20)
    one = torch.ones(1, 1, 64)
    slot, table = torch.tensor([(1 << 24) - 1]), rotary_table(torch.ones(32), 1)
    store_kv(one.clone(), one.clone(), one, table, torch.tensor([0]), slot, cache)
    assert float(cache.values[-1, 0, 15, 63]) == 1.0 and float(cache.keys[-1, 0, 63, 15]) == 1.0
    assert cache.keys.nbytes + cache.values.nbytes == 8 << 30
    assert resident_bytes() - before < 100 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_float8_cache_is_refused_on_the_cpu() -> None:
    with pytest.raises(ArgumentError, match=r"dtype is torch.float8_e4m3fn; .*, float16 is needed on cpu"):
        cache_of(1, 32, torch.float8_e4m3fn)


def test_a_cache_of_odd_blocks_is_refused() -> None:
    with pytest.raises(ArgumentError, match="allocate_kv_cache: block_size is 8; a multiple of 16 is needed"):
        cache_of(1, 32, torch.float32, block_size=8)


def test_swap_space_holds_blocks_as_the_cache_does() -> None:
    cache = cache_of(3, 20, torch.bfloat16)
    space = allocate_swap_space(cache, 4)
    assert space.num_blocks == 4 and cache.num_blocks == 9
    for ours, theirs in ((space.keys, cache.keys), (space.values, cache.values)):
        assert ours.shape == (4, *theirs.shape[1:]) and ours.dtype == theirs.dtype and not ours.any()
