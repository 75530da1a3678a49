"""The Triton kernel that plans the attention of one step for all layers of one shape.

Its grid has one program per sequence. Each reads all lengths, decides for every sequence how its context is split, and
writes the items of its own. ``schedule.py`` has the same decisions as plain functions, with their reasons, and the
layout of the result.

Legend: B sequences, C capacity of a list, P partial results for which there is room.
"""

import triton
import triton.language as tl

from quire_kernels.paged_attention.device_functions import first_seen
from quire_kernels.paged_attention.schedule import (
    COUNTS_AT,
    ITEM_FIELDS,
    JOIN_FIELDS,
    LISTS_AT,
    RULE_FIELDS,
    RULES_AT,
    ZERO_AT,
)
from quire_kernels.triton_runtime.debug import CHECKED

COUNTS = tl.constexpr(COUNTS_AT)
ZERO = tl.constexpr(ZERO_AT)
RULES = tl.constexpr(RULES_AT)
LISTS = tl.constexpr(LISTS_AT)
RULE_WIDTH = tl.constexpr(RULE_FIELDS)
ITEM_WIDTH = tl.constexpr(ITEM_FIELDS)
JOIN_WIDTH = tl.constexpr(JOIN_FIELDS)


@triton.jit
def lengths_of(query_starts, context_lens, rows, num_sequences):
    """Return the queries and the context of sequences; 0 beyond the last one."""
    there = rows < num_sequences
    query_lens = tl.load(query_starts + rows + 1, mask=there, other=0)
    query_lens -= tl.load(query_starts + rows, mask=there, other=0)
    return query_lens, tl.load(context_lens + rows, mask=there, other=0)


