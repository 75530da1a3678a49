"""The time of attention in a dtype, for the choice among dtypes whose linear layers are similarly fast.

Legend: T query tokens, HQ/HK query/KV heads, D head dim.
"""

import time

import torch

from quire_engine.model.linear.selection import ROWS
from quire_engine.model.linear.timing import least_milliseconds, one_thread
from quire_engine.model.shape import ModelShape
from quire_kernels.kv_cache import allocate_kv_cache
from quire_kernels.paged_attention import paged_attention, plan_attention

_BLOCK = 16
_CONTEXT = 512
"""The number of tokens that a decoding sequence sees."""


@torch.inference_mode()
def time_attention(shape: ModelShape, dtype: torch.dtype) -> tuple[float, ...]:
    """Return the milliseconds of one thread that a layer's attention takes for each of ``ROWS``.

    All but the last are sequences that decode; the last is a prompt.
    """
    with one_thread():
        decoding = [_time(shape, dtype, [1] * rows, [_CONTEXT] * rows) for rows in ROWS[:-1]]
        return (*decoding, _time(shape, dtype, [ROWS[-1]], [ROWS[-1]]))


def _time(shape: ModelShape, dtype: torch.dtype, query_lens: list[int], context_lens: list[int]) -> float:
    blocks = -(-max(context_lens) // _BLOCK)
    cache = allocate_kv_cache(
        num_blocks=blocks * len(query_lens),
        kv_heads=shape.num_kv_heads,
        block_size=_BLOCK,
        head_dim=shape.head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    cache.keys.fill_(0.01)
    cache.values.fill_(0.01)
    plan = plan_attention(
        block_tables=torch.arange(blocks * len(query_lens), dtype=torch.int32).view(len(query_lens), blocks),
        query_lens=query_lens,
        context_lens=context_lens,
        block_size=_BLOCK,
    )
    q = torch.full((sum(query_lens), shape.num_heads, shape.head_dim), 0.01, dtype=dtype)  # [T, HQ, D]
    return least_milliseconds(lambda: _attend(q, cache, plan), time.thread_time)


def _attend(q: torch.Tensor, cache: object, plan: object) -> None:
    paged_attention(q, cache, plan, 0.1)  # type: ignore[arg-type]
