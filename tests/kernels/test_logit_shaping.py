from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from logit_edits import Asked, edits_of
from torch import Tensor

from quire_kernels.errors import ArgumentError
from quire_kernels.logit_shaping import TAIL, LogitEdits, count_tokens, reference, shape_logits

VOCABULARY = 50
INF = float("inf")


def every(edits: LogitEdits) -> Tensor:
    return torch.arange(edits.bounds.shape[0])


def shaped(logits: Tensor, *rows: Asked) -> Tensor:
    logits = logits.clone()
    edits = edits_of(*rows)
    shape_logits(logits, every(edits), every(edits), edits)
    return logits


def forbidden(row: Asked) -> list[int]:
    """Return the tokens of flat logits that a row may not sample."""
    found: list[int] = (shaped(torch.zeros(1, VOCABULARY), row)[0] == -INF).nonzero()[:, 0].tolist()
    return found


@pytest.mark.parametrize(
    ("row", "tokens"),
    [
        (Asked(), []),
        (Asked(allowed=[0, 7, 49]), [token for token in range(50) if token not in (0, 7, 49)]),
        (Asked(allowed=list(range(50))), []),
        (Asked(words=[[5]]), [5]),
        (Asked(words=[[5, 6]]), []),
        (Asked(words=[[5, 6]], drawn=[5]), [6]),
        (Asked(words=[[5, 6]], drawn=[5, 1]), []),
        (Asked(words=[[4, 5, 6], [7], [5, 8]], drawn=[4, 5]), [6, 7, 8]),
        (Asked(words=[[4, 5, 6]], drawn=[5]), []),
        (Asked(words=[[*range(TAIL), 49]], drawn=[9, *range(TAIL)]), [49]),
        (Asked(words=[[3, 5, 6]], drawn=[*range(10, 10 + TAIL - 1), 3, 5]), [6]),
        (Asked(stops=[2, 3], min_tokens=2, drawn=[1]), [2, 3]),
        (Asked(stops=[2, 3], min_tokens=1, drawn=[1]), []),
        (Asked(allowed=[3, 4, 5], words=[[4]], stops=[5], min_tokens=1), [t for t in range(50) if t != 3]),
    ],
    ids=repr,
)
def test_forbidden_tokens_are_minus_infinity(row: Asked, tokens: list[int]) -> None:
    assert forbidden(row) == tokens


def test_biases_are_added_before_penalties() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 5] = -1.0
    row = Asked(biases={5: 3.0, 6: -1.0}, counted={5: 0, 6: 0}, penalties=(2.0, 0.0, 0.0))
    assert shaped(logits, row)[0, 5:7].tolist() == [1.0, -2.0]  # (-1 + 3) / 2 and (0 - 1) * 2


def test_bias_does_not_allow_a_forbidden_token() -> None:
    row = Asked(allowed=[1], words=[[2]], biases={2: 100.0, 3: 100.0}, counted={3: 4}, penalties=(0.5, -2.0, -2.0))
    assert forbidden(row) == [token for token in range(50) if token != 1]


def test_penalties_distinguish_prompt_from_sampled_tokens() -> None:
    logits = torch.full((1, VOCABULARY), 4.0)
    row = Asked(counted={1: 0, 2: 1, 3: 3}, penalties=(2.0, 0.25, 0.5))
    assert shaped(logits, row)[0, :4].tolist() == [4.0, 2.0, 1.25, 0.75]


ids = st.integers(0, VOCABULARY - 1)
asked = st.builds(
    Asked,
    allowed=st.one_of(st.just([]), st.lists(ids, unique=True, max_size=12)),
    words=st.lists(st.lists(ids, min_size=1, max_size=3), max_size=4),
    stops=st.lists(ids, max_size=3),
    biases=st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=5),
    counted=st.dictionaries(ids, st.integers(0, 5), max_size=20),
    penalties=st.tuples(st.floats(0.015625, 10, width=32), st.floats(-2, 2, width=32), st.floats(-2, 2, width=32)),
    min_tokens=st.integers(0, 4),
    drawn=st.lists(st.integers(0, 5), max_size=5),
    room=st.just(0),
)


