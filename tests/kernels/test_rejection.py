from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.errors import ArgumentError
from quire_kernels.rejection import Verified, reference, verify_drafts
from quire_kernels.sampling import sample
from quire_kernels.sampling.reference import keep_mask

# 99.99 % of chi-square's mass, by degrees of freedom.
CHI_SQUARE = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 5: 25.74}
VOCABULARY = 6


def columns(rows: int, vocabulary: int = VOCABULARY, **changes: float) -> dict[str, Tensor]:
    chosen = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, **changes}
    made = {name: torch.full((rows,), chosen[name]) for name in ("temperature", "top_p", "min_p", "typical_p")}
    made["top_k"] = torch.full((rows,), int(chosen.get("top_k", vocabulary)))
    made["seeds"] = torch.full((rows,), 11)
    made["positions"] = torch.arange(rows)
    return made


def pairs(sequences: int) -> Tensor:
    """Starts of sequences of one draft each."""
    return 2 * torch.arange(sequences + 1)


Draft = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]
"""(model's probabilities, how many) to what is drafted, and from what."""


def near(model: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
    probs = (model.log() + torch.tensor([0.7, -0.5, 0.3, -0.9, 0.1, 0.4])).softmax(dim=0)
    return probs.multinomial(count, replacement=True), probs


def far(model: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
    probs = 1.0 - model
    probs /= probs.sum()
    return probs.multinomial(count, replacement=True), probs


def certain(model: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
    return torch.full((count,), 2), None


@pytest.mark.parametrize("draft", [near, far, certain])
@pytest.mark.parametrize("changes", [{}, {"top_k": 4, "temperature": 0.7}, {"top_p": 0.8}], ids=str)
def test_what_comes_out_is_distributed_as_what_the_model_draws(draft: Draft, changes: dict[str, float]) -> None:
    """However good or bad the draft: arXiv 2211.17192, appendix A.1."""
    count = 1500
    logits = torch.tensor([1.2, 0.1, 0.6, -0.4, 0.9, -1.0])
    drafted, probs = draft(logits.softmax(dim=0), count)
    drafts = torch.stack((drafted, torch.zeros_like(drafted)), dim=1).view(-1)  # [2 count]
    rows = 2 * count
    spread = None if probs is None else probs.expand(rows, -1).contiguous()
    found = verify_drafts(
        logits.expand(rows, -1).contiguous(), drafts, pairs(count), spread, **columns(rows, **changes)
    )
    first = found.token_ids[::2]
    full = {"temperature": 1.0, "top_k": VOCABULARY, "top_p": 1.0, "min_p": 0.0, **changes}
    keep = keep_mask(logits, **full)  # type: ignore[arg-type]
    weights = (logits / full["temperature"]).softmax(dim=0) * keep
    expected = count * weights[keep] / weights.sum()
    counts = torch.bincount(first, minlength=VOCABULARY)
    assert counts[~keep].sum() == 0
    assert float(((counts[keep] - expected) ** 2 / expected).sum()) < CHI_SQUARE[int(keep.sum()) - 1]
    assert set(found.num_tokens.tolist()) == {1, 2}, "some drafts were accepted, some not"


def test_as_many_drafts_are_accepted_as_the_distributions_overlap() -> None:
    count = 1500
    logits = torch.tensor([1.2, 0.1, 0.6, -0.4, 0.9, -1.0])
    model = logits.softmax(dim=0)
    drafted, probs = near(model, count)
    assert probs is not None
    drafts = torch.stack((drafted, drafted), dim=1).view(-1)
    spread = [tensor.expand(2 * count, -1).contiguous() for tensor in (logits, probs)]
    found = verify_drafts(spread[0], drafts, pairs(count), spread[1], **columns(2 * count))
    share = float((found.num_tokens == 2).float().mean())
    assert share == pytest.approx(float(torch.minimum(model, probs).sum()), abs=0.05)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_certain_drafts_give_token_for_token_what_is_drawn_without_them(temperature: float) -> None:
    logits = torch.randn(400, 50)
    settings = columns(400, 50, temperature=temperature)
    plain = sample(logits, **settings)
    drafts = torch.where(torch.rand(400) < 0.7, plain, (plain + 1) % 50)
    starts = torch.cat((torch.zeros(1), torch.randint(0, 6, (120,)).cumsum(0).clamp(max=400))).long()
    starts[-1] = 400
    found = verify_drafts(logits, drafts, starts, None, **settings)
    expected = reference.verify_drafts(logits, drafts, starts, None, **settings)
    assert torch.equal(found.token_ids, plain) and torch.equal(found.num_tokens, expected.num_tokens)


def judged(drafts: list[int], logits: Tensor, probs: Tensor | None) -> Verified:
    """One sequence at temperature 0."""
    starts = torch.tensor([0, len(drafts)])
    return verify_drafts(logits, torch.tensor(drafts), starts, probs, **columns(len(drafts), temperature=0.0))


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize(
    ("drafts", "tokens"), [([3, 1, 5, 0], [3, 1, 5, 2]), ([3, 1, 4, 0], [3, 1, 5]), ([0, 1, 5, 0], [3]), ([9], [3])]
)
def test_greedy_drafts_are_accepted_up_to_the_first_wrong_one(
    drafts: list[int], tokens: list[int], with_probs: bool
) -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([3, 1, 5, 2]), VOCABULARY).float()[: len(drafts)]
    found = judged(drafts, logits, torch.full_like(logits, 1 / VOCABULARY) if with_probs else None)
    assert found.token_ids[: int(found.num_tokens[0])].tolist() == tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 6).half()}, "verify_drafts: logits are torch.float16"),
        ({"logits": torch.zeros(6, 2).t()}, "verify_drafts: logits has strides"),
        ({"draft_probs": torch.zeros(2, 5)}, r"verify_drafts: draft_probs are .*float32 \(2, 6\)"),
        ({"starts": torch.zeros(0, dtype=torch.int64)}, r"verify_drafts: starts has shape \(0,\); \[sequences \+ 1\]"),
        ({"starts": torch.zeros(2)}, "verify_drafts: starts is torch.float32"),
        ({"drafts": torch.zeros(3, dtype=torch.int64)}, "verify_drafts: drafts is"),
        ({"top_k": torch.ones(2)}, "verify_drafts: top_k is torch.float32"),
    ],
)
def test_refuses_what_it_cannot_take(change: dict[str, Any], message: str) -> None:
    given = {
        "logits": torch.zeros(2, 6),
        "drafts": torch.zeros(2, dtype=torch.int64),
        "starts": torch.tensor([0, 2]),
        "draft_probs": None,
        **columns(2),
        **change,
    }
    with pytest.raises(ArgumentError, match=message):
        verify_drafts(**given)
