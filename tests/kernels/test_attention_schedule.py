"""The decisions of attention's schedule: where contexts are split, who gets room, in which order items come."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_kernels.paged_attention.schedule import (
    LONG,
    MAX_SHORT_QUERIES,
    ONE,
    SHORT,
    Rule,
    Schedule,
    list_of,
    schedule,
    split_sequence,
)

# An H200 with 8 KV heads and groups of 4: 132 multiprocessors with 4, 2 and 1 programs.
ONES = Rule(tile=32, queries=4, fill=66, least=256, most=64)
SHORTS = Rule(tile=32, queries=16, fill=33, least=512, most=32)
LONGS = Rule(tile=128, queries=32, fill=16, least=512, most=32)
RULES = (ONES, SHORTS, LONGS)
FIXED = (Rule(tile=64, queries=16, fill=16, least=512, most=1),) * 3
ROOM = 4032


@pytest.mark.parametrize(
    ("queries", "context", "window", "splits", "size"),
    [
        (1, 1, None, 1, 32),
        (1, 256, None, 1, 256),
        (1, 257, None, 2, 160),
        (1, 8192, None, 32, 256),
        (1, 32_768, None, 64, 512),
        (1, 131_072, None, 64, 2048),
        (1, 131_072, 1024, 5, 224),  # the window, and a tile that it need not begin with
        (5, 4096, None, 8, 512),
        (5, 400, None, 1, 416),
        (16, 131_072, None, 32, 4096),
        (17, 32_768, None, 16, 2048),
        (100, 32_768, None, 4, 8192),
        (128, 131_072, None, 4, 32_768),
        (256, 32_768, None, 2, 16_384),
        (300, 32_768, None, 1, 32_768),  # ten tiles are more than half of what fills the device
        (2048, 2048, None, 1, 2048),
        (100, 32_768, 1000, 3, 512),
    ],
)
def test_a_context_is_split_by_the_lengths_of_its_sequence(
    queries: int, context: int, window: int | None, splits: int, size: int
) -> None:
    rule = RULES[list_of(queries, fixed=False)]
    found = split_sequence(queries, context, rule, window=window, room=ROOM, fixed=False)
    assert (found.count, found.size) == (splits, size)
    assert found.partials == (queries * splits if splits > 1 else 0)


@pytest.mark.parametrize(
    ("queries", "context", "window", "splits", "partials"),
    [
        (1, 512, None, 1, 0),
        (1, 513, None, 2, 2),
        (1, 8192, None, 16, 16),
        (1, 8192, 600, 2, 2),  # positions 7,592 to 8,191: two of the fixed splits
        (7, 8192, None, 16, 112),
        (300, 8192, None, 16, 0),  # enough tiles
    ],
)
def test_fixed_splits_begin_at_multiples_of_their_size(
    queries: int, context: int, window: int | None, splits: int, partials: int
) -> None:
    found = split_sequence(queries, context, FIXED[0], window=window, room=ROOM, fixed=True)
    assert (found.count, found.size, found.partials) == (splits, 512, partials)


@pytest.mark.parametrize(
    ("queries", "fixed", "expected"),
    [(1, False, ONE), (2, False, SHORT), (16, False, SHORT), (17, False, LONG), (1, True, ONE), (500, True, ONE)],
)
def test_the_number_of_queries_selects_the_list(queries: int, fixed: bool, expected: int) -> None:
    assert list_of(queries, fixed=fixed) == expected


def test_splits_fit_into_the_workspace() -> None:
    found = split_sequence(100, 32_768, LONGS, window=None, room=399, fixed=False)
    assert found.partials == 0


# --- the items of a batch ---

LENGTHS = st.integers(1, 40).flatmap(lambda queries: st.tuples(st.just(queries), st.integers(queries, 5000)))
BATCHES = st.lists(st.one_of(LENGTHS, st.tuples(st.just(1), st.integers(1, 5000)), st.just((0, 0))), max_size=12)


@given(
    batch=BATCHES,
    window=st.one_of(st.none(), st.integers(1, 3000)),
    room=st.sampled_from([0, 5, 60, 4032]),
    fixed=st.booleans(),
)
def test_items_cover_visible_tokens_exactly_once(
    batch: list[tuple[int, int]], window: int | None, room: int, fixed: bool
) -> None:
    queries, contexts = [q for q, _ in batch], [c for _, c in batch]
    made = schedule(queries, contexts, FIXED if fixed else RULES, window=window, room=room, fixed=fixed)
    seen: Counter[tuple[int, int]] = Counter()
    for kind, items in enumerate(made.lists):
        for item in items:
            assert list_of(queries[item.sequence], fixed=fixed) == kind
            assert 1 <= item.tokens <= (FIXED if fixed else RULES)[kind].queries
            for token in range(item.tokens):
                position = item.position + token
                low = 0 if window is None else max(position + 1 - window, 0)
                span = range(max(item.begin, low), min(item.end, position + 1))
                seen[item.first_row + token, position] += len(span)
    row = 0
    expected: Counter[tuple[int, int]] = Counter()
    for query, context in batch:
        for token in range(query):
            position = context - query + token
            expected[row, position] = position + 1 if window is None else min(position + 1, window)
            row += 1
    assert seen == expected
    check_places(made, room)
    for items in made.lists:
        lengths = [max(item.end - item.begin, 0) for item in items]
        # Tiles of one sequence may differ by their queries, and a window begins anywhere in a tile.
        assert all(later <= earlier + 600 for earlier, later in zip(lengths, lengths[1:], strict=False))


def check_places(made: Schedule, room: int) -> None:
    """Check that partial results are written once, are joined, and fit."""
    written: Counter[tuple[int, int]] = Counter()
    for item in (item for items in made.lists for item in items if item.place >= 0):
        for token in range(item.tokens):
            written[item.first_row + token, item.place + token] += 1
    joined = {(join.row, join.place + join.stride * i) for join in made.joins for i in range(join.count)}
    assert set(written) == joined and set(written.values()) <= {1}
    places = [place for _, place in joined]
    assert len(places) == len(set(places)) and all(0 <= place < room for place in places)


@given(context=st.integers(1, 5000), mates=BATCHES, room=st.sampled_from([0, 20, 4032]))
def test_splits_of_decoding_sequences_do_not_depend_on_the_batch(
    context: int, mates: list[tuple[int, int]], room: int
) -> None:
    def splits(batch: list[tuple[int, int]], place: int, room: int) -> list[int]:
        made = schedule([q for q, _ in batch], [c for _, c in batch], RULES, window=None, room=room, fixed=False)
        own = [item for item in made.lists[ONE] if item.sequence == place]
        return sorted(begin for item in own for begin in range(item.begin, item.end, item.size))

    alone = splits([(1, context)], 0, ROOM)
    assert splits([*mates, (1, context)], len(mates), room) == alone


def test_sequences_of_one_query_get_room_first() -> None:
    made = schedule([100, 1, 5], [32_768, 8192, 4096], RULES, window=None, room=40, fixed=False)
    assert {join.row for join in made.joins} == {100}
    assert [len(items) for items in made.lists] == [32, 1, 4]
    without = schedule([100, 1], [32_768, 8192], RULES, window=None, room=31, fixed=False)
    (item,) = without.lists[ONE]
    assert (item.begin, item.end, item.size, item.place) == (0, 8192, 256, -1), "one item visits the same splits"


def test_long_items_precede_short_and_last_tiles_earlier_ones() -> None:
    made = schedule([1, 1, 1], [100, 40_000, 5000], RULES, window=None, room=ROOM, fixed=False)
    assert [item.sequence for item in made.lists[ONE]] == [1] * 63 + [2] * 20 + [0]
    tiles = schedule([70], [70], RULES, window=None, room=ROOM, fixed=False).lists[LONG]
    assert [item.position for item in tiles] == [64, 32, 0]


def test_padding_has_no_items() -> None:
    made = schedule([1, 0, 0], [20, 0, 0], RULES, window=None, room=ROOM, fixed=False)
    assert [len(items) for items in made.lists] == [1, 0, 0]


@pytest.mark.parametrize("change", [{"fill": 1}, {"most": 1}])
def test_a_full_device_or_a_limit_keeps_contexts_whole(change: dict[str, int]) -> None:
    rule = replace(ONES, **change)
    assert split_sequence(1, 8192, rule, window=None, room=ROOM, fixed=False).count == 1
    assert MAX_SHORT_QUERIES == 16
