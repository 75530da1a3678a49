from typing import Any

import pytest
import torch

from quire_kernels.errors import ArgumentError
from quire_kernels.logprobs import Logprobs, reference, token_logprobs


def check(found: Logprobs, expected: Logprobs) -> None:
    assert found.rank.tolist() == expected.rank.tolist()
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    for name in ("of_token", "logprobs"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("most", [0, 1, 5, 20])
@pytest.mark.parametrize("vocabulary", [20, 127, 1003, 5000])
def test_logprobs_equal_the_reference(vocabulary: int, most: int, dtype: torch.dtype, threads: int) -> None:
    logits = (4.0 * torch.randn(9, vocabulary + 3)).to(dtype)[:, :vocabulary]  # rows apart; 16 bits make equals
    lines = torch.tensor([8, 0, 0, 3, 5])
    tokens = torch.randint(vocabulary, (5,))
    check(token_logprobs(logits, lines, tokens, most), reference.token_logprobs(logits, lines, tokens, most))


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_most_likely_tokens_are_found_at_any_position(order: str) -> None:
    logits = torch.arange(700.0)[None] / 100
    logits = logits if order == "rising" else logits.flip(1)
    line, token = torch.tensor([0]), torch.tensor([3])
    check(token_logprobs(logits, line, token, 20), reference.token_logprobs(logits, line, token, 20))


def test_logprobs_of_the_whole_vocabulary_can_be_reported() -> None:
    logits = torch.randn(1, 30)
    found = token_logprobs(logits, torch.tensor([0]), torch.tensor([7]), 30)
    assert sorted(found.token_ids[0].tolist()) == list(range(30))
    assert float(found.logprobs.exp().sum()) == pytest.approx(1.0)


def test_ties_report_the_first_and_share_the_best_rank() -> None:
    found = token_logprobs(torch.zeros(2, 400), torch.tensor([0, 1]), torch.tensor([0, 399]), 3)
    assert found.token_ids.tolist() == [[0, 1, 2]] * 2 and found.rank.tolist() == [1, 1]


def test_excluded_token_has_no_probability() -> None:
    logits = torch.zeros(1, 300)
    logits[0, 4] = -torch.inf
    found = token_logprobs(logits, torch.tensor([0]), torch.tensor([4]), 2)
    assert float(found.of_token[0]) == -torch.inf and int(found.rank[0]) == 300


def test_a_row_without_numbers_names_tokens_of_the_vocabulary() -> None:
    found = token_logprobs(torch.full((1, 300), torch.nan), torch.tensor([0]), torch.tensor([4]), 20)
    assert all(0 <= token < 300 for token in found.token_ids[0].tolist())


def test_large_logits_do_not_overflow() -> None:
    logits = torch.full((1, 1000), 30_000.0)
    found = token_logprobs(logits, torch.tensor([0]), torch.tensor([1]), 1)
    assert float(found.of_token[0]) == pytest.approx(-6.9078, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(5)}, "token_logprobs: logits have shape"),
        ({"logits": torch.zeros(2, 5, dtype=torch.float64)}, "token_logprobs: logits is torch.float64"),
        ({"most": 6}, "token_logprobs: most is 6; 0 to 5 is needed"),
        ({"most": -1}, "token_logprobs: most is -1"),
        ({"lines": torch.zeros(2, dtype=torch.int64)}, "token_logprobs: lines is"),
        ({"token_ids": torch.zeros(1)}, "token_logprobs: token_ids is torch.float32"),
    ],
)
def test_invalid_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ArgumentError, match=message):
        token_logprobs(**{"logits": torch.zeros(2, 5), "lines": one, "token_ids": one, "most": 1, **change})
