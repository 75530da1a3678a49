"""The Triton kernels run in this process, on any device."""

import torch

from quire_kernels.dispatch import runs_triton
from quire_kernels.kv_cache import allocate_kv_cache


def test_this_process_runs_the_triton_kernels(device: torch.device) -> None:
    assert runs_triton(device.type)


def test_the_cache_is_laid_out_for_them(device: torch.device) -> None:
    cache = allocate_kv_cache(num_blocks=2, block_size=16, kv_heads=3, head_dim=80, dtype=torch.float16, device=device)
    assert cache.keys.shape == cache.values.shape == (2, 3, 16, 80) and not cache.keys_transposed
