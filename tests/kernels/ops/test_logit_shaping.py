from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from logit_edits import Asked, edits_of
from torch import Tensor

from quire_kernels.errors import ArgumentError
from quire_kernels.logit_shaping import TAIL, LogitEdits, count_tokens, reference, shape_logits

VOCABULARY = 301
ROWS = [
    Asked(),
    Asked(allowed=[0, 7, 300]),
    Asked(allowed=list(range(VOCABULARY))),
    Asked(words=[[5]]),
    Asked(words=[[5, 6], [4, 5, 9], [5, 1, 2]], drawn=[4, 5]),
    Asked(words=[[4, 5, 6], [4]], drawn=[5]),
    Asked(words=[[*range(TAIL), 49]], drawn=[9, *range(TAIL)]),
    Asked(words=[[*range(TAIL), 49]], drawn=[9, *range(TAIL - 1)]),
    Asked(stops=[2, 3, 2], min_tokens=2, drawn=[1]),
    Asked(stops=[2, 3], min_tokens=1, drawn=[1]),
    Asked(biases={5: 3.0, 6: -1.0, 300: 100.0}, counted={5: 0, 6: 2, 300: 1}, penalties=(2.0, 0.25, 0.5)),
    Asked(counted={token: token % 3 for token in range(0, 300, 2)}, penalties=(1.3, -0.5, 0.1)),
    Asked(
        allowed=[1, 2, 3, 4],
        words=[[2]],
        stops=[3],
        min_tokens=1,
        biases={2: 100.0, 3: 100.0, 9: 100.0},
        counted={9: 4, 1: 1},
        penalties=(0.5, -2.0, -2.0),
    ),
]


def moved(edits: LogitEdits, device: torch.device) -> LogitEdits:
    return LogitEdits(**{field.name: getattr(edits, field.name).to(device, copy=True) for field in fields(edits)})


def shaped(logits: Tensor, row: Asked, device: torch.device) -> Tensor:
    """Return one row of logits after its edits."""
    found, first = logits[None].to(device, copy=True), torch.zeros(1, dtype=torch.int64, device=device)
    shape_logits(found, first, first, moved(edits_of(row), device))
    return found[0].cpu()


@pytest.mark.parametrize(
    ("row", "tokens"),
    [
        (Asked(), []),
        (Asked(allowed=[0, 7, 49]), [token for token in range(50) if token not in (0, 7, 49)]),
        (Asked(words=[[5]]), [5]),
        (Asked(words=[[5, 6]]), []),
        (Asked(words=[[5, 6]], drawn=[5, 1]), []),
        (Asked(words=[[4, 5, 6], [7], [5, 8]], drawn=[4, 5]), [6, 7, 8]),
        (Asked(words=[[*range(TAIL), 49]], drawn=[9, *range(TAIL)]), [49]),
        (Asked(words=[[3, 5, 6]], drawn=[*range(10, 10 + TAIL - 1), 3, 5]), [6]),
        (Asked(stops=[2, 3], min_tokens=2, drawn=[1]), [2, 3]),
        (Asked(stops=[2, 3], min_tokens=1, drawn=[1]), []),
        # A bias does not allow a forbidden token.
        (
            Asked(allowed=[1], words=[[2]], biases={2: 100.0, 3: 100.0}, counted={3: 4}, penalties=(0.5, -2.0, -2.0)),
            [token for token in range(50) if token != 1],
        ),
    ],
)
def test_forbidden_tokens_are_minus_infinity(row: Asked, tokens: list[int], device: torch.device) -> None:
    assert shaped(torch.zeros(50), row, device).isneginf().nonzero()[:, 0].tolist() == tokens


def test_biases_are_added_before_penalties(device: torch.device) -> None:
    logits = torch.zeros(50)
    logits[5] = -1.0
    row = Asked(biases={5: 3.0, 6: -1.0}, counted={5: 0, 6: 0}, penalties=(2.0, 0.0, 0.0))
    assert shaped(logits, row, device)[5:7].tolist() == [1.0, -2.0]  # (-1 + 3) / 2 and (0 - 1) * 2


def test_penalties_distinguish_prompt_from_sampled_tokens(device: torch.device) -> None:
    row = Asked(counted={1: 0, 2: 1, 3: 3}, penalties=(2.0, 0.25, 0.5))
    assert shaped(torch.full((50,), 4.0), row, device)[:4].tolist() == [4.0, 2.0, 1.25, 0.75]


