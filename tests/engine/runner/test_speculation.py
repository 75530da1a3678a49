"""Speculation through the whole engine on a CPU: the tokens and logprobs are those without it."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixed_drafts import use_every_draft

from quire_engine.config import SpeculationOptions
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.runner.logprobs import before_and_at_drafts
from quire_engine.runner.verification import verify

VOCABULARY = 250


@pytest.mark.parametrize(
    ("sampled", "token_ids", "places", "drafts", "expected"),
    [
        ([7], [1], [0], [0], [1]),
        ([7, 8, 9], [1, 7, 8], [0, 1, 2], [2], [3]),  # all accepted
        ([7, 8, 9], [1, 7, 5], [0, 1, 2], [2], [2]),
        ([7, 8, 9], [1, 6, 8], [0, 1, 2], [2], [1]),  # the second counts for nothing without the first
        ([7, 8, 9, 4, 5], [1, 7, 8, 2, 4], [0, 1, 2, 3, 4], [2, 1], [3, 2]),
        ([8, 3, 6, 5], [1, 2, 7, 3, 9, 5, 5], [1, 4, 5, 6], [0, 2], [1, 1]),  # a prompt of two tokens in the batch
        ([3, 5, 5, 5], [7, 3, 5, 5], [0, 1, 2, 3], [1, 1], [2, 2]),  # the next sequence's token is not a draft
    ],
)
def test_drafts_are_accepted_up_to_the_first_difference(
    sampled: list[int], token_ids: list[int], places: list[int], drafts: list[int], expected: list[int]
) -> None:
    columns = (np.asarray(column, dtype=np.int64) for column in (sampled, token_ids, places, drafts))
    assert verify(*columns).tolist() == expected


def test_places_before_and_at_drafts() -> None:
    assert before_and_at_drafts(np.array([4, 5, 9]), np.array([2, 0, 1])).tolist() == [2, 3, 4, 5, 8, 9]


NGRAM = SpeculationOptions(max_tokens=7, shortest_match=1, longest_match=3)


def speculating(start: Callable[..., Any], folder: Path, options: SpeculationOptions = NGRAM, **changes: Any) -> Any:
    """Return an engine whose drafts seem to cost nothing, so that each sequence has as many as it can."""
    running = start(folder, speculation=options, **changes)
    use_every_draft(running.engine._scheduler._speculation)
    return running


def random_params(chance: random.Random) -> SamplingParams:
    """Return parameters of which most allow drafts; few tokens are probable, so that many drafts are accepted."""
    choose = chance.choice
    return SamplingParams(
        max_tokens=chance.randrange(1, 40),
        temperature=choose([0.0, 0.0, 0.3, 1.0]),
        top_k=choose([None, 2, 5]),
        top_p=choose([1.0, 0.9]),
        min_p=choose([0.0, 0.0, 0.1]),
        typical_p=choose([1.0, 1.0, 0.9]),
        presence_penalty=choose([0.0] * 5 + [1.0]),
        frequency_penalty=choose([0.0] * 8 + [0.5]),
        repetition_penalty=choose([1.0] * 8 + [1.2]),
        logit_bias=choose([(), (), ((3, 5.0), (9, -3.0))]),
        allowed_token_ids=choose([None, None, (4, 5, 6, 7), tuple(range(20))]),
        bad_words_token_ids=choose([()] * 8 + [((4,), (5, 6))]),
        stop_token_ids=choose([(), (), (6, 11, 40)]),
        min_tokens=choose([0] * 8 + [5]),
        ignore_eos=choose([True, False]),
        logprobs=choose([None, None, 0, 3]),
        prompt_logprobs=choose([None, None, None, 1]),
    )


def random_requests(count: int, seed: int) -> list[tuple[list[int], SamplingParams, int]]:
    chance = random.Random(seed)
    requests = []
    for _ in range(count):
        piece = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 6))]
        prompt = (piece * 9)[: chance.randrange(1, 40)]
        requests.append((prompt, random_params(chance), chance.getrandbits(64)))
    return requests


def play(running: Any, requests: list[Any], *, cancelled: set[int], first_key: int = 0) -> None:
    """Add requests a few at a time, and cancel some of them on the way."""
    for place, (prompt, params, seed) in enumerate(requests):
        running.add(first_key + place, prompt, params, seed=seed)
        if place in cancelled:
            running.step()
            running.engine.cancel(first_key + place)
        if place % 3 == 2:
            running.step()
        running.engine.check_integrity()
    running.finish()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"enable_prefix_caching": False, "preemption_mode": "recompute"}),
        ("llama", {"preemption_mode": "swap"}),
        ("mistral", {"sliding_window": 24}),
        ("llama", {"draft": True, "preemption_mode": "swap"}),
    ],
)
def test_1000_random_requests_answer_as_without_speculation(
    make_folder: Callable[..., Path], start: Callable[..., Any], family: str, changes: dict[str, Any]
) -> None:
    """Run 200 requests in each of five set-ups, all with preemption: 16 sequences in a cache of 26 blocks."""
    fields = {"sliding_window": 24} if family == "mistral" else {}
    folder = make_folder(family, **fields)
    scheduler = SchedulerOptions(
        max_num_seqs=16,
        max_num_batched_tokens=64,
        preemption_mode=changes.get("preemption_mode", "auto"),
        max_generation_stall_seconds=0.0,
    )
    options = {
        "deterministic": True,
        "scheduler": scheduler,
        "max_model_len": 100,
        "kv_cache_memory_bytes": 26 * 16 * 2 * 2 * 2 * 16 * 4,
        "enable_prefix_caching": changes.get("enable_prefix_caching", True),
        "swap_space_bytes": 2**20 if changes.get("preemption_mode") == "swap" else 0,
    }
    requests = random_requests(200, seed=len(str(changes)))
    cancelled = set(range(7, 200, 23))
    plain = start(folder, **options)
    if changes.get("draft"):
        # The draft model is the target itself: it is right unless a request's parameters change the logits.
        speculation = SpeculationOptions(method="draft_model", model=folder, max_tokens=7)
        options["kv_cache_memory_bytes"] *= 2
        drafting = speculating(start, folder, speculation, **options)
    else:
        drafting = speculating(start, folder, **options)
    for running in (plain, drafting):
        play(running, requests, cancelled=cancelled)
    kept = [key for key in range(len(requests)) if key not in cancelled]
    assert [drafting.tokens.get(key) for key in kept] == [plain.tokens.get(key) for key in kept]
    assert [drafting.logprobs.get(key) for key in kept] == [plain.logprobs.get(key) for key in kept]
    counters = drafting.engine.counters
    assert sum(counters.preemptions.values()) > 0
    assert 160 < counters.accepted_tokens < counters.draft_tokens
    assert counters.steps < plain.engine.counters.steps
    assert {"penalties", "bad_words", "min_tokens"} <= set(counters.undrafted_sequences)
    assert drafting.engine.gauges().blocks_used == 0


def test_unseeded_samples_have_the_same_distribution(
    make_folder: Callable[..., Path], start: Callable[..., Any]
) -> None:
    """Two samples of 1,200 answers with other seeds: chi-square of the last two of three tokens, of four each."""
    params = SamplingParams(max_tokens=4, allowed_token_ids=(4, 5, 6, 7), ignore_eos=True)
    prompt = [4, 5, 6, 7, 5, 4, 7, 6, 4, 4, 5, 5, 6, 6, 7, 7]  # any of the four tokens has occurred before
    chance = random.Random(11)
    histograms = []
    for running in (start(make_folder()), speculating(start, make_folder())):
        for key in range(1200):
            running.add(key, prompt, params, seed=chance.getrandbits(64))
        running.finish()
        counted = np.zeros(16)
        for tokens in running.tokens.values():
            counted[(tokens[1] - 4) * 4 + tokens[2] - 4] += 1
        histograms.append(counted)
    drafts = running.engine.counters
    assert 100 < drafts.accepted_tokens < drafts.draft_tokens - 300
    plain, drafting = histograms
    used = plain + drafting > 0
    statistic = (((plain - drafting) ** 2)[used] / (plain + drafting)[used]).sum()
    # The 99.9th percentile with 15 degrees of freedom.
    assert used.sum() >= 8 and statistic < 37.7
