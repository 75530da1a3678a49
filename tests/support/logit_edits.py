"""Pools of logit edits for tests: the parameters of rows as lists, and their tensors."""

from dataclasses import dataclass, field

import torch

from quire_kernels.logit_shaping import TAIL, LogitEdits


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The parameters of one row, as lists."""

    allowed: list[int] = field(default_factory=list)
    words: list[list[int]] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    biases: dict[int, float] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)
    min_tokens: int = 0
    drawn: list[int] = field(default_factory=list)
    room: int = 0


def edits_of(*rows: Asked) -> LogitEdits:
    """Return the pool of such rows; ids between them are out of bounds in case they are read."""
    ids: list[int] = []
    values: list[float] = []
    bounds = []
    tails = torch.full((len(rows), TAIL), -1, dtype=torch.int32)
    for number, row in enumerate(rows):
        ids += [1 << 30] * 3
        parts = [
            sorted(row.allowed),
            [token for word in row.words for token in (len(word), *word)],
            row.stops,
            list(row.biases),
            list(row.counted),
        ]
        begins = [len(ids) + sum(map(len, parts[:place])) for place in range(6)]
        ids += [token for part in parts for token in part] + [1 << 30] * row.room
        values += [float("nan")] * (begins[3] - len(values)) + [*row.biases.values(), *row.counted.values()]
        values += [float("nan")] * row.room
        bounds.append([*begins, begins[5] + row.room])
        for place, token in enumerate(row.drawn):
            tails[number, place % TAIL] = token
    return LogitEdits(
        ids=torch.tensor(ids, dtype=torch.int32),
        values=torch.tensor(values, dtype=torch.float32),
        bounds=torch.tensor(bounds, dtype=torch.int64),
        penalties=torch.tensor([row.penalties for row in rows], dtype=torch.float32),
        min_tokens=torch.tensor([row.min_tokens for row in rows]),
        num_drawn=torch.tensor([len(row.drawn) for row in rows]),
        tails=tails,
    )
