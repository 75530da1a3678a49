"""Sizes and addresses that only the Triton kernels refuse."""

import dataclasses
from typing import Any

import pytest
import torch

from quire_kernels.errors import ArgumentError
from quire_kernels.kv_cache import allocate_kv_cache
from quire_kernels.rms_norm import rms_norm
from quire_kernels.swap_blocks import swap_blocks


def test_a_row_too_wide_is_refused(device: torch.device) -> None:
    x = torch.zeros(1, (1 << 15) + 16, device=device)
    with pytest.raises(ArgumentError, match="rms_norm: x has rows of 32784; at most 32768 are taken on a GPU"):
        rms_norm(x, torch.zeros(x.shape[1], device=device), 1e-5)


def test_misaligned_caches_are_refused(device: torch.device) -> None:
    shape: dict[str, Any] = {"block_size": 16, "kv_heads": 1, "head_dim": 16, "dtype": torch.float32, "device": device}
    cache = allocate_kv_cache(num_blocks=2, **shape)
    keys = torch.zeros(cache.keys.numel() + 1, device=device)[1:].view(cache.keys.shape)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ArgumentError, match="swap_blocks: sources, targets hold tensors .* a multiple of 16 bytes"):
        swap_blocks([cache], [dataclasses.replace(cache, keys=keys)], first, first)


def test_a_cache_of_integers_is_refused(device: torch.device) -> None:
    with pytest.raises(ArgumentError, match="allocate_kv_cache: dtype is torch.int8; float32, .* or float8_e4m3fn is"):
        allocate_kv_cache(num_blocks=1, block_size=16, kv_heads=1, head_dim=32, dtype=torch.int8, device=device)
