"""Drafts are judged in Triton as the reference judges them."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.rejection import Verified, reference, verify_drafts
from quire_kernels.sampling import sample

VOCABULARY = 40


def columns(rows: int, device: torch.device, **changes: float) -> dict[str, Tensor]:
    chosen = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, **changes}
    made = {name: torch.full((rows,), chosen[name]) for name in ("temperature", "top_p", "min_p", "typical_p")}
    made["top_k"] = torch.full((rows,), int(chosen.get("top_k", VOCABULARY)))
    made["seeds"] = torch.arange(rows) % 3 - 1
    made["positions"] = torch.arange(rows) + 5
    return {name: column.to(device) for name, column in made.items()}


def accepted(found: Verified, starts: list[int]) -> list[list[int]]:
    """The tokens of each sequence."""
    counts = found.num_tokens.tolist()
    return [found.token_ids[begin : begin + count].tolist() for begin, count in zip(starts[:-1], counts, strict=True)]


def check(logits: Tensor, drafts: Tensor, starts: list[int], draft_probs: Tensor | None, **changes: float) -> list[int]:
    device = logits.device
    bounds, settings = torch.tensor(starts), columns(len(logits), device, **changes)
    found = verify_drafts(logits, drafts, bounds.to(device), draft_probs, **settings)
    on_cpu = {name: column.cpu() for name, column in settings.items()}
    probs = None if draft_probs is None else draft_probs.cpu()
    expected = reference.verify_drafts(logits.cpu(), drafts.cpu(), bounds, probs, **on_cpu)
    assert accepted(found, starts) == accepted(expected, starts)
    lengths = [end - begin for begin, end in pairwise(starts)]
    assert all(1 <= count <= length for count, length in zip(found.num_tokens.tolist(), lengths, strict=True) if length)
    return found.num_tokens.tolist()


STARTS = [0, 3, 4, 4, 6, 8]
"""Two drafts, none, no rows at all, one and one."""


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.0}, {"temperature": 0.6, "top_k": 9, "top_p": 0.9, "typical_p": 0.9}],
    ids=str,
)
def test_drafts_with_probabilities_are_judged_as_the_reference_judges_them(
    changes: dict[str, float], device: torch.device
) -> None:
    logits = 2.0 * torch.randn(8, VOCABULARY + 3, device=device)[:, :VOCABULARY]
    # A draft that is often right: what it was drawn from is near to what the model says.
    draft_probs = (logits + 0.5 * torch.randn(8, VOCABULARY, device=device)).softmax(dim=1)
    drafts = draft_probs.multinomial(1)[:, 0]
    if changes.get("temperature") == 0.0:
        drafts = logits.argmax(dim=1)
        drafts[4] = (drafts[4] + 1) % VOCABULARY
        assert check(logits, drafts, STARTS, draft_probs, **changes) == [3, 1, 0, 1, 2]
    else:
        check(logits, drafts, STARTS, draft_probs, **changes)


def test_certain_drafts_are_accepted_where_the_model_draws_the_same(device: torch.device) -> None:
    logits = 2.0 * torch.randn(8, VOCABULARY, device=device)
    settings = columns(8, device, top_p=0.9)
    plain = sample(logits, **settings)
    drafts = plain.clone()
    drafts[1], drafts[6] = (drafts[1] + 1) % VOCABULARY, (drafts[6] + 1) % VOCABULARY
    starts = torch.tensor(STARTS, device=device)
    found = verify_drafts(logits, drafts, starts, None, **settings)
    assert found.num_tokens.tolist() == [2, 1, 0, 2, 1]
    assert torch.equal(found.token_ids, plain), "token for token what would have been drawn without drafts"


@pytest.mark.parametrize("with_probs", [False, True])
def test_sequences_without_drafts_draw_as_sample_does(with_probs: bool, device: torch.device) -> None:
    logits = torch.randn(4, VOCABULARY, device=device)
    settings = columns(4, device, top_k=9)
    probs = torch.full((4, VOCABULARY), torch.nan, device=device) if with_probs else None
    drafts = torch.full((4,), 1 << 40, device=device)
    found = verify_drafts(logits, drafts, torch.arange(5, device=device), probs, **settings)
    assert torch.equal(found.token_ids, sample(logits, **settings)) and found.num_tokens.tolist() == [1] * 4


def test_a_draft_from_the_models_own_distribution_is_always_accepted(device: torch.device) -> None:
    logits = torch.randn(5, VOCABULARY, device=device)
    probs = logits.double().softmax(dim=1).float()
    drafts = probs.multinomial(1)[:, 0]
    assert check(logits, drafts, [0, 5], probs) == [5]


def test_a_draft_that_the_model_cannot_draw_is_replaced_by_one_that_it_can(device: torch.device) -> None:
    logits = torch.full((2, VOCABULARY), -torch.inf, device=device)
    logits[:, [3, 7]] = 0.0
    probs = torch.full((2, VOCABULARY), 1.0 / VOCABULARY, device=device)
    settings = columns(2, device)
    found = verify_drafts(
        logits, torch.tensor([5, 0], device=device), torch.tensor([0, 2], device=device), probs, **settings
    )
    assert found.num_tokens.tolist() == [1] and int(found.token_ids[0]) in (3, 7)


def test_no_rows_are_no_work(device: torch.device) -> None:
    none = torch.zeros(0, VOCABULARY, device=device)
    drafts = torch.zeros(0, dtype=torch.int64, device=device)
    starts = torch.zeros(3, dtype=torch.int64, device=device)
    for probs in (None, none):
        assert verify_drafts(none, drafts, starts, probs, **columns(0, device)).num_tokens.tolist() == [0, 0]


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU only the debug build checks, and what it finds ends the process")
def test_debug_builds_refuse_a_draft_beyond_the_vocabulary(device: torch.device) -> None:
    logits = torch.zeros(2, VOCABULARY)
    drafts, starts = torch.tensor([VOCABULARY, 0]), torch.tensor([0, 2])
    with pytest.raises(Exception, match="verify_drafts: drafts leave the vocabulary"):
        verify_drafts(logits, drafts, starts, logits.softmax(dim=1), **columns(2, device))
