"""Causal attention of a mixed batch over a paged KV cache: decode, prompt chunks, and draft verification in one call.

Every sequence has its last ``query_len`` tokens as queries. The keys and values of all its ``context_len`` tokens,
including those queries, are already in the cache. ``plan_attention`` computes once per step what depends only on the
batch; every layer uses the plan.

Legend: T query tokens, B sequences, HQ/HK query/KV heads, D head dim, S block size, M blocks per sequence.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire_kernels.checks import STORAGE_DTYPES, check_dense, check_device, check_storage, refuse
from quire_kernels.dispatch import implementation, runs_triton
from quire_kernels.kv_cache import FP8, VECTOR, KVCache
from quire_kernels.paged_attention.plan import Workspace, unsupported_shape


class AttentionPlan(Protocol):
    """The facts about a batch that ``paged_attention`` needs, prepared for one device by ``plan_attention``."""

    @property
    def num_tokens(self) -> int: ...


def plan_attention(
    *,
    block_tables: Tensor,
    query_lens: Sequence[int] | np.ndarray,
    context_lens: Sequence[int] | np.ndarray,
    block_size: int,
    window: int | None = None,
    chunked: bool = False,
    workspace: Workspace | None = None,
    deterministic: bool = False,
) -> AttentionPlan:
    """Return the plan of one step's attention.

    block_tables  [B, M] int32, contiguous: block i of a sequence holds its tokens i * S and on
    query_lens    [B] tokens of each sequence in this step, at least 1; their queries are in this order
    context_lens  [B] tokens of each sequence, including those
    window        tokens that a query sees, including itself; None means all
    chunked       the window does not slide: a query sees its own chunk of ``window`` positions only; not for Triton
    workspace     for Triton: memory that steps share; None gives the plan its own
    deterministic a token's result depends neither on the batch nor on how its sequence is cut into steps, bit for bit;
                  needs a workspace of fixed splits on Triton

    Raise ArgumentError for lengths that are inconsistent or exceed the block tables.
    """
    op = "plan_attention"
    if block_tables.dtype != torch.int32 or block_tables.dim() != 2 or not block_tables.is_contiguous():
        found = f"{block_tables.dtype} {tuple(block_tables.shape)} with strides {tuple(block_tables.stride())}"
        refuse(op, "block_tables", f"is {found}; contiguous int32 [sequences, blocks] is needed")
    sequences, width = block_tables.shape
    query, context = np.asarray(query_lens, dtype=np.int64), np.asarray(context_lens, dtype=np.int64)  # [B], [B]
    if not len(query) == len(context) == sequences or sequences == 0:
        refuse(op, "query_lens, context_lens", f"count {len(query)}, {len(context)}; block_tables has {sequences} rows")
    if window is not None and window < 1:
        refuse(op, "window", f"is {window}; at least 1 token is needed")
    if chunked and (window is None or runs_triton(block_tables.device.type)):
        refuse(op, "chunked", "is set; a window and a CPU are needed")
    if (wrong := (query < 1) | (query > context)).any():
        i = int(wrong.argmax())
        refuse(op, "query_lens", f"has {query[i]} at sequence {i}; 1 to its context length {context[i]} is needed")
    if (wrong := context > width * block_size).any():
        i = int(wrong.argmax())
        refuse(op, "context_lens", f"has {context[i]} at sequence {i}; {width} blocks of {block_size} hold fewer")
    if workspace is not None:
        if not runs_triton(block_tables.device.type):
            refuse(op, "workspace", "is given; attention on a CPU has none")
        check_device(op, block_tables, workspace=workspace.buffer)
    return implementation("paged_attention", block_tables.device.type).plan_attention(
        block_tables, query, context, block_size, window, chunked, workspace, deterministic
    )


def unsupported(
    *,
    device_type: str,
    head_dim: int,
    group: int,
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    chunked: bool = False,
) -> str | None:
    """Return why ``paged_attention`` does not support such layers on such a device, or None.

    group    query heads per KV head
    chunked  windows do not slide
    """
    on_triton = runs_triton(device_type)
    if dtype not in STORAGE_DTYPES:
        return f"dtype {dtype}: float32, bfloat16 or float16 is needed"
    if cache_dtype != dtype and not (on_triton and cache_dtype == FP8):
        return f"KV cache dtype {cache_dtype}: {dtype}{', or float8_e4m3fn,' * on_triton} is needed on {device_type}"
    if block_size < 1 or block_size % VECTOR:
        return f"block size {block_size}: a multiple of {VECTOR} is needed"
    if chunked and on_triton:
        return "attention in chunks: a CPU, or sequences of at most one chunk (--max-model-len), are needed"
    return unsupported_shape(head_dim, group) if on_triton else None


def paged_attention(
    q: Tensor,
    cache: KVCache,
    plan: AttentionPlan,
    scale: float,
    soft_cap: float | None = None,
    *,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute softmax(scale * q k^T) v over each query's visible tokens; query head h uses KV head h // (HQ / HK).

    q            [T, HQ, D]; a token's heads are dense, tokens at any stride
    cache        the layer's cache, of the same dtype or, for Triton, of float8, holding the T tokens already
    scale        above 0
    soft_cap     bounds the scores before the softmax: s becomes soft_cap tanh(s / soft_cap); above 0
    sinks        [HQ] a score of each head that no token has, weighed with the others (arXiv 2309.17453, as a parameter)
    out          [T, HQ, D] contiguous, to be written; a new one unless given
    returns      out, dtype of q; 0 for rows of padding

    Sums are in float32. The result of a sequence with one query does not depend on the rest of the batch, bit for bit.
    That of another sequence does, in its last bits and on Triton only, if the batch has more partial results than the
    workspace has room for; a deterministic plan excludes this. Raise ArgumentError on other shapes, strides, dtypes, or
    a block table that leaves the cache.
    """
    op = "paged_attention"
    check_storage(op, "q", q)
    if q.dim() != 3 or q.shape[0] != plan.num_tokens or q.shape[2] != cache.head_dim:
        refuse(op, "q", f"has shape {tuple(q.shape)}; [{plan.num_tokens}, heads, {cache.head_dim}] is needed")
    if q.stride(1) != q.shape[2] and q.shape[1] != 1:
        refuse(op, "q", f"has strides {tuple(q.stride())}; the heads of a token must lie side by side")
    if q.shape[1] % cache.kv_heads:
        refuse(op, "q", f"has {q.shape[1]} heads; a multiple of the {cache.kv_heads} KV heads is needed")
    if cache.keys.dtype != q.dtype and (cache.keys.dtype != FP8 or not runs_triton(q.device.type)):
        refuse(op, "cache", f"holds {cache.keys.dtype}; the dtype of q, {q.dtype}, is needed")
    if not scale > 0.0:
        refuse(op, "scale", f"is {scale}; a number above 0 is needed")
    if soft_cap is not None and not soft_cap > 0.0:
        refuse(op, "soft_cap", f"is {soft_cap}; a number above 0 is needed")
    if sinks is not None:
        check_storage(op, "sinks", sinks)
        check_dense(op, "sinks", sinks, sinks.dtype, (q.shape[1],))
    if out is not None:
        check_dense(op, "out", out, q.dtype, tuple(q.shape))
    check_device(op, q, cache=cache.keys, sinks=sinks, out=out)
    return implementation(op, q.device.type).paged_attention(q, cache, plan, scale, soft_cap, sinks, out)
