"""The committed prompts: some of each kind are recomputed with transformers."""

import json
from collections import Counter
from itertools import combinations

import pytest

from e2e_support.traffic.choose_prompts import COUNTS, SHARED_BLOCKS
from e2e_support.traffic.prompts import BLOCK_TOKENS, DATA, MARGIN, Kind, Message, Prompt, load, of_kind, save
from e2e_support.traffic.reference import Reference

TOLERANCE = 1e-3
"""The bound for the effect of a batch on a lead, in standard deviations of the logits (engine.md §1)."""


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def ids_of(reference: Reference, prompt: Prompt) -> list[int]:
    return reference.encode_chat(prompt.messages) if prompt.text is None else reference.encode(prompt.text)


def test_every_prompt_kind_is_present():
    assert Counter(prompt.kind for prompt in load()) == COUNTS
    assert all(prompt.prompt_tokens <= BLOCK_TOKENS and len(prompt.token_ids) == 16 for prompt in of_kind(Kind.SHORT))
    assert all(prompt.prompt_tokens >= 8 * BLOCK_TOKENS for prompt in of_kind(Kind.DEEP))
    assert all(len(prompt.token_ids) >= 150 for prompt in of_kind(Kind.LONG))
    assert all(prompt.finish_reason == "stop" for prompt in of_kind(Kind.CHAT, Kind.SHARED))


def test_every_margin_exceeds_batch_and_dtype_noise():
    for prompt in load():
        assert prompt.margin >= MARGIN >= 100 * TOLERANCE, prompt.name
        assert prompt.bfloat16_shift <= MARGIN / 2, prompt.name


def test_prompts_round_trip_through_the_file(tmp_path):
    save(load(), tmp_path / "prompts.json")
    assert (tmp_path / "prompts.json").read_text() == DATA.read_text()
    assert len(json.loads(DATA.read_text())) == len(load())


@pytest.mark.parametrize("prompt", load(), ids=lambda prompt: prompt.name)
def test_reference_model_still_gives_the_recorded_answers(reference, prompt):
    """Run one pass over prompt and answer. If each token leads all others, greedy decoding produces them one by one."""
    ids = ids_of(reference, prompt)
    leads = reference.leads(ids, prompt.token_ids, rounded=False)
    assert (len(ids), min(leads)) == (prompt.prompt_tokens, pytest.approx(prompt.margin, abs=0.005))
    assert reference.decode([*ids, *prompt.token_ids]) == reference.decode(ids) + prompt.answer
    ends = [token in reference.stops for token in prompt.token_ids]
    assert ends == [False] * (len(ends) - 1) + [prompt.finish_reason == "stop"]
    # The engine computes in bfloat16 if the CPU supports it.
    assert min(reference.leads(ids, prompt.token_ids, rounded=True)) >= MARGIN / 2


@pytest.mark.parametrize("prompt", [of_kind(Kind.SHORT)[0], of_kind(Kind.CHAT)[0]], ids=lambda prompt: prompt.name)
def test_a_continuation_token_by_token_is_the_same(reference, prompt):
    found = reference.continue_greedily(ids_of(reference, prompt), prompt.max_tokens, MARGIN)
    assert (found.token_ids, found.finish_reason) == (prompt.token_ids, prompt.finish_reason)
    assert found.margin == pytest.approx(prompt.margin, abs=0.005)


def test_shared_prefix_chats_share_blocks_and_then_differ(reference):
    encoded = [reference.encode_chat(prompt.messages) for prompt in of_kind(Kind.SHARED)]
    for one, other in combinations(encoded, 2):
        shared = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        assert shared >= SHARED_BLOCKS * BLOCK_TOKENS
    others = [prompt for prompt in load() if prompt.kind is not Kind.SHARED]
    starts = {prompt.name: tuple(ids_of(reference, prompt)[:BLOCK_TOKENS]) for prompt in others}
    assert len(set(starts.values())) >= len(starts) / 2, "most begin with a block of their own"


def test_continuation_ends_at_a_narrow_margin(reference):
    ids = reference.encode_chat([Message(role="user", content="Tell me a story about the sea.")])
    assert len(reference.continue_greedily(ids, 64, margin=2.0).token_ids) < 64