@triton.jit
def split_sequences(query_lens, context_lens, schedule, window, room, SHORT: tl.constexpr, FIXED: tl.constexpr):
    """Return the list of each sequence, its query tiles, visible tokens, tokens per split, splits, and partial results.

    The arguments are scalars or vectors. The decisions are those of ``schedule.split_sequence``.
    """
    kinds = (query_lens > 1).to(tl.int32) + (query_lens > SHORT).to(tl.int32)
    if FIXED:
        kinds = kinds * 0
    rule = schedule + RULES + kinds * RULE_WIDTH
    tile, queries, fill, least = tl.load(rule), tl.load(rule + 1), tl.load(rule + 2), tl.load(rule + 3)
    tiles = (query_lens + queries - 1) // queries
    if FIXED:
        first = first_seen(context_lens - query_lens, window)
        seen = context_lens - first // least * least
        sizes = least
    else:
        seen = context_lens
        if window is not None:
            seen = tl.minimum(seen, window + tl.minimum(query_lens, queries) + tile)
        most = tl.minimum(tl.maximum(fill // tl.maximum(tiles, 1), 1), tl.load(rule + 4))
        splits = tl.maximum(tl.minimum((seen + least - 1) // least, most), 1)
        sizes = tl.maximum(((seen + splits - 1) // splits + tile - 1) // tile, 1) * tile
    splits = tl.maximum((seen + sizes - 1) // sizes, 1)
    wanted = query_lens * splits
    wanted = tl.where((splits > 1) & (tiles < tl.maximum(fill, 2)) & (wanted <= room), wanted, 0)
    return kinds, tiles, seen, sizes, splits, wanted


@triton.jit(debug=CHECKED, do_not_specialize=["num_sequences", "window", "capacity", "room"])
def _plan_kernel(
    schedule,
    query_starts,  # [B + 1]
    context_lens,  # [B]
    num_sequences,
    window,
    capacity,
    room,
    SHORT: tl.constexpr,
    FIXED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Write the schedule of one step.

    capacity  C
    room      P; sequences get theirs in the order of the batch, those of one query first. One that gets none is not
              divided among items
    """
    own = tl.program_id(0)
    own_queries, own_context = lengths_of(query_starts, context_lens, own, num_sequences)
    own_kind, own_tiles, own_seen, own_size, own_splits, own_wanted = split_sequences(
        own_queries, own_context, schedule, window, room, SHORT, FIXED
    )
    decoding = tl.full((), 0, tl.int32)  # partial results that all sequences of one query want
    base = tl.full((), 0, tl.int32)
    for start in tl.range(0, num_sequences, BLOCK_B, num_stages=1):
        rows = start + tl.arange(0, BLOCK_B)
        queries, contexts = lengths_of(query_starts, context_lens, rows, num_sequences)
        wanted = split_sequences(queries, contexts, schedule, window, room, SHORT, FIXED)[5]
        decoding += tl.sum(tl.where(queries == 1, wanted, 0), 0)
        base += tl.sum(tl.where(((queries == 1) == (own_queries == 1)) & (rows < own), wanted, 0), 0)
    base += tl.where(own_queries == 1, 0, decoding)
    is_split = (own_wanted > 0) & (base + own_wanted <= room)
    own_length = tl.where(is_split, own_size, own_seen)

    place = tl.full((), 0, tl.int32)
    join_place = tl.full((), 0, tl.int32)
    decoding_before = tl.full((), 0, tl.int32)
    others_before = tl.full((), 0, tl.int32)
    ones = tl.full((), 0, tl.int32)
    shorts = tl.full((), 0, tl.int32)
    longs = tl.full((), 0, tl.int32)
    joins = tl.full((), 0, tl.int32)
    for start in tl.range(0, num_sequences, BLOCK_B, num_stages=1):
        rows = start + tl.arange(0, BLOCK_B)
        queries, contexts = lengths_of(query_starts, context_lens, rows, num_sequences)
        kinds, tiles, seen, sizes, splits, wanted = split_sequences(
            queries, contexts, schedule, window, room, SHORT, FIXED
        )
        of_one = tl.where(queries == 1, wanted, 0)
        of_others = wanted - of_one
        ends = tl.where(
            queries == 1,
            decoding_before + tl.cumsum(of_one, 0),
            decoding + others_before + tl.cumsum(of_others, 0),
        )
        decoding_before += tl.sum(of_one, 0)
        others_before += tl.sum(of_others, 0)
        are_split = (wanted > 0) & (ends <= room)
        items = tiles * tl.where(are_split, splits, 1)
        item_lengths = tl.where(are_split, sizes, seen)
        is_before = (item_lengths > own_length) | ((item_lengths == own_length) & (rows < own))
        place += tl.sum(tl.where((kinds == own_kind) & is_before, items, 0), 0)
        joined = tl.where(are_split, queries, 0)
        join_place += tl.sum(tl.where(rows < own, joined, 0), 0)
        joins += tl.sum(joined, 0)
        ones += tl.sum(tl.where(kinds == 0, items, 0), 0)
        shorts += tl.sum(tl.where(kinds == 1, items, 0), 0)
        longs += tl.sum(tl.where(kinds == 2, items, 0), 0)
    if own == 0:
        tl.store(schedule + COUNTS, ones)
        tl.store(schedule + COUNTS + 1, shorts)
        tl.store(schedule + COUNTS + 2, longs)
        tl.store(schedule + COUNTS + 3, joins)

    first_row = tl.load(query_starts + own)
    rule = schedule + RULES + own_kind * RULE_WIDTH
    tile, tile_queries = tl.load(rule), tl.load(rule + 1)
    pieces = tl.where(is_split, own_splits, 1)
    items = own_tiles * pieces
    before = own_context - own_queries
    for start in tl.range(0, items, BLOCK_I, num_stages=1):
        numbers = start + tl.arange(0, BLOCK_I)
        # The last tiles see most.
        tiles = own_tiles - 1 - numbers // pieces
        splits = numbers % pieces
        offsets = tiles * tile_queries
        counts = tl.minimum(own_queries - offsets, tile_queries)
        positions = before + offsets
        highs = positions + counts
        if FIXED:
            origins = first_seen(before, window) // own_size * own_size + positions * 0
        else:
            origins = first_seen(positions, window) // tile * tile
        begins = origins + splits * own_size
        ends = tl.where(is_split, tl.minimum(begins + own_size, highs), highs)
        places = tl.where(is_split, base + splits * own_queries + offsets, -1)
        target = schedule + LISTS + (own_kind * capacity + place + numbers) * ITEM_WIDTH
        mask = numbers < items
        tl.device_assert(~mask | (place + numbers < capacity), "paged_attention: a schedule has too few items")
        tl.store(target, own + numbers * 0, mask=mask)
        tl.store(target + 1, first_row + offsets, mask=mask)
        tl.store(target + 2, counts, mask=mask)
        tl.store(target + 3, positions, mask=mask)
        tl.store(target + 4, begins, mask=mask)
        tl.store(target + 5, ends, mask=mask)
        tl.store(target + 6, own_size + numbers * 0, mask=mask)
        tl.store(target + 7, places, mask=mask)
    for start in tl.range(0, tl.where(is_split, own_queries, 0), BLOCK_I, num_stages=1):
        numbers = start + tl.arange(0, BLOCK_I)
        target = schedule + LISTS + 3 * capacity * ITEM_WIDTH + (join_place + numbers) * JOIN_WIDTH
        mask = numbers < own_queries
        tl.store(target, first_row + numbers, mask=mask)
        tl.store(target + 1, base + numbers, mask=mask)
        tl.store(target + 2, own_queries + numbers * 0, mask=mask)
        tl.store(target + 3, own_splits + numbers * 0, mask=mask)
