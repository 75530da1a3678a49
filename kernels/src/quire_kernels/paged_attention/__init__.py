"""Causal attention of a mixed batch over a paged KV cache: decode, chunks of prompts, drafts to verify, in one call.

Every sequence brings its last ``query_len`` tokens as queries; keys and values of all its ``context_len`` tokens, those
queries included, are in the cache already. What depends only on the batch is worked out once per step by
``plan_attention`` and used by every layer.

Legend: T query tokens, B sequences, HQ/HK query/KV heads, D head dim, S block size, M blocks per sequence.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire_kernels.checks import check_storage, refuse
from quire_kernels.dispatch import implementation
from quire_kernels.kv_cache import KVCache


class AttentionPlan(Protocol):
    """What ``paged_attention`` needs to know of a batch; made by ``plan_attention``, in the form its device wants."""

    @property
    def num_tokens(self) -> int: ...


def plan_attention(
    *,
    block_tables: Tensor,
    query_lens: Sequence[int] | np.ndarray,
    context_lens: Sequence[int] | np.ndarray,
    block_size: int,
    window: int | None = None,
) -> AttentionPlan:
    """Plans one step's attention.

    block_tables  [B, M] int32, contiguous: block i of a sequence holds its tokens i * S and on
    query_lens    [B] tokens that each sequence brings now, at least 1; their queries lie one after another
    context_lens  [B] tokens of each sequence, those included
    window        tokens a query may look back on, itself included; None is all

    Raises ArgumentError for lengths that do not fit together or into the block tables.
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
    if (wrong := (query < 1) | (query > context)).any():
        i = int(wrong.argmax())
        refuse(op, "query_lens", f"has {query[i]} at sequence {i}; 1 to its context length {context[i]} is needed")
    if (wrong := context > width * block_size).any():
        i = int(wrong.argmax())
        refuse(op, "context_lens", f"has {context[i]} at sequence {i}; {width} blocks of {block_size} hold fewer")
    return implementation("paged_attention", block_tables.device.type).plan_attention(
        block_tables, query, context, block_size, window
    )


def paged_attention(
    q: Tensor, cache: KVCache, plan: AttentionPlan, scale: float, soft_cap: float | None = None
) -> Tensor:
    """softmax(scale * q k^T) v over each query's visible tokens, query head h reading KV head h // (HQ / HK).

    q        [T, HQ, D]; a token's heads are dense, tokens at any stride
    cache    the layer's cache, of the same dtype, holding the T tokens already
    soft_cap bounds the scores, s to soft_cap tanh(s / soft_cap), before they are weighed; above 0
    returns  [T, HQ, D], new and contiguous, dtype of q

    Accumulated in float32. A row's result does not depend on the rest of the batch. Raises ArgumentError on other
    shapes, strides, dtypes, or a block table that leaves the cache.
    """
    op = "paged_attention"
    check_storage(op, "q", q)
    if q.dim() != 3 or q.shape[0] != plan.num_tokens or q.shape[2] != cache.head_dim:
        refuse(op, "q", f"has shape {tuple(q.shape)}; [{plan.num_tokens}, heads, {cache.head_dim}] is needed")
    if q.stride(1) != q.shape[2] and q.shape[1] != 1:
        refuse(op, "q", f"has strides {tuple(q.stride())}; the heads of a token must lie side by side")
    if q.shape[1] % cache.kv_heads:
        refuse(op, "q", f"has {q.shape[1]} heads; a multiple of the {cache.kv_heads} KV heads is needed")
    if cache.keys.dtype != q.dtype:
        refuse(op, "cache", f"holds {cache.keys.dtype}; the dtype of q, {q.dtype}, is needed")
    if soft_cap is not None and not soft_cap > 0.0:
        refuse(op, "soft_cap", f"is {soft_cap}; a number above 0 is needed")
    return implementation("paged_attention", q.device.type).paged_attention(q, cache, plan, scale, soft_cap)
