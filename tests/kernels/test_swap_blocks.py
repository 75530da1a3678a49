from typing import Any

import pytest
import torch

from quire_kernels.errors import ArgumentError
from quire_kernels.kv_cache import KVCache, allocate_kv_cache
from quire_kernels.swap_blocks import reference, swap_blocks


def caches(
    num_blocks: int,
    *,
    layers: int = 3,
    kv_heads: int = 2,
    head_dim: int = 20,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> list[KVCache]:
    made = [
        allocate_kv_cache(
            num_blocks=num_blocks,
            block_size=block_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        for _ in range(layers)
    ]
    for cache in made:
        cache.keys.normal_()
        cache.values.normal_()
    return made


def copied(sources: list[KVCache]) -> list[torch.Tensor]:
    return [tensor.clone() for cache in sources for tensor in (cache.keys, cache.values)]


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "block_size", "count"), [(1, 16, 16, 1), (2, 20, 32, 7), (8, 128, 16, 19)]
)
def test_blocks_are_copied_and_nothing_else_changes(
    kv_heads: int, head_dim: int, block_size: int, count: int, dtype: torch.dtype, threads: int
) -> None:
    shape: dict[str, Any] = {"kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    sources, targets = caches(30, **shape), caches(20, **shape)
    before, start = copied(sources), copied(targets)
    source_blocks, target_blocks = torch.randperm(30)[:count], torch.randperm(20)[:count]

    swap_blocks(sources, targets, source_blocks, target_blocks)
    found = copied(targets)
    for cache, keys, values in zip(targets, start[::2], start[1::2], strict=True):
        cache.keys.copy_(keys)
        cache.values.copy_(values)
    reference.swap_blocks(sources, targets, source_blocks, target_blocks)

    for ours, theirs in zip(found, copied(targets), strict=True):
        assert torch.equal(ours, theirs)
    for now, was in zip(copied(sources), before, strict=True):
        assert torch.equal(now, was)


def test_swapped_bits_are_restored_even_for_nan() -> None:
    cache, host = caches(4, dtype=torch.bfloat16), caches(2, dtype=torch.bfloat16)
    cache[1].keys[3].fill_(torch.nan)
    cache[2].values[3] = torch.arange(cache[2].values[3].numel()).view_as(cache[2].values[3])
    expected = [tensor[3].view(torch.int16).clone() for tensor in copied(cache)]
    swap_blocks(cache, host, torch.tensor([3]), torch.tensor([0]))
    for layer in cache:
        layer.keys[3] = layer.values[3] = 0.0
    swap_blocks(host, cache, torch.tensor([0]), torch.tensor([1]))
    assert all(
        torch.equal(tensor[1].view(torch.int16), was) for tensor, was in zip(copied(cache), expected, strict=True)
    )


def test_zero_blocks_need_no_work() -> None:
    sources, targets = caches(2), caches(1)
    start = copied(targets)
    swap_blocks(sources, targets, torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert all(torch.equal(now, was) for now, was in zip(copied(targets), start, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": []}, "targets are 3 caches; as many as sources, 0, are needed"),
        ({"targets": caches(4, layers=2)}, "targets are 2 caches; as many as sources, 3, are needed"),
        ({"targets": caches(4, head_dim=16)}, r"targets hold blocks of \(torch.float32, 2, 16, 16\)"),
        ({"targets": caches(4, dtype=torch.float16)}, r"targets hold blocks of \(torch.float16, 2, 20, 16\)"),
        ({"source_blocks": torch.tensor([0, 5])}, "source_blocks leave a cache of 5 blocks"),
        ({"target_blocks": torch.tensor([4, 1])}, "target_blocks leave a cache of 4 blocks"),
        ({"target_blocks": torch.tensor([-1, 1])}, "target_blocks leave a cache of 4 blocks"),
        ({"target_blocks": torch.tensor([1])}, r"target_blocks is torch.int64 \(1,\)"),
        ({"source_blocks": torch.tensor([0, 1]).int()}, "source_blocks is torch.int32"),
    ],
)
def test_invalid_copies_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "sources": caches(5),
        "targets": caches(4),
        "source_blocks": torch.tensor([0, 4]),
        "target_blocks": torch.tensor([3, 1]),
    }
    with pytest.raises(ArgumentError, match=f"swap_blocks: {message}"):
        swap_blocks(**{**arguments, **change})
