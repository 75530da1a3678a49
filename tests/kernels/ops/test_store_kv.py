from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.dispatch import runs_triton
from quire_kernels.errors import ArgumentError
from quire_kernels.kv_cache import FP8, KVCache, allocate_kv_cache, read_tokens
from quire_kernels.store_kv import reference, rotary_table, store_kv

Close = Callable[[Tensor, Tensor], None]
Strided = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    weight: Tensor
    eps: float


def table(width: int, device: torch.device, positions: int = 100) -> Tensor:
    frequencies = torch.tensor([10_000.0 ** (-2 * i / width) for i in range(width // 2)])
    return rotary_table(frequencies, positions).to(device)


def cache_of(kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, block_size: int = 16) -> KVCache:
    """Return a cache in which every byte without a token is NaN."""
    cache = allocate_kv_cache(
        num_blocks=9, block_size=block_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device
    )
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    return cache


def check_cache(found: KVCache, expected: KVCache, check: Close) -> None:
    for ours, theirs in ((found.keys, expected.keys), (found.values, expected.values)):
        assert torch.equal(ours.isnan(), theirs.isnan())
        check(ours.nan_to_num(), theirs.nan_to_num())


def test_scores_depend_on_the_distance_of_positions_only(device: torch.device) -> None:
    heads, positions = torch.randn(2, 1, 64, device=device), torch.tensor([7, 3], device=device)
    scores = []
    for shift in (0, 31):
        turned, nothing = heads.clone(), torch.zeros(2, 1, 64, device=device)
        cache, slots = cache_of(1, 64, torch.float32, device), torch.tensor([0, 1], device=device)
        store_kv(turned, nothing, nothing, table(64, device), positions + shift, slots, cache)
        scores.append(float((turned[0] * turned[1]).sum()))
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


SHAPES = [
    pytest.param(3, 1, 32, 32, 16, "", id="3-heads-over-1-of-32"),
    pytest.param(8, 2, 64, 64, 32, "qk", id="8-over-2-of-64-normed"),
    pytest.param(9, 3, 80, 80, 16, "q", id="9-over-3-of-80-queries-normed"),
    pytest.param(4, 4, 96, 32, 16, "", id="4-over-4-of-96-partly-rotated"),
    pytest.param(4, 4, 96, 32, 16, "qk", id="4-over-4-of-96-partly-rotated-normed"),
    pytest.param(17, 9, 128, 128, 64, "k", id="17-over-9-of-128-keys-normed"),
    pytest.param(6, 6, 256, 256, 16, "qk", id="6-over-6-of-256-normed"),
    pytest.param(3, 3, 20, 0, 16, "", id="3-over-3-of-20-not-rotated"),
    pytest.param(3, 3, 20, 0, 16, "qk", id="3-over-3-of-20-not-rotated-normed"),
    pytest.param(3, 2, 20, 20, 16, "qk", id="3-over-2-of-20-normed"),
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rotated", "block_size", "normed"), SHAPES)
def test_store_kv_equals_the_reference(
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotated: int,
    block_size: int,
    normed: str,
    dtype: torch.dtype,
    strided: Strided,
    assert_close: Close,
    device: torch.device,
) -> None:
    tokens = 7 if runs_triton(device.type) else 41  # several of a CPU's work items
    projected = strided(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    positions = torch.randint(0, 100, (tokens,), device=device)
    slots = torch.randperm(9 * block_size)[:tokens].to(device)
    norms = [
        Norm(weight=torch.randn(head_dim).to(dtype).to(device), eps=eps) if name in normed else None
        for name, eps in (("q", 1e-6), ("k", 1e-2))
    ]
    angles = table(rotated, device) if rotated else torch.zeros(100, 0, device=device)
    caches, queries = [], []
    for operation in (store_kv, reference.store_kv):
        caches.append(cache_of(kv_heads, head_dim, dtype, device, block_size))
        q, k, v = projected.clone().split((heads, kv_heads, kv_heads), dim=1)
        operation(q, k, v, angles, positions, slots, caches[-1], *norms)
        queries.append(q)
    assert_close(queries[0], queries[1])
    check_cache(caches[0], caches[1], assert_close)


@pytest.mark.parametrize(("normed", "head_dim", "rotated"), [(False, 64, 64), (True, 80, 32)])
def test_float8_cache_stores_heads_divided_by_their_scales(
    normed: bool, head_dim: int, rotated: int, dtype: torch.dtype, strided: Strided, device: torch.device
) -> None:
    if not runs_triton(device.type):
        pytest.skip("a CPU has no float8 cache")
    from quire_kernels.triton_runtime.device import OLDEST_WITH_FP8, device_properties

    if device_properties(torch.zeros(0, device=device).device).capability < OLDEST_WITH_FP8:
        pytest.skip("no float8 on this device")
    projected = strided(7, 3 + 2 * 2, head_dim, dtype=dtype)
    projected[0, 4, 0] = 60_000.0  # far beyond the range of float8 at its scale
    projected[1, 6, 3], projected[2, 5, 1] = -60_000.0, torch.nan
    positions, slots = torch.arange(7, device=device), torch.randperm(100)[:7].to(device)
    norm = Norm(weight=torch.randn(head_dim).to(dtype).to(device), eps=1e-6) if normed else None
    caches = []
    for operation in (store_kv, reference.store_kv):
        cache = cache_of(2, head_dim, FP8, device)
        assert cache.key_scale is not None and cache.value_scale is not None
        cache.key_scale.copy_(torch.tensor([0.01, 2.0]))
        cache.value_scale.copy_(torch.tensor([0.5, 0.02]))
        q, k, v = projected.clone().split((3, 2, 2), dim=1)
        operation(q, k, v, table(rotated, device), positions, slots, cache, norm, norm)
        caches.append(cache)
    for found, expected in ((caches[0].keys, caches[1].keys), (caches[0].values, caches[1].values)):
        torch.testing.assert_close(found.isnan(), expected.isnan())
        found, expected = found.float().nan_to_num(), expected.float().nan_to_num()
        # One step of float8 apart, and rarely: float32 results on both sides of a boundary.
        torch.testing.assert_close(found, expected, rtol=0.126, atol=2e-3)
        assert int((found != expected).sum()) <= 2
    assert float(caches[0].values.float().nan_to_num().abs().max()) == 448.0
    keys, values = read_tokens(caches[0], torch.arange(9, device=device), 144)
    assert keys.dtype == values.dtype == torch.float32
    found_values = values[0, slots][3:]  # head 0, scale 0.5
    torch.testing.assert_close(found_values, projected[3:, 5].float(), rtol=0.07, atol=0.01)


def test_token_is_independent_of_other_tokens(strided: Strided, device: torch.device) -> None:
    projected = strided(9, 6, 64, dtype=torch.float32)
    norm = Norm(weight=torch.randn(64, device=device), eps=1e-6)
    positions, slots = torch.arange(9, device=device), torch.arange(9, device=device) * 3
    caches = [cache_of(1, 64, torch.float32, device) for _ in range(2)]
    for cache, parts in zip(caches, ([slice(0, 9)], [slice(i, i + 1) for i in range(9)]), strict=True):
        for part in parts:
            q, k, v = projected[part].clone().split((4, 1, 1), dim=1)
            store_kv(q, k, v, table(64, device), positions[part], slots[part], cache, norm, norm)
    assert torch.equal(caches[0].keys.nan_to_num(), caches[1].keys.nan_to_num())


def test_slots_beyond_two_billion_elements_are_reached(device: torch.device) -> None:
    # A CPU allocates memory when it is written; a GPU allocates all 8.6 GB.
    num_blocks = (1 << 31) // (16 * 64) + 2
    cache = allocate_kv_cache(
        num_blocks=num_blocks, block_size=16, kv_heads=1, head_dim=64, dtype=torch.float16, device=device
    )
    one = torch.randn(2, 1, 64, device=device).half()
    slots = torch.tensor([num_blocks * 16 - 1, 3], device=device)
    store_kv(one.clone(), one.clone(), one, table(64, device), torch.tensor([0, 0], device=device), slots, cache)
    assert cache.keys.numel() > 1 << 31
    for held in read_tokens(cache, torch.tensor([num_blocks - 1, 0], device=device), 32):
        assert torch.equal(held[0, 15], one[0, 0]) and torch.equal(held[0, 16 + 3], one[1, 0])
        assert not held[0, 14].any() and not held[0, 16 + 2].any()


def arguments(device: torch.device, change: dict[str, Any]) -> dict[str, Any]:
    """Return valid arguments, some of them replaced: tensors are moved, and functions get the device."""
    given: dict[str, Any] = {
        "q": torch.zeros(2, 4, 32),
        "k": torch.zeros(2, 2, 32),
        "v": torch.zeros(2, 2, 32),
        "cos_sin": table(32, device),
        "positions": torch.tensor([0, 1]),
        "slots": torch.tensor([0, 1]),
        "cache": cache_of(2, 32, torch.float32, device),
        **change,
    }
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    return {name: value(device) if callable(value) else value for name, value in moved.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 64)[..., :32]}, "q has strides .*; the heads of a token must lie side by side"),
        ({"k": torch.zeros(3, 2, 32), "v": torch.zeros(3, 2, 32)}, "k has shape"),
        ({"v": torch.zeros(2, 1, 32)}, r"v has shape \(2, 1, 32\); that of k, \(2, 2, 32\), is needed"),
        ({"v": torch.zeros(2, 2, 32).half()}, "k, v are torch.float32, torch.float16"),
        ({"k": torch.zeros(2, 2, 32).half()}, "k, v are torch.float16"),
        ({"cos_sin": torch.zeros(10, 64)}, "cos_sin is 64 wide; an even number up to the head dim 32"),
        ({"positions": torch.tensor([0, 1]).int()}, "positions is torch.int32"),
        ({"slots": torch.tensor([0, 1]).int()}, "slots is torch.int32"),
        ({"slots": torch.tensor([0])}, "slots is"),
        ({"q_norm": Norm(weight=torch.ones(31), eps=0.0)}, r"q_norm is torch.float32 \(31,\)"),
        ({"k_norm": Norm(weight=torch.ones(32).half(), eps=0.0)}, "k_norm is torch.float16"),
        (
            {"cache": lambda device: cache_of(2, 32, torch.float16, device)},
            "cache holds torch.float16, 2 heads of 32",
        ),
        (
            {"cache": lambda device: cache_of(1, 32, torch.float32, device)},
            "cache holds torch.float32, 1 heads of 32",
        ),
    ],
)
def test_invalid_arguments_are_refused_before_anything_is_written(
    change: dict[str, Any], message: str, device: torch.device
) -> None:
    given = arguments(device, change)
    with pytest.raises(ArgumentError, match=f"store_kv: {message}"):
        store_kv(**given)
    assert bool(given["cache"].keys.isnan().all())


@pytest.mark.usefixtures("checks_values")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.tensor([0, 100])}, "positions leave the table"),
        ({"positions": torch.tensor([-1, 0])}, "positions leave the table"),
        ({"slots": torch.tensor([0, 144])}, "slots leave the cache"),
        ({"slots": torch.tensor([-1, 0])}, "slots leave the cache"),
    ],
)
def test_values_out_of_range_are_refused(change: dict[str, Tensor], message: str, device: torch.device) -> None:
    with pytest.raises(Exception, match=f"store_kv: {message}"):
        store_kv(**arguments(device, change))
