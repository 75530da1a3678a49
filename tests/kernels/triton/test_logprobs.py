"""Log-probabilities in Triton equal those of the reference."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.logprobs import Logprobs, kernel, reference, token_logprobs

Strided = Callable[..., Tensor]


def check(logits: Tensor, lines: list[int], tokens: list[int], most: int) -> Logprobs:
    named, chosen = torch.tensor(lines), torch.tensor(tokens)
    found = token_logprobs(logits, named.to(logits.device), chosen.to(logits.device), most)
    expected = reference.token_logprobs(logits.cpu(), named, chosen, most)
    assert found.rank.tolist() == expected.rank.tolist()
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    for name in ("of_token", "logprobs"):
        torch.testing.assert_close(getattr(found, name).cpu(), getattr(expected, name), rtol=1e-5, atol=1e-5)
    return found


@pytest.mark.parametrize(("vocabulary", "most"), [(33, 0), (33, 33), (1003, 20), (5000, 1)])
def test_logprobs_equal_the_reference(vocabulary: int, most: int, dtype: torch.dtype, strided: Strided) -> None:
    logits = strided(4, vocabulary, dtype=dtype) * 4  # 16 bits produce equal values
    check(logits, [3, 0, 0], [vocabulary - 1, 5, 0], most)


def test_ties_report_the_first_and_share_the_best_rank(device: torch.device) -> None:
    logits = torch.zeros(2, 4000, device=device)
    found = check(logits, [0, 1], [0, 3999], 3)
    assert found.token_ids.tolist() == [[0, 1, 2]] * 2 and found.rank.tolist() == [1, 1]


def test_candidates_beyond_the_list_are_searched_in_the_row(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "MOST_CANDIDATES", 4)
    check(torch.randn(1, 700, device=device).half(), [0], [3], 40)


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_most_likely_tokens_are_found_at_any_position(order: str, device: torch.device) -> None:
    logits = torch.arange(5000.0, device=device)[None] / 100
    check(logits if order == "rising" else logits.flip(1), [0], [3], 5)


# The interpreter's numpy warns of infinities and NaN, on which the kernels rely as in IEEE 754.
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_tokens_that_cannot_be_sampled_are_last(device: torch.device) -> None:
    logits = torch.full((2, 300), -torch.inf, device=device)
    logits[0, [7, 200]] = torch.tensor([0.0, 30_000.0], device=device)
    logits[1] = torch.nan
    one = torch.tensor([0], device=device)
    found = token_logprobs(logits, one, one + 4, 5)
    assert float(found.of_token[0]) == -torch.inf and int(found.rank[0]) == 3
    assert found.token_ids.tolist() == [[200, 7, 0, 1, 2]]
    assert found.logprobs.tolist() == [[0.0, -30_000.0, -torch.inf, -torch.inf, -torch.inf]]
    nowhere = token_logprobs(logits, one + 1, one, 5)
    assert nowhere.token_ids.tolist() == [[0, 1, 2, 3, 4]], "a row without numbers names tokens of the vocabulary"


@pytest.mark.parametrize("rows_at_once", [1024, 3])
def test_a_rows_report_does_not_depend_on_its_batch(
    rows_at_once: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_MOST_ROWS", rows_at_once)
    logits = torch.randn(5, 3000, device=device)
    lines = torch.arange(5, device=device)
    together = token_logprobs(logits, lines, lines + 3, 4)
    alone = token_logprobs(logits, lines[2:3], lines[2:3] + 3, 4)
    for name in ("of_token", "rank", "token_ids", "logprobs"):
        assert torch.equal(getattr(alone, name), getattr(together, name)[2:3])
