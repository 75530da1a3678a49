"""Fixtures of the kernel tests: random tensors with poisoned gaps, tolerances by dtype, a filled paged cache."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import pytest
import torch
from torch import Tensor

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.kv_cache import KVCache, allocate_kv_cache, write_tokens

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


# Triton's interpreter computes bfloat16 as if its bits were integers, which is silently wrong.
@pytest.fixture(
    params=[torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(params=[1] if INTERPRETED else [1, 2], ids=lambda count: f"{count}-threads")
def threads(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    request.addfinalizer(lambda: torch.set_num_threads(before))
    return count


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(20250711)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN or a huge number, which shows reads before a write."""
    empty = torch.empty

    def poisoned_empty(*shape: object, **options: object) -> Tensor:
        made: Tensor = empty(*shape, **options)  # type: ignore[call-overload]
        return made.fill_(torch.nan if made.is_floating_point() else torch.iinfo(made.dtype).max // 3)

    monkeypatch.setattr(torch, "empty", poisoned_empty)


@pytest.fixture
def assert_close() -> Callable[[Tensor, Tensor], None]:
    def check(found: Tensor, expected: Tensor) -> None:
        tolerance = TOLERANCES[expected.dtype]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)

    return check


@pytest.fixture
def strided(device: torch.device) -> Callable[..., Tensor]:
    """Return a factory of random tensors with NaN between their rows, which shows an op that reads a gap."""

    def make(rows: int, *inner: int, dtype: torch.dtype, gap: int = 5) -> Tensor:
        width = prod(inner)
        wide = torch.full((rows, width + gap), torch.nan)
        wide[:, :width] = torch.randn(rows, width)
        return wide.to(dtype).to(device)[:, :width].unflatten(1, inner)

    return make


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledCache:
    """A cache with the context of some sequences; all other slots are NaN."""

    cache: KVCache
    block_tables: Tensor


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


@pytest.fixture
def fill_cache(device: torch.device) -> Callable[..., FilledCache]:
    def make(
        context_lens: list[int], *, kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int = 16
    ) -> FilledCache:
        counts = [-(-length // block_size) for length in context_lens]
        num_blocks = sum(counts) + 2
        cache = allocate_kv_cache(
            num_blocks=num_blocks,
            block_size=block_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
        )
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
        shuffled = iter(torch.randperm(num_blocks).tolist())
        tables = torch.full((len(counts), max(counts)), num_blocks + 1000, dtype=torch.int32)
        for table, count, length in zip(tables, counts, context_lens, strict=True):
            table[:count] = torch.tensor([next(shuffled) for _ in range(count)])
            places = torch.arange(length)
            slots = table[places // block_size].long() * block_size + places % block_size
            keys, values = torch.randn(2, length, kv_heads, head_dim).to(dtype).to(device)
            write_tokens(cache, slots.to(device), keys, values)
        return FilledCache(cache=cache, block_tables=tables.to(device))

    return make
