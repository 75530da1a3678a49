"""The division of a step's attention into items, as plain functions: the reference of ``device_plan``.

An item is a query tile and a range of its context; one program computes it for one KV head. A context is split if the
sequence alone has too few query tiles to fill the device. Whether and where it is split depends on the sequence's own
lengths and on the device, and not on the rest of the batch, which only decides who gets room for partial results:

- Sequences of one query get theirs first. Without room, one item visits all splits and merges them in the same order,
  so the result has the same bits.
- Other sequences, in the order of the batch, are not split if there is no room. Splits of a fixed size are visited by
  one item, as above.

Items of a list come longest first, so that the last ones to finish are short.

Legend: T query tokens, B sequences, P partial results.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire_kernels.triton_runtime.sizes import cdiv

ONE, SHORT, LONG = range(3)
"""The lists of items: of sequences with one query, with up to ``MAX_SHORT_QUERIES``, and with more. Each has tiles of
its own, so that a sequence's path does not depend on others. Splits of a fixed size are all in the first list."""

MAX_SHORT_QUERIES = 16
"""The maximum number of queries of a sequence in the second list."""

COUNTS_AT, ZERO_AT, RULES_AT, LISTS_AT = 0, 7, 8, 32
RULE_FIELDS, ITEM_FIELDS, JOIN_FIELDS = 8, 8, 4
"""The layout of a schedule on the device, one int32 tensor: the number of items of each list and of tokens to join,
a zero, a rule for each list, the three lists of items, and the tokens to join. The fields are those of the classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The division of the sequences of a list."""

    tile: int
    """The tokens of a tile of context. A split is a whole number of tiles."""
    queries: int
    """The tokens of a query tile."""
    fill: int
    """The items of a KV head that fill the device once."""
    least: int
    """The least tokens of a split; with fixed splits, the tokens of each."""
    most: int
    """The most splits of a context, unless they are fixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The division of one sequence if there is room."""

    tiles: int
    """The query tiles."""
    seen: int
    """The tokens of context that a tile sees, at most."""
    size: int
    """The tokens of a split."""
    count: int
    """The splits of each tile."""
    partials: int
    """The partial results, one for each query and split; 0 if the context is not divided among items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """The work of one program for each KV head."""

    sequence: int
    first_row: int
    """The tile's first row of q; its other tokens follow."""
    tokens: int
    position: int
    """The position of the first token in its sequence."""
    begin: int
    end: int
    """The context from ``begin`` to before ``end``, of which each token sees the part before it."""
    size: int
    """The tokens of a split: longer items visit several."""
    place: int
    """The partial result of the first token; −1 if the item has the whole result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A token whose partial results are to be merged: ``place`` + ``stride`` times 0 to ``count`` - 1."""

    row: int
    place: int
    stride: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The items of a step by list, in the order in which programs take them, and the tokens to join."""

    lists: tuple[list[Item], list[Item], list[Item]]
    joins: list[Join]


def list_of(query_len: int, *, fixed: bool) -> int:
    """Return the list of a sequence with so many queries."""
    if fixed or query_len == 1:
        return ONE
    return SHORT if query_len <= MAX_SHORT_QUERIES else LONG


def split_sequence(
    query_len: int, context_len: int, rule: Rule, *, window: int | None, room: int, fixed: bool
) -> Split:
    """Return the division of a sequence by its own lengths; ``room`` is that of an empty workspace."""
    tiles = cdiv(query_len, rule.queries)
    if fixed:
        first = _first_seen(context_len - query_len, window)
        seen, size = context_len - first // rule.least * rule.least, rule.least
    else:
        seen = context_len
        if window is not None:
            seen = min(seen, window + min(query_len, rule.queries) + rule.tile)
        most = min(max(rule.fill // max(tiles, 1), 1), rule.most)
        splits = max(min(cdiv(seen, rule.least), most), 1)
        size = max(cdiv(cdiv(seen, splits), rule.tile), 1) * rule.tile
    count = max(cdiv(seen, size), 1)
    partials = query_len * count
    if count == 1 or tiles >= max(rule.fill, 2) or partials > room:
        partials = 0
    return Split(tiles=tiles, seen=seen, size=size, count=count, partials=partials)


def schedule(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    rules: Sequence[Rule],
    *,
    window: int | None,
    room: int,
    fixed: bool,
) -> Schedule:
    """Return the schedule of a step. A padded row has neither queries nor context."""
    kinds = [list_of(query, fixed=fixed) for query in query_lens]
    divided = [
        split_sequence(query, context, rules[kind], window=window, room=room, fixed=fixed)
        for query, context, kind in zip(query_lens, context_lens, kinds, strict=True)
    ]
    bases = _places(query_lens, divided)
    has_room = [
        split.partials > 0 and base + split.partials <= room for split, base in zip(divided, bases, strict=True)
    ]
    starts = [sum(query_lens[:sequence]) for sequence in range(len(query_lens))]
    lists: tuple[list[Item], list[Item], list[Item]] = ([], [], [])
    lengths = [split.size if room_there else split.seen for split, room_there in zip(divided, has_room, strict=True)]
    for sequence in sorted(range(len(query_lens)), key=lambda sequence: -lengths[sequence]):
        rule, split = rules[kinds[sequence]], divided[sequence]
        query, before = query_lens[sequence], context_lens[sequence] - query_lens[sequence]
        count = split.count if has_room[sequence] else 1
        for tile in reversed(range(split.tiles)):  # the last tiles see most
            offset = tile * rule.queries
            tokens = min(query - offset, rule.queries)
            high = before + offset + tokens
            origin = _first_seen(before, window) // split.size * split.size
            if not fixed:
                origin = _first_seen(before + offset, window) // rule.tile * rule.tile
            for number in range(count):
                begin = origin + number * split.size
                item = Item(
                    sequence=sequence,
                    first_row=starts[sequence] + offset,
                    tokens=tokens,
                    position=before + offset,
                    begin=begin,
                    end=min(begin + split.size, high) if has_room[sequence] else high,
                    size=split.size,
                    place=bases[sequence] + number * query + offset if has_room[sequence] else -1,
                )
                lists[kinds[sequence]].append(item)
    joins = [
        Join(row=starts[sequence] + token, place=bases[sequence] + token, stride=query, count=divided[sequence].count)
        for sequence, query in enumerate(query_lens)
        if has_room[sequence]
        for token in range(query)
    ]
    return Schedule(lists=lists, joins=joins)


def _places(query_lens: Sequence[int], divided: Sequence[Split]) -> list[int]:
    """Return the first partial result of each sequence: sequences of one query come first."""
    places = [0] * len(query_lens)
    place = 0
    for sequence in sorted(range(len(query_lens)), key=lambda sequence: query_lens[sequence] != 1):
        places[sequence] = place
        place += divided[sequence].partials
    return places


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(position + 1 - window, 0)
