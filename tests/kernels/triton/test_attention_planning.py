"""The schedule that the device computes, compared with the plain functions that define it."""

import random
from typing import Any

import pytest
import torch

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.paged_attention.device_plan import _plan_kernel
from quire_kernels.paged_attention.schedule import (
    ITEM_FIELDS,
    JOIN_FIELDS,
    LISTS_AT,
    MAX_SHORT_QUERIES,
    RULES_AT,
    Item,
    Join,
    Rule,
    Schedule,
    schedule,
)

RULES = (
    Rule(tile=32, queries=4, fill=66, least=256, most=64),
    Rule(tile=32, queries=16, fill=33, least=512, most=32),
    Rule(tile=128, queries=32, fill=16, least=512, most=32),
)
FIXED = (Rule(tile=64, queries=16, fill=16, least=512, most=1),) * 3
CAPACITY = 4500


def planned(
    batch: list[tuple[int, int]],
    device: torch.device,
    *,
    window: int | None,
    room: int,
    fixed: bool,
    block: int,
) -> Schedule:
    """Return the schedule that the kernel writes; ``block`` is the number of sequences that it reads at once."""
    rules = FIXED if fixed else RULES
    memory = torch.full((LISTS_AT + 3 * CAPACITY * ITEM_FIELDS + CAPACITY * JOIN_FIELDS,), -7, dtype=torch.int32)
    table = [[rule.tile, rule.queries, rule.fill, rule.least, rule.most, 0, 0, 0] for rule in rules]
    memory[RULES_AT:LISTS_AT] = torch.tensor(table).view(-1)
    memory = memory.to(device)
    starts = torch.tensor([0, *(q for q, _ in batch)], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    contexts = torch.tensor([c for _, c in batch], dtype=torch.int32, device=device)
    sizes: dict[str, Any] = {"num_sequences": len(batch), "window": window, "capacity": CAPACITY, "room": room}
    options = {"SHORT": MAX_SHORT_QUERIES, "FIXED": fixed, "BLOCK_B": block, "BLOCK_I": 16}
    _plan_kernel[(len(batch),)](memory, starts, contexts, **sizes, **options)
    return read(memory.cpu())


def read(memory: torch.Tensor) -> Schedule:
    *counts, joins = memory[:4].tolist()
    lists = memory[LISTS_AT:][: 3 * CAPACITY * ITEM_FIELDS].view(3, CAPACITY, ITEM_FIELDS)
    names = ("sequence", "first_row", "tokens", "position", "begin", "end", "size", "place")
    items = tuple(
        [Item(**dict(zip(names, fields, strict=True))) for fields in some[:count].tolist()]
        for some, count in zip(lists, counts, strict=True)
    )
    tail = memory[LISTS_AT + 3 * CAPACITY * ITEM_FIELDS :].view(-1, JOIN_FIELDS)[:joins].tolist()
    return Schedule(
        lists=items,  # type: ignore[arg-type]  # three
        joins=[Join(row=row, place=place, stride=stride, count=count) for row, place, stride, count in tail],
    )


def some_batch(seed: int) -> list[tuple[int, int]]:
    """Return sequences that decode, verify, and have chunks of prompts, and padding at the end."""
    choose = random.Random(seed)
    batch = []
    for _ in range(choose.randint(1, 9)):
        queries = choose.choice([1, 1, 1, 2, 5, 16, 17, 70, 200])
        batch.append((queries, queries + choose.choice([0, 1, 100, 600, 3000, 20_000])))
    return batch + [(0, 0)] * choose.randint(0, 3)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("room", [0, 45, 4032])
def test_the_device_plans_as_the_reference_does(
    fixed: bool, window: int | None, room: int, device: torch.device
) -> None:
    for seed in range(2 if INTERPRETED else 100):
        batch = some_batch(100 * room + 10 * fixed + seed)
        found = planned(batch, device, window=window, room=room, fixed=fixed, block=256)
        lengths = [q for q, _ in batch], [c for _, c in batch]
        expected = schedule(*lengths, FIXED if fixed else RULES, window=window, room=room, fixed=fixed)
        assert found == expected, batch


def test_more_sequences_than_are_read_at_once(device: torch.device) -> None:
    batch = [(1, 300 * i) for i in range(1, 15)] + [(3, 900), (1, 2000), (40, 9000), (0, 0)]
    found = planned(batch, device, window=None, room=120, fixed=False, block=4)
    expected = schedule([q for q, _ in batch], [c for _, c in batch], RULES, window=None, room=120, fixed=False)
    assert found == expected
