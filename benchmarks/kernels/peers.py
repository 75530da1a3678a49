"""Attention kernels of other libraries, if they are installed: each a callable over the same queries, keys, values.

All get the same contexts. FlashInfer reads our own cache; torch's SDPA gets every sequence's tokens in one stretch.
Copies and plans are made before the timing. A peer that is not installed is omitted; if one rejects the shape, the row
contains the reason.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quire_kernels.kv_cache import KVCache

Peer = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """A batch of sequences with equal lengths, over a paged cache."""

    q: Tensor  # [B * Q, HQ, D]
    cache: KVCache
    block_tables: Tensor  # [B, L / S] int32
    query_len: int
    context_len: int
    scale: float

    @property
    def sequences(self) -> int:
        return len(self.block_tables)


def attention_peers(batch: Uniform) -> dict[str, Peer]:
    """Return the installed peers by name. The first call raises if a peer does not support the shape."""
    peers = {
        "SDPA cuDNN": _lazily(lambda: _sdpa(batch, SDPBackend.CUDNN_ATTENTION)),
        "SDPA flash": _lazily(lambda: _sdpa(batch, SDPBackend.FLASH_ATTENTION)),
    }
    if _flashinfer_module() is not None:
        peers["FlashInfer"] = _lazily(lambda: _flashinfer(batch))
    return peers


def _lazily(make: Callable[[], Peer]) -> Peer:
    """Return a peer that is created at the first call, which is compared and not timed."""
    made: list[Peer] = []

    def call() -> Tensor:
        if not made:
            made.append(make())
        return made[0]()

    return call


@functools.cache
def _flashinfer_module() -> ModuleType | None:
    try:
        return importlib.import_module("flashinfer")
    # A broken installation of a peer must not end the run; it counts as not installed.
    except Exception:
        return None


def versions() -> dict[str, str]:
    module = _flashinfer_module()
    return {} if module is None else {"FlashInfer": str(getattr(module, "__version__", "unknown"))}


# --- one by one ---


def _dense(batch: Uniform) -> tuple[Tensor, Tensor]:
    """Return keys and values in one stretch per sequence: [B, HK, L, D] each."""
    chosen = batch.block_tables.long().flatten()
    shape = (batch.sequences, -1, batch.cache.kv_heads, batch.cache.block_size, batch.cache.head_dim)
    dense = []
    for blocks in (batch.cache.keys, batch.cache.values):
        tokens = blocks[chosen].view(shape).transpose(1, 2).flatten(2, 3)  # [B, HK, M * S, D]
        dense.append(tokens[:, :, : batch.context_len].contiguous())
    return dense[0], dense[1]


def _sdpa(batch: Uniform, backend: SDPBackend) -> Peer:
    keys, values = _dense(batch)
    q = batch.q.view(batch.sequences, batch.query_len, *batch.q.shape[1:]).transpose(1, 2).contiguous()
    # is_causal aligns at the first token, which is right for whole prompts only; a single query sees all tokens.
    causal = batch.query_len > 1
    if causal and batch.query_len != batch.context_len:
        raise ValueError("SDPA's causal mask is for whole prompts")

    def call() -> Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(
                q, keys, values, is_causal=causal, scale=batch.scale, enable_gqa=q.shape[1] != keys.shape[1]
            )
        return out.transpose(1, 2).reshape(batch.q.shape)

    return call


def _flashinfer(batch: Uniform) -> Peer:
    import flashinfer  # type: ignore[import-not-found]

    device, cache = batch.q.device, batch.cache
    count = -(-batch.context_len // cache.block_size)
    starts = torch.arange(batch.sequences + 1, dtype=torch.int32, device=device)
    last = batch.context_len - (count - 1) * cache.block_size
    paged = {
        "indptr": starts * count,
        "indices": batch.block_tables[:, :count].flatten().contiguous(),
        "last": torch.full((batch.sequences,), last, dtype=torch.int32, device=device),
    }
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    heads, dim = batch.q.shape[1], cache.head_dim
    if batch.query_len == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(
            paged["indptr"],
            paged["indices"],
            paged["last"],
            heads,
            cache.kv_heads,
            dim,
            cache.block_size,
            q_data_type=batch.q.dtype,
            kv_data_type=cache.keys.dtype,
            sm_scale=batch.scale,
        )
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(
            starts * batch.query_len,
            paged["indptr"],
            paged["indices"],
            paged["last"],
            heads,
            cache.kv_heads,
            dim,
            cache.block_size,
            causal=True,
            q_data_type=batch.q.dtype,
            kv_data_type=cache.keys.dtype,
            sm_scale=batch.scale,
        )
    return lambda: wrapper.run(batch.q, (cache.keys, cache.values))
