"""The division of a batch into work items for paged_attention on a CPU.

Queries are divided into *tiles* of up to 16 tokens of one sequence, the context into *pieces* of 256 tokens. A tile of
a prompt visits its pieces in one item. In a sequence with few queries, as in decoding, each piece is an item, so that
one long sequence still occupies all threads. Tiles and pieces do not depend on the batch or on the number of threads,
and neither does a result.

Where AMX multiplies, a tile of a longer prompt has 32 tokens, because loading keys and values from the second-level
cache takes longer than the products. A row's result does not depend on the size of its tile.

Legend: B sequences, M blocks of the longest.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire_kernels.cpu_runtime.amx import may_use_tiles

_TILE_TOKENS = 16
_AMX_TILE_TOKENS = 32
_PIECE_TOKENS = 256
# Larger than any sequence, small enough that adding to it does not overflow.
_NO_WINDOW = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPlan:
    """A plan for attention on a CPU; see ``_plan_tiles`` for the columns."""

    num_tokens: int
    block_tables: Tensor  # [B, M]
    window: int
    chunked: bool
    piece_tokens: int
    tiles: np.ndarray  # int64 [7, tiles]
    items: np.ndarray  # int64 [3, items]
    tiles_address: int  # Every layer needs the addresses, and numpy takes a microsecond for one.
    items_address: int
    num_partials: int
    max_tile_tokens: int
    products: int  # query tokens x context tokens


def plan_attention(
    block_tables: Tensor,
    query: np.ndarray,
    context: np.ndarray,
    block_size: int,
    window: int | None,
    chunked: bool,
    workspace: None,
    deterministic: bool,
) -> CpuPlan:
    piece_tokens = max(block_size, _PIECE_TOKENS // block_size * block_size)
    reach = _NO_WINDOW if window is None else window
    tiles = _plan_tiles(query, context, piece_tokens, reach, chunked)
    pieces = tiles[5]
    # Partial results of several items add up to other bits than one item that visits all pieces.
    is_split = (pieces > 1) & (query[tiles[0]] <= _TILE_TOKENS) & (not deterministic)
    tiles[6] = np.where(is_split, pieces, 1)
    counts = tiles[6]
    tile = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
    items = np.stack((tile, tiles[4][tile] + within, np.where(is_split, 1, pieces)[tile]))
    return CpuPlan(
        num_tokens=int(query.sum()),
        block_tables=block_tables,
        window=reach,
        chunked=chunked,
        piece_tokens=piece_tokens,
        tiles=tiles,
        items=items,
        tiles_address=tiles.ctypes.data,
        items_address=items.ctypes.data,
        num_partials=len(tile) if is_split.any() else 0,
        max_tile_tokens=int(tiles[2].max()),
        products=int((query * context).sum()),
    )


def _plan_tiles(query: np.ndarray, context: np.ndarray, piece_tokens: int, reach: int, chunked: bool) -> np.ndarray:
    """Return [7, tiles], one column per tile.

    The rows are: row of the block tables, first query, queries, context up to and including the last query, first
    visible piece, visible pieces, and items (filled in by the caller).
    """
    tile_tokens = _AMX_TILE_TOKENS if may_use_tiles() else _TILE_TOKENS
    counts = -(-query // tile_tokens)
    owner = np.repeat(np.arange(len(query)), counts)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_tokens
    tokens = np.minimum(tile_tokens, query[owner] - offset)
    ends = (context - query)[owner] + offset + tokens
    first = ends - tokens
    first_seen = first // reach * reach if chunked else np.maximum(0, first + 1 - reach)
    first_piece = first_seen // piece_tokens
    pieces = (ends - 1) // piece_tokens - first_piece + 1
    first_query = (np.cumsum(query) - query)[owner] + offset
    return np.stack((owner, first_query, tokens, ends, first_piece, pieces, np.zeros_like(owner)))
