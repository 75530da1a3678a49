"""The schedule that the device computes: where contexts are split, who gets room, in which order items come."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.paged_attention.device_plan import _plan_kernel
from quire_kernels.paged_attention.schedule import (
    ITEM_FIELDS,
    JOIN_FIELDS,
    LISTS_AT,
    LONG,
    MAX_SHORT_QUERIES,
    ONE,
    RULES_AT,
    SHORT,
    Rule,
)

# An H200 with 8 KV heads and groups of 4: 132 multiprocessors with 4, 2 and 1 programs.
RULES = (
    Rule(tile=32, queries=4, fill=66, least=256, most=64),
    Rule(tile=32, queries=16, fill=33, least=512, most=32),
    Rule(tile=128, queries=32, fill=16, least=512, most=32),
)
FIXED = (Rule(tile=64, queries=16, fill=16, least=512, most=1),) * 3
CAPACITY = 4500
ROOM = 4032


class Item(NamedTuple):
    sequence: int
    first_row: int
    tokens: int
    position: int
    begin: int
    end: int
    size: int
    place: int


class Join(NamedTuple):
    row: int
    place: int
    stride: int
    count: int


class Schedule(NamedTuple):
    lists: list[list[Item]]
    joins: list[Join]


def planned(
    batch: list[tuple[int, int]],
    device: torch.device,
    *,
    window: int | None = None,
    room: int = ROOM,
    fixed: bool = False,
    rules: tuple[Rule, ...] = RULES,
    block: int = 256,
) -> Schedule:
    """Return the schedule that the kernel writes; ``block`` is the number of sequences that it reads at once."""
    memory = torch.full((LISTS_AT + 3 * CAPACITY * ITEM_FIELDS + CAPACITY * JOIN_FIELDS,), -7, dtype=torch.int32)
    table = [
        [rule.tile, rule.queries, rule.fill, rule.least, rule.most, 0, 0, 0] for rule in (FIXED if fixed else rules)
    ]
    memory[RULES_AT:LISTS_AT] = torch.tensor(table).view(-1)
    memory = memory.to(device)
    starts = torch.tensor([0, *(q for q, _ in batch)], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    contexts = torch.tensor([c for _, c in batch], dtype=torch.int32, device=device)
    sizes: dict[str, Any] = {"num_sequences": len(batch), "window": window, "capacity": CAPACITY, "room": room}
    options = {"SHORT": MAX_SHORT_QUERIES, "FIXED": fixed, "BLOCK_B": block, "BLOCK_I": 16}
    _plan_kernel[(len(batch),)](memory, starts, contexts, **sizes, **options)
    *counts, joins = memory[:4].tolist()
    lists = memory[LISTS_AT:][: 3 * CAPACITY * ITEM_FIELDS].view(3, CAPACITY, ITEM_FIELDS)
    tail = memory[LISTS_AT + 3 * CAPACITY * ITEM_FIELDS :].view(-1, JOIN_FIELDS)[:joins]
    return Schedule(
        [[Item(*fields) for fields in some[:count].tolist()] for some, count in zip(lists, counts, strict=True)],
        [Join(*fields) for fields in tail.tolist()],
    )


@pytest.mark.parametrize(
    ("queries", "context", "window", "splits", "size"),
    [
        (1, 256, None, 1, 256),
        (1, 257, None, 2, 160),
        (1, 131_072, None, 64, 2048),
        (1, 131_072, 1024, 5, 224),  # the window, and a tile that it need not begin with
        (5, 4096, None, 8, 512),
        (16, 131_072, None, 32, 4096),
        (17, 32_768, None, 16, 2048),
        (128, 131_072, None, 4, 32_768),
        (300, 32_768, None, 1, 32_768),  # ten tiles are more than half of what fills the device
        (100, 32_768, 1000, 3, 512),
    ],
)
def test_a_context_is_split_by_the_lengths_of_its_sequence(
    queries: int, context: int, window: int | None, splits: int, size: int, device: torch.device
) -> None:
    made = planned([(queries, context)], device, window=window)
    items = made.lists[ONE if queries == 1 else SHORT if queries <= MAX_SHORT_QUERIES else LONG]
    assert {item.size for item in items} == {size}
    assert {join.count for join in made.joins} == ({splits} if splits > 1 else set())


@pytest.mark.parametrize(
    ("queries", "context", "window", "splits"),
    [
        (1, 512, None, 1),
        (1, 513, None, 2),
        (1, 8192, 600, 2),  # positions 7,592 to 8,191: two of the fixed splits
        (7, 8192, None, 16),
        (300, 8192, None, 1),  # enough tiles
    ],
)
def test_fixed_splits_begin_at_multiples_of_their_size(
    queries: int, context: int, window: int | None, splits: int, device: torch.device
) -> None:
    made = planned([(queries, context)], device, window=window, fixed=True)
    assert {item.size for item in made.lists[ONE]} == {512} and not any(item.begin % 512 for item in made.lists[ONE])
    assert {join.count for join in made.joins} == ({splits} if splits > 1 else set())


@pytest.mark.parametrize("change", [{"fill": 1}, {"most": 1}])
def test_a_full_device_or_a_limit_keeps_contexts_whole(change: dict[str, int], device: torch.device) -> None:
    made = planned([(1, 8192)], device, rules=(replace(RULES[ONE], **change), *RULES[1:]))
    assert len(made.lists[ONE]) == 1 and not made.joins


def some_batch(seed: int) -> list[tuple[int, int]]:
    """Return sequences that decode, verify, and have chunks of prompts, and padding at the end."""
    choose = random.Random(seed)
    batch = []
    for _ in range(choose.randint(1, 9)):
        queries = choose.choice([1, 1, 1, 2, 5, 16, 17, 70])
        batch.append((queries, queries + choose.choice([0, 1, 100, 600, 3000])))
    return batch + [(0, 0)] * choose.randint(0, 3)


@pytest.mark.parametrize(
    ("fixed", "window", "room"),
    [(False, None, 0), (False, 700, 45), (False, None, ROOM), (True, None, 45), (True, 700, ROOM), (True, None, 0)],
)
def test_items_cover_visible_tokens_exactly_once(
    fixed: bool, window: int | None, room: int, device: torch.device
) -> None:
    for seed in range(2 if INTERPRETED else 100):
        batch = some_batch(100 * room + 10 * fixed + seed)
        # With a block of 4, more sequences than are read at once.
        made = planned(batch, device, window=window, room=room, fixed=fixed, block=4 if seed else 256)
        check_coverage(made, batch, window, FIXED if fixed else RULES)
        check_places(made, room)
        for items in made.lists:
            lengths = [max(item.end - item.begin, 0) for item in items]
            # Tiles of one sequence may differ by their queries, and a window begins anywhere in a tile.
            assert all(later <= earlier + 600 for earlier, later in zip(lengths, lengths[1:], strict=False))


def check_coverage(made: Schedule, batch: list[tuple[int, int]], window: int | None, rules: tuple[Rule, ...]) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    for kind, items in enumerate(made.lists):
        for item in items:
            queries = batch[item.sequence][0]
            list_of = ONE if rules is FIXED or queries == 1 else SHORT if queries <= MAX_SHORT_QUERIES else LONG
            assert kind == list_of and 1 <= item.tokens <= rules[kind].queries
            for token in range(item.tokens):
                position = item.position + token
                low = 0 if window is None else max(position + 1 - window, 0)
                span = range(max(item.begin, low), min(item.end, position + 1))
                seen[item.first_row + token, position] += len(span)
    positions = [context - query + token for query, context in batch for token in range(query)]
    most = window or max(positions) + 1
    assert seen == Counter({(row, position): min(position + 1, most) for row, position in enumerate(positions)})


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


@pytest.mark.parametrize("room", [0, 20])
def test_splits_of_decoding_sequences_do_not_depend_on_the_batch(room: int, device: torch.device) -> None:
    def splits(batch: list[tuple[int, int]], room: int) -> list[int]:
        own = [item for item in planned(batch, device, room=room).lists[ONE] if item.sequence == len(batch) - 1]
        return sorted(begin for item in own for begin in range(item.begin, item.end, item.size))

    for context, seed in ((1, 1), (5000, 3)):
        mates = [some for some in some_batch(seed) if some[0]]
        assert splits([*mates, (1, context)], room) == splits([(1, context)], ROOM)


def test_sequences_of_one_query_get_room_first(device: torch.device) -> None:
    made = planned([(100, 32_768), (1, 8192), (5, 4096)], device, room=40)
    assert {join.row for join in made.joins} == {100}
    assert [len(items) for items in made.lists] == [32, 1, 4]
    without = planned([(100, 32_768), (1, 8192)], device, room=31)
    (item,) = without.lists[ONE]
    assert (item.begin, item.end, item.size, item.place) == (0, 8192, 256, -1), "one item visits the same splits"


def test_long_items_precede_short_and_last_tiles_earlier_ones(device: torch.device) -> None:
    made = planned([(1, 100), (1, 40_000), (1, 5000)], device)
    assert [item.sequence for item in made.lists[ONE]] == [1] * 63 + [2] * 20 + [0]
    assert [item.position for item in planned([(70, 70)], device).lists[LONG]] == [64, 32, 0]
