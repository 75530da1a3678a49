"""Layout without overlaps. Pure."""

import heapq
from collections.abc import Sequence


def lanes(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return the lowest free lane for each span, in order of their starts."""
    free: list[int] = []
    taken: list[tuple[float, int]] = []
    placed, count = [], 0
    for start, end in spans:
        while taken and taken[0][0] <= start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, count = count, count + 1
        heapq.heappush(taken, (end, lane))
        placed.append(lane)
    return placed


def rows_of(spans: Sequence[tuple[float, float]], *, apart: float) -> list[int]:
    """Return the lowest row for each span in which no other span is closer than `apart`."""
    rows: list[list[tuple[float, float]]] = []
    placed = []
    for start, end in spans:
        row = next(
            (number for number, row in enumerate(rows) if all(start - b >= apart or a - end >= apart for a, b in row)),
            len(rows),
        )
        if row == len(rows):
            rows.append([])
        rows[row].append((start, end))
        placed.append(row)
    return placed
