"""The cases of paged_attention: decode, drafts to verify, chunks and whole prompts, at Llama-3.1-8B's heads.

Legend: B sequences, L context, HQ/HK query/KV heads, D head dim, S block size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.kernel_cases import Case, Prepared
from benchmarks.kernels.peers import Uniform, attention_peers
from quire_kernels.kv_cache import FP8, KVCache, allocate_kv_cache
from quire_kernels.paged_attention import paged_attention, plan_attention, reference
from quire_kernels.paged_attention.plan import allocate_workspace

_COMPARED_QUERIES = 128
"""The number of last rows of a sequence that are compared: the reference keeps every score in float32, and earlier rows
differ only in their mask."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    query_lens: Sequence[int]
    context_lens: Sequence[int]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    window: int | None = None
    fp8: bool = False

    @property
    def uniform(self) -> bool:
        return len(set(self.query_lens)) == len(set(self.context_lens)) == 1

    def visible_pairs(self) -> int:
        """Count the pairs of a query and a token that it attends to."""
        total = 0
        for query, context in zip(self.query_lens, self.context_lens, strict=True):
            seen = range(context - query + 1, context + 1)  # tokens that each query sees, itself included
            total += sum(seen) if self.window is None else sum(min(count, self.window) for count in seen)
        return total

    def tokens_read(self) -> int:
        if self.window is None:
            return sum(self.context_lens)
        lengths = zip(self.query_lens, self.context_lens, strict=True)
        return sum(min(context, query - 1 + self.window) for query, context in lengths)


def decode(sequences: int, context: int, **options: object) -> Attention:
    return Attention(query_lens=[1] * sequences, context_lens=[context] * sequences, **options)  # type: ignore[arg-type]


def prompts(sequences: int, tokens: int, context: int | None = None, **options: object) -> Attention:
    lengths = {"query_lens": [tokens] * sequences, "context_lens": [context or tokens] * sequences}
    return Attention(**lengths, **options)  # type: ignore[arg-type]


def cases() -> list[Case]:
    mixed = Attention(query_lens=[1] * 32 + [2048], context_lens=[2048] * 32 + [2048])
    return [
        _case("decode 32 x 4,096", decode(32, 4096), quick=True),
        _case("decode 128 x 4,096", decode(128, 4096)),
        _case("decode 256 x 1,024", decode(256, 1024)),
        _case("decode 1 x 4,096", decode(1, 4096), quick=True),
        _case("decode 1 x 131,072", decode(1, 131_072)),
        _case("decode 8 x 32,768", decode(8, 32_768)),
        _case("decode 32 x 4,096, blocks of 32", decode(32, 4096, block_size=32)),
        _case("decode 32 x 4,096, head dim 64", decode(32, 4096, head_dim=64)),
        _case("decode 32 x 4,096, head dim 256", decode(32, 4096, heads=16, head_dim=256)),
        _case("decode 32 x 4,096, 8 heads, no groups", decode(32, 4096, heads=8)),
        _case("decode 32 x 4,096, window 1,024", decode(32, 4096, window=1024)),
        _case("decode 32 x 4,096, float8 cache", decode(32, 4096, fp8=True)),
        _case("verify 32 x 5 at 4,096", prompts(32, 5, 4096)),
        _case("prompt 1 x 8,192", prompts(1, 8192), quick=True),
        _case("prompts 4 x 2,048", prompts(4, 2048)),
        _case("prompts 16 x 512", prompts(16, 512)),
        _case("chunk of 2,048 at 16,384", prompts(1, 2048, 16_384)),
        _case("prompt 1 x 8,192, head dim 64", prompts(1, 8192, head_dim=64)),
        _case("prompt 1 x 8,192, window 1,024", prompts(1, 8192, window=1024)),
        _case("32 x 1 at 2,048 with a prompt of 2,048", mixed),
    ]


def tiny_cases() -> list[Case]:
    small = {"heads": 4, "kv_heads": 2, "head_dim": 64}
    mixed = Attention(query_lens=[1, 5, 20], context_lens=[33, 40, 20], heads=4, kv_heads=2, head_dim=64)
    return [
        _case("decode 2 x 100", decode(2, 100, **small)),
        _case("decode 2 x 100, float8 cache", decode(2, 100, fp8=True, **small)),
        _case("prompt 1 x 40", prompts(1, 40, **small)),
        _case("mixed batch", mixed),
    ]


def _case(name: str, shape: Attention, *, quick: bool = False) -> Case:
    return Case(
        op="paged_attention", name=name, quick=quick, prepare=lambda device, dtype: prepare(shape, device, dtype)
    )


def prepare(shape: Attention, device: torch.device, dtype: torch.dtype) -> Prepared:
    cache, block_tables = filled_cache(shape, device, dtype)
    q = torch.randn(sum(shape.query_lens), shape.heads, shape.head_dim, device=device).to(dtype)
    scale = shape.head_dim**-0.5
    plan = plan_attention(
        block_tables=block_tables,
        query_lens=shape.query_lens,
        context_lens=shape.context_lens,
        block_size=shape.block_size,
        window=shape.window,
        workspace=allocate_workspace(
            max_tokens=sum(shape.query_lens), heads=shape.heads, head_dim=shape.head_dim, device=device
        ),
    )
    counts = [min(query, _COMPARED_QUERIES) for query in shape.query_lens]

    def last_queries(rows: Tensor) -> Tensor:
        parts = rows.split(list(shape.query_lens))
        return torch.cat([part[len(part) - count :] for part, count in zip(parts, counts, strict=True)])

    def expected() -> Tensor:
        return reference.paged_attention(
            last_queries(q),
            cache,
            block_tables=block_tables,
            query_lens=counts,
            context_lens=shape.context_lens,
            scale=scale,
            window=shape.window,
        )

    peers = {}
    if device.type == "cuda" and shape.uniform and not shape.fp8 and shape.window is None:
        batch = Uniform(
            q=q,
            cache=cache,
            block_tables=block_tables,
            query_len=shape.query_lens[0],
            context_len=shape.context_lens[0],
            scale=scale,
        )
        peers = attention_peers(batch)
    return Prepared(
        call=lambda: paged_attention(q, cache, plan, scale),
        compared=last_queries,
        expected=expected,
        bytes=2 * shape.tokens_read() * shape.kv_heads * shape.head_dim * cache.keys.itemsize + 2 * q.nbytes,
        flops=4 * shape.visible_pairs() * shape.heads * shape.head_dim,
        peers=peers,
    )


def filled_cache(shape: Attention, device: torch.device, dtype: torch.dtype) -> tuple[KVCache, Tensor]:
    """Return random keys and values in scattered blocks, and the block tables [B, M]."""
    counts = [-(-length // shape.block_size) for length in shape.context_lens]
    cache = allocate_kv_cache(
        num_blocks=sum(counts),
        block_size=shape.block_size,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=FP8 if shape.fp8 else dtype,
        device=device,
    )
    for blocks in (cache.keys, cache.values):
        for some in blocks.split(4096):  # float32 values of the whole cache would need more memory than the cache
            some.copy_(torch.randn(some.shape, device=device))
    scattered = torch.randperm(sum(counts), device=device, dtype=torch.int32)
    block_tables = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    for table, blocks in zip(block_tables, scattered.split(counts), strict=True):
        table[: len(blocks)] = blocks
    return cache, block_tables
