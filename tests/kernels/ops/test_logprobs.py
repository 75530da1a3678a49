from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.dispatch import implementation
from quire_kernels.errors import ArgumentError
from quire_kernels.logprobs import Logprobs, reference, token_logprobs


def check(logits: Tensor, lines: list[int], tokens: list[int], most: int) -> Logprobs:
    named, chosen = torch.tensor(lines), torch.tensor(tokens)
    found = token_logprobs(logits, named.to(logits.device), chosen.to(logits.device), most)
    expected = reference.token_logprobs(logits.cpu(), named, chosen, most)
    assert found.rank.tolist() == expected.rank.tolist()
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    for name in ("of_token", "logprobs"):
        torch.testing.assert_close(getattr(found, name).cpu(), getattr(expected, name), rtol=1e-5, atol=1e-5)
    return found


@pytest.mark.parametrize(
    ("vocabulary", "most"), [(20, 20), (33, 0), (33, 33), (127, 5), (1003, 20), (5000, 1), (5000, 20)]
)
def test_logprobs_equal_the_reference(
    vocabulary: int, most: int, dtype: torch.dtype, threads: int, strided: Callable[..., Tensor]
) -> None:
    logits = strided(9, vocabulary, dtype=dtype) * 4  # 16 bits produce equal values
    check(logits, [8, 0, 0, 3, 5], [vocabulary - 1, 5, 0, 7, 3], most)


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_most_likely_tokens_are_found_at_any_position(order: str, device: torch.device) -> None:
    logits = torch.arange(5000.0, device=device)[None] / 100
    check(logits if order == "rising" else logits.flip(1), [0], [3], 20)


def test_ties_report_the_first_and_share_the_best_rank(device: torch.device) -> None:
    found = check(torch.zeros(2, 4000, device=device), [0, 1], [0, 3999], 3)
    assert found.token_ids.tolist() == [[0, 1, 2]] * 2 and found.rank.tolist() == [1, 1]


def test_logprobs_of_the_whole_vocabulary_add_up(device: torch.device) -> None:
    found = check(torch.randn(1, 30, device=device), [0], [7], 30)
    assert float(found.logprobs.exp().sum()) == pytest.approx(1.0)


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
    (named,) = token_logprobs(logits, one + 1, one, 20).token_ids.tolist()
    assert all(0 <= token < 300 for token in named), "a row without numbers names tokens of the vocabulary"


def test_large_logits_do_not_overflow(device: torch.device) -> None:
    one = torch.tensor([0], device=device)
    found = token_logprobs(torch.full((1, 1000), 30_000.0, device=device), one, one + 1, 1)
    assert float(found.of_token[0]) == pytest.approx(-6.9078, abs=1e-4)


def test_candidates_beyond_a_list_are_searched_in_the_row(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels on a CPU have no such list."""
    monkeypatch.setattr(implementation("logprobs", device.type), "MOST_CANDIDATES", 4, raising=False)
    check(torch.randn(1, 700, device=device).half(), [0], [3], 40)


@pytest.mark.parametrize("rows_at_once", [1024, 3])
def test_a_rows_report_does_not_depend_on_its_batch(
    rows_at_once: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementation("logprobs", device.type), "_MOST_ROWS", rows_at_once, raising=False)
    logits = torch.randn(5, 3000, device=device)
    lines = torch.arange(5, device=device)
    together = token_logprobs(logits, lines, lines + 3, 4)
    alone = token_logprobs(logits, lines[2:3], lines[2:3] + 3, 4)
    for name in ("of_token", "rank", "token_ids", "logprobs"):
        assert torch.equal(getattr(alone, name), getattr(together, name)[2:3])


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
def test_invalid_arguments_are_refused(change: dict[str, Any], message: str, device: torch.device) -> None:
    one = torch.zeros(1, dtype=torch.int64)
    given = {"logits": torch.zeros(2, 5), "lines": one, "token_ids": one, "most": 1, **change}
    with pytest.raises(ArgumentError, match=message):
        token_logprobs(**{name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()})
