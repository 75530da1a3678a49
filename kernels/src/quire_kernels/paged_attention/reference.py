"""paged_attention in plain torch, one sequence at a time: the reference for every implementation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_kernels.kv_cache import KVCache, read_tokens


def paged_attention(
    q: Tensor,
    cache: KVCache,
    *,
    block_tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention like the op; values of a float8 cache are multiplied by its scales."""
    outputs = []
    group = q.shape[1] // cache.kv_heads
    starts = q.split(list(query_lens))  # B x [Q, HQ, D]
    for queries, blocks, context_len in zip(starts, block_tables, context_lens, strict=True):
        keys, values = read_tokens(cache, blocks, context_len)  # [HK, L, D] each
        keys, values = (x.float().repeat_interleave(group, dim=0) for x in (keys, values))  # [HQ, L, D]
        scores = torch.einsum("qhd,hld->hql", queries.float(), keys) * scale
        if soft_cap is not None:
            scores = (scores / soft_cap).tanh() * soft_cap
        hidden = ~visible(len(queries), context_len, window, chunked=chunked).to(q.device)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            # One more score without a value.
            column = sinks.float()[:, None, None].expand(-1, len(queries), 1)
            scores = torch.cat((scores, column), dim=-1)  # [HQ, Q, L + 1]
        weights = scores.softmax(dim=-1)[..., :context_len]
        outputs.append(torch.einsum("hql,hld->qhd", weights, values).to(q.dtype))
    return torch.cat(outputs)


def visible(query_len: int, context_len: int, window: int | None, *, chunked: bool = False) -> Tensor:
    """Return [Q, L] bool: whether a query (the last Q of L tokens) sees a token."""
    position = torch.arange(context_len - query_len, context_len).unsqueeze(1)  # [Q, 1]
    token = torch.arange(context_len).unsqueeze(0)  # [1, L]
    seen = token <= position
    if window is None:
        return seen
    return seen & (token >= position // window * window if chunked else token > position - window)
