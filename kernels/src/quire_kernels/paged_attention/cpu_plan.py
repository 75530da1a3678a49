"""The division of a batch into work items for paged_attention on a CPU.

Queries are divided into *tiles* of up to 16 tokens of one sequence, the context into *pieces* of 256 tokens. A tile of
a prompt visits its pieces in one item. In a sequence with few queries, as in decoding, each piece is an item, so that
one long sequence still occupies all threads. Tiles and pieces do not depend on the batch or on the number of threads,
and neither does a result.

Where AMX multiplies, a tile of a longer prompt has 32 tokens, because loading keys and values from the second-level
cache takes longer than the products. A row's result does not depend on the size of its tile.

Legend: B sequences, M blocks of the longest.
"""

import sys
from copy import copy

import numpy as np
import torch
from torch import Tensor

from quire_kernels.cpu_runtime.amx import may_use_tiles

_TILE_TOKENS = 16
_AMX_TILE_TOKENS = 32
_PIECE_TOKENS = 256
# Larger than any sequence, small enough that adding to it does not overflow.
_NO_WINDOW = 1 << 40


PLAN_NUMBERS = 13
"""The numbers of a plan that the kernel reads: address and width of the block tables, address and number of the tiles
and of the items, tokens of a piece, most tokens of a tile, window, whether it is chunked, addresses of the partial
results and of the counters of finished items, and threads."""
TILES_AT, NUM_TILES = 2, 3
"""The places of the address and the number of the tiles among these."""
_PIECE, _PARTIALS, _FINISHED, _THREADS = 6, 10, 11, 12
ENDS_ROW = 3
"""The row of the tiles that contains the context up to and including the last query."""
_SPARE = 1.5
"""The factor by which shared memory for partial results exceeds what the step at hand needs: contexts grow."""


class PartialResults:
    """Memory for partial results that the plans of recorded steps share, because steps never run at once."""

    def __init__(self, *, spare: float = _SPARE) -> None:
        self._spare = spare
        self._memory = torch.empty(0)

    def reserve(self, floats: int) -> int:
        """Return the address of at least so many numbers; it is valid until more are reserved."""
        if floats > self._memory.numel():
            self._memory = torch.empty(round(self._spare * floats))
        return self._memory.data_ptr()


