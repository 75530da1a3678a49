from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.dispatch import runs_triton
from quire_kernels.errors import ArgumentError
from quire_kernels.kv_cache import FP8, KVCache, allocate_kv_cache, allocate_swap_space
from quire_kernels.swap_blocks import reference, swap_blocks


def caches(
    num_blocks: int,
    device: torch.device,
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
            device=device,
        )
        for _ in range(layers)
    ]
    for cache in made:
        for held in (cache.keys, cache.values):
            held.copy_(torch.randn(held.shape).to(dtype))
    return made


def copied(some: list[KVCache]) -> list[Tensor]:
    """Return copies of the bytes of keys and values."""
    return [tensor.view(torch.uint8).clone() for cache in some for tensor in (cache.keys, cache.values)]


def are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def blocks(*ids: int, device: torch.device) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=["float32", "bfloat16", "float8"])
@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "block_size", "count"),
    [(1, 1, 16, 16, 1), (3, 2, 20, 32, 7), (2, 3, 80, 16, 5), (2, 8, 128, 64, 5)],
)
def test_blocks_are_copied_and_nothing_else_changes(
    layers: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    count: int,
    dtype: torch.dtype,
    threads: int,
    device: torch.device,
) -> None:
    if dtype == FP8 and not runs_triton(device.type):
        pytest.skip("a CPU has no float8 cache")
    shape: dict[str, Any] = {
        "layers": layers,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "dtype": dtype,
    }
    sources, targets, expected = (caches(size, device, **shape) for size in (12, 9, 9))
    for ours, theirs in zip(targets, expected, strict=True):
        theirs.keys.copy_(ours.keys)
        theirs.values.copy_(ours.values)
    before = copied(sources)
    chosen, places = torch.randperm(12)[:count].to(device), torch.randperm(9)[:count].to(device)
    swap_blocks(sources, targets, chosen, places)
    reference.swap_blocks(sources, expected, chosen, places)
    assert are_equal(copied(targets), copied(expected)) and are_equal(copied(sources), before)


def test_swapped_blocks_are_restored_bit_for_bit(device: torch.device) -> None:
    cache = caches(6, device, dtype=torch.bfloat16)
    space = [allocate_swap_space(layer, 3) for layer in cache]
    assert all(layer.keys.device.type == "cpu" and layer.num_blocks == 3 for layer in space)
    cache[1].keys[4].fill_(torch.nan)
    expected = [tensor[4] for tensor in copied(cache)]
    swap_blocks(cache, space, blocks(4, 5, device=device), blocks(2, 0, device=device))
    for layer in cache:
        layer.keys[4] = layer.values[4] = 0.0
    swap_blocks(space, cache, blocks(2, device=device), blocks(1, device=device))
    assert are_equal([tensor[1] for tensor in copied(cache)], expected)


def test_blocks_beyond_two_billion_elements_are_reached(device: torch.device) -> None:
    # A CPU allocates memory when it is written; a GPU allocates all 8.6 GB.
    num_blocks = (1 << 31) // (16 * 64) + 2
    shape: dict[str, Any] = {"block_size": 16, "kv_heads": 1, "head_dim": 64, "dtype": torch.float16, "device": device}
    large = allocate_kv_cache(num_blocks=num_blocks, **shape)
    small = allocate_kv_cache(num_blocks=2, **shape)
    large.keys[-1], large.values[-1] = 1.0, 2.0
    swap_blocks([large], [small], blocks(num_blocks - 1, device=device), blocks(1, device=device))
    assert bool((small.keys[1] == 1.0).all()) and bool((small.values[1] == 2.0).all())
    swap_blocks([small], [large], blocks(1, device=device), blocks(num_blocks - 2, device=device))
    assert bool((large.keys[-2] == 1.0).all()) and bool((large.values[-2] == 2.0).all())
    assert not large.keys[0].any() and not small.keys[0].any()


def test_zero_blocks_need_no_work(device: torch.device) -> None:
    sources, targets = caches(2, device), caches(1, device)
    start = copied(targets)
    swap_blocks(sources, targets, blocks(device=device), blocks(device=device))
    assert are_equal(copied(targets), start)


@pytest.mark.usefixtures("checks_values")
@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (5, 0, "source_blocks leave a cache"),
        (-1, 0, "source_blocks leave a cache"),
        (0, 4, "target_blocks leave a cache"),
        (0, -1, "target_blocks leave a cache"),
    ],
)
def test_a_block_out_of_range_is_refused(source: int, target: int, message: str, device: torch.device) -> None:
    with pytest.raises(Exception, match=f"swap_blocks: {message}"):
        swap_blocks(caches(5, device), caches(4, device), blocks(source, device=device), blocks(target, device=device))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda device: {"sources": []}, "targets are 3 caches; as many as sources, 0, are needed"),
        (lambda device: {"targets": caches(4, device, layers=2)}, "targets are 2 caches; as many as sources, 3, are"),
        (lambda device: {"targets": caches(4, device, head_dim=16)}, r"targets hold blocks of \(torch.float32, 2, 16"),
        (lambda device: {"targets": caches(4, device, dtype=torch.float16)}, r"targets hold blocks of \(torch.float16"),
        (lambda device: {"target_blocks": blocks(1, device=device)}, r"target_blocks is torch.int64 \(1,\)"),
        (lambda device: {"source_blocks": blocks(0, 1, device=device).int()}, "source_blocks is torch.int32"),
    ],
)
def test_invalid_copies_are_refused(
    change: Callable[[torch.device], dict[str, Any]], message: str, device: torch.device
) -> None:
    arguments: dict[str, Any] = {
        "sources": caches(5, device),
        "targets": caches(4, device),
        "source_blocks": blocks(0, 4, device=device),
        "target_blocks": blocks(3, 1, device=device),
    }
    with pytest.raises(ArgumentError, match=f"swap_blocks: {message}"):
        swap_blocks(**{**arguments, **change(device)})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="one kind of memory only")
def test_host_memory_must_be_pinned_and_block_ids_on_the_device() -> None:
    device = torch.device("cuda")
    cache, paged = caches(2, device), caches(2, torch.device("cpu"))
    ids = blocks(0, device=device)
    with pytest.raises(ArgumentError, match="swap_blocks: targets are on cpu; cuda:0, .* or pinned host memory is"):
        swap_blocks(cache, paged, ids, ids)
    with pytest.raises(ArgumentError, match="swap_blocks: target_blocks is on cpu; cuda:0 is needed"):
        swap_blocks(cache, cache, ids, ids.cpu())