@pytest.mark.parametrize("repeats", [1, 4])
def test_rows_are_shaped_as_the_reference_shapes_them(repeats: int, threads: int, device: torch.device) -> None:
    asked = ROWS * repeats  # threads share many rows
    edits = edits_of(*asked)
    wide = 3.0 * torch.randn(len(asked) + 3, VOCABULARY + 5)
    lines, rows = torch.randperm(len(wide))[: len(asked)], torch.randperm(len(asked))
    found, expected = wide.to(device, copy=True), wide.clone()
    shape_logits(found[:, :VOCABULARY], lines.to(device), rows.to(device), moved(edits, device))
    reference.shape_logits(expected[:, :VOCABULARY], lines, rows, edits)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)
    # Lines that are not listed, and the gaps between rows, are unchanged.
    others = [line for line in range(len(wide)) if line not in lines.tolist()]
    assert torch.equal(found.cpu()[others], wide[others])
    assert torch.equal(found.cpu()[:, VOCABULARY:], wide[:, VOCABULARY:])


def test_counts_follow_sampled_tokens(device: torch.device) -> None:
    pool = edits_of(
        Asked(counted={1: 0, 2: 3}, room=9),
        Asked(words=[[1, 2]]),
        Asked(counted={token: 1 for token in range(1500)}, room=9),
    )
    found, expected = moved(pool, device), moved(pool, torch.device("cpu"))
    order = torch.tensor([2, 0, 1])
    for step in range(TAIL + 3):
        tokens = torch.tensor([1400 + 90 * (step % 2) + step % 7, step % 5, step])
        assert reference.count_tokens(tokens, order, expected)
        count_tokens(tokens.to(device), order.to(device), found)
    for column in ("ids", "bounds", "num_drawn", "tails"):
        assert torch.equal(getattr(found, column).cpu(), getattr(expected, column))
    torch.testing.assert_close(found.values.cpu(), expected.values, equal_nan=True, rtol=0, atol=0)
    assert found.bounds[1, 4:].unique().numel() == 1, "a row without penalties counts nothing"


def test_zero_rows_need_no_work(device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    edits = moved(edits_of(Asked()), device)
    shape_logits(torch.zeros(1, 5, device=device), none, none, edits)
    count_tokens(none, none, edits)
    assert int(edits.num_drawn[0]) == 0


@pytest.mark.usefixtures("checks_values")
def test_a_row_without_room_is_refused_and_the_pool_left_whole(device: torch.device) -> None:
    edits = moved(edits_of(Asked(counted={1: 0}, room=1), Asked(counted={1: 0}, room=5)), device)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    count_tokens(first + 2, first, edits)
    count_tokens(first + 2, first, edits)
    with pytest.raises(Exception, match="count_tokens: edits have a row without room for another id"):
        count_tokens(first + 3, first, edits)
    assert int(edits.ids[edits.bounds[1, 4]]) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(1, 5).half()}, "shape_logits: logits are torch.float16"),
        ({"logits": torch.zeros(5)}, "shape_logits: logits are torch.float32"),
        ({"logits": torch.zeros(5, 2).t()}, "shape_logits: logits has strides"),
        ({"rows": torch.zeros(2, dtype=torch.int64)}, "shape_logits: rows is"),
        ({"lines": torch.zeros(1, dtype=torch.int32)}, "shape_logits: lines is torch.int32"),
        ({"edits": replace(edits_of(Asked()), ids=torch.zeros(3))}, "shape_logits: ids is torch.float32"),
        ({"edits": replace(edits_of(Asked()), penalties=torch.zeros(1, 2))}, "shape_logits: penalties is"),
    ],
)
def test_invalid_arguments_are_refused(change: dict[str, Any], message: str, device: torch.device) -> None:
    one = torch.zeros(1, dtype=torch.int64)
    given = {"logits": torch.zeros(1, VOCABULARY), "lines": one, "rows": one, "edits": edits_of(Asked()), **change}
    moved_edits = moved(given.pop("edits"), device)
    with pytest.raises(ArgumentError, match=message):
        shape_logits(**{name: tensor.to(device) for name, tensor in given.items()}, edits=moved_edits)
