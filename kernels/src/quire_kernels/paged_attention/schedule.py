"""The division of a step's attention into items, which ``device_plan`` computes.

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

from dataclasses import dataclass

ONE, SHORT, LONG = range(3)
"""The lists of items: of sequences with one query, with up to ``MAX_SHORT_QUERIES``, and with more. Each has tiles of
its own, so that a sequence's path does not depend on others. Splits of a fixed size are all in the first list."""

MAX_SHORT_QUERIES = 16
"""The maximum number of queries of a sequence in the second list."""

COUNTS_AT, ZERO_AT, RULES_AT, LISTS_AT = 0, 7, 8, 32
RULE_FIELDS, ITEM_FIELDS, JOIN_FIELDS = 8, 8, 4
"""The layout of a schedule on the device, one int32 tensor: the number of items of each list and of tokens to join,
a zero, a rule for each list (its fields in order), the three lists of items, and the tokens to join.

An item: the sequence, the tile's first row of q, its tokens, the first one's position, the first token of its context
and the one after the last (each query sees the part before it), the tokens of a split (longer items visit several), and
the place of the first query's partial result, -1 if the item has the whole result. A token to join: its row, and the
first place, the stride and the number of its partial results."""


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
