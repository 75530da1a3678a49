import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.errors import ArgumentError
from quire_kernels.kv_cache import KVCache, allocate_kv_cache, allocate_swap_space, read_tokens, write_tokens
from quire_kernels.rotary import reference as rotary_reference
from quire_kernels.rotary import rotary, rotary_table
from quire_kernels.store_kv import reference, store_kv

Close = Callable[[Tensor, Tensor], None]
HEAD_DIMS = [20, 32, 64, 80, 96, 128]


def table(width: int, positions: int = 100) -> Tensor:
    frequencies = torch.tensor([10_000.0 ** (-2 * i / width) for i in range(width // 2)])
    return rotary_table(frequencies, positions)


def cache_of(kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int = 16) -> KVCache:
    return allocate_kv_cache(
        num_blocks=9,
        block_size=block_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def test_the_table_holds_cosines_then_sines_of_each_position() -> None:
    expected = [torch.cos(torch.tensor(3.0)), torch.cos(torch.tensor(1.5)), torch.sin(torch.tensor(3.0))]
    assert rotary_table(torch.tensor([1.0, 0.5]), 4)[3, :3].tolist() == pytest.approx([float(x) for x in expected])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotary_equals_the_reference(
    head_dim: int, dtype: torch.dtype, threads: int, strided: Callable[..., Tensor], assert_close: Close
) -> None:
    found = strided(37, 3, head_dim, dtype=dtype)
    expected = found.clone()
    positions = torch.randint(0, 100, (37,))
    rotary(found, table(head_dim), positions)
    rotary_reference.rotary(expected, table(head_dim), positions)
    assert_close(found, expected)


def test_rotary_leaves_components_beyond_the_table_alone(assert_close: Close) -> None:
    x = torch.randn(5, 2, 32)
    found = x.clone()
    rotary(found, table(8), torch.arange(5))
    expected = x.clone()
    rotary_reference.rotary(expected, table(8), torch.arange(5))
    assert_close(found, expected)
    assert torch.equal(found[..., 8:], x[..., 8:]) and not torch.equal(found[..., :8], x[..., :8])


def test_scores_depend_on_the_distance_of_positions_only() -> None:
    q, k = torch.randn(1, 1, 64), torch.randn(1, 1, 64)
    scores = []
    for shift in (0, 31):
        turned_q, turned_k = q.clone(), k.clone()
        rotary(turned_q, table(64), torch.tensor([7 + shift]))
        rotary(turned_k, table(64), torch.tensor([3 + shift]))
        scores.append(float((turned_q * turned_k).sum()))
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("heads", "kv_heads", "block_size"), [(3, 1, 16), (8, 2, 32), (4, 4, 16)])
def test_store_kv_equals_the_reference(
    heads: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    strided: Callable[..., Tensor],
    assert_close: Close,
) -> None:
    projected = strided(41, heads + 2 * kv_heads, head_dim, dtype=dtype)
    positions, slots = torch.randint(0, 100, (41,)), torch.randperm(9 * block_size)[:41]
    caches, queries = [], []
    for operation in (store_kv, reference.store_kv):
        cache = cache_of(kv_heads, head_dim, dtype, block_size)
        q, k, v = projected.clone().split((heads, kv_heads, kv_heads), dim=1)
        operation(q, k, v, table(head_dim), positions, slots, cache)
        caches.append(cache)
        queries.append(q)
    assert_close(queries[0], queries[1])
    assert_close(caches[0].keys, caches[1].keys)
    assert_close(caches[0].values, caches[1].values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    weight: Tensor
    eps: float


@pytest.mark.parametrize(("head_dim", "rotated"), [(20, 20), (128, 128), (96, 32)])
def test_store_kv_normalizes_heads_before_rotation(
    head_dim: int, rotated: int, dtype: torch.dtype, strided: Callable[..., Tensor], assert_close: Close
) -> None:
    projected = strided(41, 3 + 2 * 2, head_dim, dtype=dtype)
    q_norm, k_norm = (Norm(weight=torch.randn(head_dim).to(dtype), eps=eps) for eps in (1e-6, 1e-2))
    positions, slots = torch.randint(0, 100, (41,)), torch.randperm(144)[:41]
    for norms in ((q_norm, k_norm), (None, k_norm), (q_norm, None)):
        caches, queries = [], []
        for operation in (store_kv, reference.store_kv):
            cache = cache_of(2, head_dim, dtype)
            q, k, v = projected.clone().split((3, 2, 2), dim=1)
            operation(q, k, v, table(rotated), positions, slots, cache, *norms)
            caches.append(cache)
            queries.append(q)
        assert_close(queries[0], queries[1])
        assert_close(caches[0].keys, caches[1].keys)
        assert_close(caches[0].values, caches[1].values)


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
    cache = allocate_kv_cache(
        num_blocks=1 << 20, block_size=16, kv_heads=1, head_dim=64, dtype=torch.float32, device=torch.device("cpu")
    )
    slot = torch.tensor([(1 << 24) - 1])
    one = torch.ones(1, 1, 64)
    store_kv(one.clone(), one.clone(), one, table(64), torch.tensor([0]), slot, cache)
    assert float(cache.values[-1, 0, 15, 63]) == 1.0 and float(cache.keys[-1, 0, 63, 15]) == 1.0
    assert cache.keys.nbytes + cache.values.nbytes == 8 << 30
    assert resident_bytes() - before < 100 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def arguments() -> dict[str, Any]:
    return {
        "q": torch.zeros(2, 4, 32),
        "k": torch.zeros(2, 2, 32),
        "v": torch.zeros(2, 2, 32),
        "cos_sin": table(32),
        "positions": torch.tensor([0, 1]),
        "slots": torch.tensor([0, 1]),
        "cache": cache_of(2, 32, torch.float32),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q": torch.zeros(2, 4, 64)[..., :32]},
            "store_kv: q has strides .*; the heads of a token must lie side by side",
        ),
        ({"k": torch.zeros(3, 2, 32), "v": torch.zeros(3, 2, 32)}, "store_kv: k has shape"),
        ({"v": torch.zeros(2, 1, 32)}, r"store_kv: v has shape \(2, 1, 32\); that of k, \(2, 2, 32\), is needed"),
        ({"v": torch.zeros(2, 2, 32).half()}, "store_kv: k, v are torch.float32, torch.float16"),
        ({"cos_sin": torch.zeros(10, 64)}, "store_kv: cos_sin is 64 wide; an even number up to the head dim 32"),
        ({"positions": torch.tensor([0, 100])}, "store_kv: positions leave the table of 100 positions"),
        ({"positions": torch.tensor([-1, 0])}, "store_kv: positions leave the table"),
        ({"positions": torch.tensor([0, 1]).int()}, "store_kv: positions is torch.int32"),
        ({"slots": torch.tensor([0, 144])}, "store_kv: slots leave the cache of 9 blocks of 16 tokens"),
        ({"slots": torch.tensor([-1, 0])}, "store_kv: slots leave the cache"),
        ({"slots": torch.tensor([0])}, "store_kv: slots is"),
        ({"cache": cache_of(2, 32, torch.float16)}, "store_kv: cache holds torch.float16, 2 heads of 32"),
        ({"cache": cache_of(1, 32, torch.float32)}, "store_kv: cache holds torch.float32, 1 heads of 32"),
    ],
)
def test_store_kv_refuses_invalid_arguments(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        store_kv(**{**arguments(), **change})


def test_rotary_refuses_a_position_outside_its_table() -> None:
    with pytest.raises(ArgumentError, match="rotary: positions leave the table of 100 positions"):
        rotary(torch.zeros(1, 1, 32), table(32), torch.tensor([100]))


def test_float8_cache_is_refused_on_the_cpu() -> None:
    with pytest.raises(ArgumentError, match=r"dtype is torch.float8_e4m3fn; .*, float16 is needed on cpu"):
        cache_of(1, 32, torch.float8_e4m3fn)


def test_swap_space_holds_blocks_as_the_cache_does() -> None:
    cache = cache_of(3, 20, torch.bfloat16)
    space = allocate_swap_space(cache, 4)
    assert space.num_blocks == 4 and cache.num_blocks == 9
    for ours, theirs in ((space.keys, cache.keys), (space.values, cache.values)):
        assert ours.shape == (4, *theirs.shape[1:]) and ours.dtype == theirs.dtype and not ours.any()


def test_a_cache_of_odd_blocks_is_refused() -> None:
    with pytest.raises(ArgumentError, match="allocate_kv_cache: block_size is 8; a multiple of 16 is needed"):
        cache_of(1, 32, torch.float32, block_size=8)