@given(st.lists(asked, min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_any_mix_of_rows_is_shaped_as_the_reference_shapes_it(rows: list[Asked], random: Any) -> None:
    edits = edits_of(*rows)
    torch.manual_seed(random.randrange(2**31))
    wide = torch.randn(len(rows) + 3, VOCABULARY + 5) * 3
    lines = torch.tensor(random.sample(range(len(wide)), len(rows)))
    order = torch.tensor(random.sample(range(len(rows)), len(rows)))
    found, expected = wide.clone(), wide.clone()
    shape_logits(found[:, :VOCABULARY], lines, order, edits)
    reference.shape_logits(expected[:, :VOCABULARY], lines, order, edits)
    # Sums of up to some hundreds are rounded to steps of up to 3e-5 and may cancel to a small result.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=5e-5)
    # Lines that are not listed, and the gaps between rows, are unchanged.
    others = [line for line in range(len(wide)) if line not in lines.tolist()]
    assert torch.equal(found[others], wide[others]) and torch.equal(found[:, VOCABULARY:], wide[:, VOCABULARY:])


@given(st.lists(st.tuples(ids, ids, ids), max_size=90))
def test_counts_follow_sampled_tokens(draws: list[tuple[int, int, int]]) -> None:
    rows = (Asked(counted={1: 0, 2: 3}, room=60), Asked(words=[[1, 2]]), Asked(counted={5: 1}, room=60))
    found, expected = edits_of(*rows), edits_of(*rows)
    order = torch.tensor([2, 0, 1])
    for tokens in draws:
        count_tokens(torch.tensor(tokens), order, found)
        assert reference.count_tokens(torch.tensor(tokens), order, expected)
    for column in ("ids", "bounds", "num_drawn", "tails"):
        assert torch.equal(getattr(found, column), getattr(expected, column))
    torch.testing.assert_close(found.values, expected.values, equal_nan=True, rtol=0, atol=0)
    assert found.bounds[1, 4:].unique().numel() == 1, "a row without penalties counts nothing"
    assert reference.last_drawn(0, found) == [tokens[1] for tokens in draws][-TAIL:]


@pytest.mark.parametrize("rows", [1, 40])
def test_threads_share_the_rows(rows: int, threads: int) -> None:
    row = Asked(counted={token: 1 for token in range(20)}, penalties=(1.5, 0.5, 0.5), room=40)
    edits, logits = edits_of(*[row] * rows), torch.randn(rows, VOCABULARY)
    expected = logits.clone()
    shape_logits(logits, every(edits), every(edits), edits)
    reference.shape_logits(expected, every(edits), every(edits), edits)
    torch.testing.assert_close(logits, expected)
    count_tokens(torch.full((rows,), 30), every(edits), edits)
    assert edits.bounds[:, 5].sub(edits.bounds[:, 4]).tolist() == [21] * rows


def test_a_row_without_room_is_refused_and_the_pool_left_whole() -> None:
    edits = edits_of(Asked(counted={1: 0}, room=1), Asked(counted={1: 0}, room=5))
    count_tokens(torch.tensor([2]), torch.tensor([0]), edits)
    count_tokens(torch.tensor([2]), torch.tensor([0]), edits)
    with pytest.raises(ArgumentError, match="count_tokens: edits have a row without room for another id"):
        count_tokens(torch.tensor([3]), torch.tensor([0]), edits)
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
def test_invalid_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    one = torch.zeros(1, dtype=torch.int64)
    given = {"logits": torch.zeros(1, VOCABULARY), "lines": one, "rows": one, "edits": edits_of(Asked()), **change}
    with pytest.raises(ArgumentError, match=message):
        shape_logits(**given)