class CpuPlan:
    """A plan for attention on a CPU; its numbers ``become`` those of later steps for launches that were recorded."""

    __slots__ = (
        "_finished",
        "_kept",
        "_kv_heads",
        "_least_products",
        "_numbers",
        "_partial_floats",
        "_partial_tokens",
        "_partials",
        "num_items",
        "num_tokens",
        "numbers_address",
        "products",
        "threads_address",
    )

    def __init__(
        self,
        *,
        block_tables: Tensor,
        tiles: np.ndarray,
        items: np.ndarray,
        num_tokens: int,
        products: int,
        num_partials: int,
        piece_tokens: int,
        window: int,
        chunked: bool,
    ) -> None:
        """Prepare the numbers.

        block_tables  [B, M] int32
        tiles, items  int64 [7, tiles] and [3, items]; see ``_plan_tiles`` and ``plan_attention``
        products      query tokens times context tokens
        """
        self._kept = (block_tables, tiles, items)
        self.num_tokens, self.num_items, self.products = num_tokens, items.shape[1], products
        tile_tokens = int(tiles[2].max())
        self._partial_tokens = num_partials * tile_tokens
        addresses = (block_tables.data_ptr(), block_tables.shape[1], tiles.ctypes.data, tiles.shape[1])
        rest = (items.ctypes.data, items.shape[1], piece_tokens, tile_tokens, window, int(chunked), 0, 0, 1)
        self._numbers = np.array(addresses + rest, dtype=np.int64)
        self._note_addresses()
        self._partials, self._finished = PartialResults(spare=1.0), np.zeros(0, dtype=np.int64)
        self._partial_floats, self._kv_heads, self._least_products = 0, 0, sys.maxsize

    def _note_addresses(self) -> None:
        # Every layer needs them, and numpy takes a microsecond for one.
        self.numbers_address = self._numbers.ctypes.data
        self.threads_address = self.numbers_address + 8 * _THREADS

    def for_recording(self, partials: PartialResults) -> "CpuPlan":
        """Return a copy that will ``become`` the plans of later steps, with partial results in shared memory."""
        own = copy(self)
        own._numbers, own._finished = self._numbers.copy(), self._finished.copy()
        own._note_addresses()
        own._partials, own._partial_floats, own._kv_heads, own._least_products = partials, 0, 0, sys.maxsize
        return own

    def prepare(self, *, kv_heads: int, partial_floats: int, least_products: int) -> bool:
        """Reserve what a layer needs, and return whether it is worth several threads.

        partial_floats  numbers of the partial result of one token
        least_products  the least ``products`` that are worth it

        The layers of a step run one after the other, and share the memory.
        """
        if partial_floats > self._partial_floats or kv_heads > self._kv_heads:
            self._partial_floats = max(self._partial_floats, partial_floats)
            self._kv_heads = max(self._kv_heads, kv_heads)
            self._reserve()
        self._least_products = min(self._least_products, least_products)
        return self.products >= least_products

    @property
    def lasts(self) -> int:
        """The most passes for which the plan is right if each sequence has one token more in each of them.

        Then only the contexts of its tiles change: ``ENDS_ROW``.
        """
        piece_tokens, ends = int(self._numbers[_PIECE]), self._kept[1][ENDS_ROW]
        return piece_tokens - int(((ends - 1) % piece_tokens).max())

    def become(self, other: "CpuPlan") -> None:
        """Take the numbers of another plan with as many tokens: launches that were recorded with this one use them."""
        assert self.num_tokens == other.num_tokens, "a recording is for one number of tokens"
        self._kept, self.num_items, self.products = other._kept, other.num_items, other.products
        self._partial_tokens = other._partial_tokens
        self._numbers[:_PARTIALS] = other._numbers[:_PARTIALS]
        self._finished[:] = 0  # a step that failed leaves some between zero and their end
        self._reserve()
        threads = min(torch.get_num_threads(), self.num_items * self._kv_heads)
        self._numbers[_THREADS] = threads if self.products >= self._least_products else 1

    def _reserve(self) -> None:
        if not self._partial_tokens:
            return
        counters = self._kept[1].shape[1] * self._kv_heads
        if counters > len(self._finished):
            self._finished = np.zeros(counters, dtype=np.int64)
            self._numbers[_FINISHED] = self._finished.ctypes.data
        self._numbers[_PARTIALS] = self._partials.reserve(self._partial_tokens * self._partial_floats)


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
    # Partial results of several items add up to other bits than one item that visits all pieces.
    is_split = np.zeros(0, dtype=np.bool_) if deterministic else (tiles[5] > 1) & (query[tiles[0]] <= _TILE_TOKENS)
    if is_split.any():
        items, num_partials = _plan_items(tiles, is_split)
    else:
        items, num_partials = np.stack((np.arange(tiles.shape[1]), tiles[4], tiles[5])), 0
    return CpuPlan(
        block_tables=block_tables,
        tiles=tiles,
        items=items,
        num_tokens=int(query.sum()),
        products=int((query * context).sum()),
        num_partials=num_partials,
        piece_tokens=piece_tokens,
        window=reach,
        chunked=chunked,
    )


def _plan_tiles(query: np.ndarray, context: np.ndarray, piece_tokens: int, reach: int, chunked: bool) -> np.ndarray:
    """Return [7, tiles], one column per tile.

    The rows are: row of the block tables, first query, queries, context up to and including the last query, first
    visible piece, visible pieces, and items (1 unless ``_plan_items`` divides the tile).
    """
    tile_tokens = _AMX_TILE_TOKENS if may_use_tiles() else _TILE_TOKENS
    first_query, tokens, ends = np.cumsum(query) - query, query, context
    owner = np.arange(len(query))
    if query.max() > tile_tokens:
        counts = -(-query // tile_tokens)
        owner = np.repeat(owner, counts)
        offset = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_tokens
        tokens = np.minimum(tile_tokens, query[owner] - offset)
        ends = (context - query)[owner] + offset + tokens
        first_query = first_query[owner] + offset
    first = ends - tokens
    first_seen = first // reach * reach if chunked else np.maximum(0, first + 1 - reach)
    first_piece = first_seen // piece_tokens
    pieces = (ends - 1) // piece_tokens - first_piece + 1
    return np.stack((owner, first_query, tokens, ends, first_piece, pieces, np.ones_like(owner)))


def _plan_items(tiles: np.ndarray, is_split: np.ndarray) -> tuple[np.ndarray, int]:
    """Divide some tiles into an item per piece; return the items [3, items] of all, and their number.

    The rows are: tile, first piece, pieces.
    """
    pieces = tiles[5]
    tiles[6] = counts = np.where(is_split, pieces, 1)
    tile = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack((tile, tiles[4][tile] + within, np.where(is_split, 1, pieces)[tile])), len(tile)
