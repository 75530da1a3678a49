"""Attention kernels of other libraries, if they are installed: each a callable over the same queries, keys, values.

All get the same contexts. FlashInfer reads our own cache; vLLM needs tokens before heads and gets a copy; torch's SDPA
and FlashAttention get every sequence's tokens in one stretch. Copies and plans are made before the timing. A peer that
is not installed is omitted; if one rejects the shape, the row contains the reason.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quire_kernels.kv_cache import KVCache

Peer = Callable[[], Tensor]
_VLLM_MODULES = ("vllm.v1.attention.ops.triton_unified_attention", "vllm.attention.ops.triton_unified_attention")
_VLLM_SEGMENTS = 16
_VLLM_LEAST_PROGRAMS = 128


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
    makers = {
        "SDPA cuDNN": lambda: _sdpa(batch, SDPBackend.CUDNN_ATTENTION),
        "SDPA flash": lambda: _sdpa(batch, SDPBackend.FLASH_ATTENTION),
        "FlashAttention": lambda: _flash_attention(batch),
        "FlashInfer": lambda: _flashinfer(batch),
        "vLLM Triton": lambda: _vllm(batch),
    }
    return {
        name: _lazily(make) for name, make in makers.items() if name.startswith("SDPA") or _module(name) is not None
    }


def _lazily(make: Callable[[], Peer]) -> Peer:
    """Return a peer that is created at the first call, which is compared and not timed."""
    made: list[Peer] = []

    def call() -> Tensor:
        if not made:
            made.append(make())
        return made[0]()

    return call


@functools.cache
def _module(name: str) -> ModuleType | None:
    candidates = {
        "FlashAttention": ("flash_attn",),
        "FlashInfer": ("flashinfer",),
        "vLLM Triton": _VLLM_MODULES,
    }[name]
    for candidate in candidates:
        try:
            return importlib.import_module(candidate)
        # A broken installation of a peer must not end the run; it counts as not installed.
        except Exception:
            continue
    return None


def versions() -> dict[str, str]:
    """Return the versions of the installed peers."""
    found = {}
    for name in ("FlashAttention", "FlashInfer", "vLLM Triton"):
        if (module := _module(name)) is not None:
            package = importlib.import_module(module.__name__.partition(".")[0])
            found[name] = str(getattr(package, "__version__", "unknown"))
    return found


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


def _flash_attention(batch: Uniform) -> Peer:
    from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found]

    keys, values = (x.transpose(1, 2).contiguous() for x in _dense(batch))  # [B, L, HK, D]
    q = batch.q.view(batch.sequences, batch.query_len, *batch.q.shape[1:])
    lengths = torch.full((batch.sequences,), batch.context_len, dtype=torch.int32, device=q.device)

    def call() -> Tensor:
        out = flash_attn_with_kvcache(q, keys, values, cache_seqlens=lengths, softmax_scale=batch.scale, causal=True)
        return out.view(batch.q.shape)

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


def _vllm(batch: Uniform) -> Peer:
    module = _module("vLLM Triton")
    assert module is not None, "asked for only where it is installed"
    unified_attention = module.unified_attention
    device, heads, dim = batch.q.device, batch.q.shape[1], batch.cache.head_dim
    keys, values = (x.transpose(1, 2).contiguous() for x in (batch.cache.keys, batch.cache.values))  # [N, S, HK, D]
    out = torch.empty_like(batch.q)
    arguments: dict[str, object] = {
        "q": batch.q,
        "k": keys,
        "v": values,
        "out": out,
        "cu_seqlens_q": torch.arange(batch.sequences + 1, dtype=torch.int32, device=device) * batch.query_len,
        "max_seqlen_q": batch.query_len,
        "seqused_k": torch.full((batch.sequences,), batch.context_len, dtype=torch.int32, device=device),
        "max_seqlen_k": batch.context_len,
        "softmax_scale": batch.scale,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": batch.block_tables,
        "softcap": 0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
    }
    # Newer versions split long contexts only if they get the memory for it, as vLLM's backend does.
    if "softmax_segm_output" in inspect.signature(unified_attention).parameters:
        threshold = _VLLM_LEAST_PROGRAMS // batch.cache.kv_heads
        padded = 1 << (dim - 1).bit_length()
        shape = (threshold, heads, _VLLM_SEGMENTS)
        arguments |= {
            "seq_threshold_3D": threshold,
            "num_par_softmax_segments": _VLLM_SEGMENTS,
            "softmax_segm_output": torch.empty((*shape, padded), dtype=torch.float32, device=device),
            "softmax_segm_max": torch.empty(shape, dtype=torch.float32, device=device),
            "softmax_segm_expsum": torch.empty(shape, dtype=torch.float32, device=device),
        }

    def call() -> Tensor:
        unified_attention(**arguments)
        return out

    return call
