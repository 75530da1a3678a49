"""Answers that share a prompt, and swapped sequences, give with a real model the tokens of a request alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request

ANSWERS = 8
PROMPT = [(place * 37 + 11) % 240 + 3 for place in range(203)]
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)


def alone(start: Callable[..., Any], folder: Path) -> dict[int, list[int]]:
    """Return each answer from a separate request, one after another."""
    engine = start(folder, enable_prefix_caching=False)
    for seed in range(ANSWERS):
        engine.add(seed, PROMPT, SAMPLED, seed=seed)
        engine.finish()
    answers: dict[int, list[int]] = engine.tokens
    return answers


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [1024, 64])
def test_parallel_samples_equal_single_requests(
    make_folder: Callable[..., Path], start: Callable[..., Any], caching: bool, budget: int
) -> None:
    folder = make_folder()
    scheduler = SchedulerOptions(max_num_seqs=16, max_num_batched_tokens=budget)
    forked = start(folder, enable_prefix_caching=caching, scheduler=scheduler)
    for seed in range(ANSWERS):
        forked.tokens[seed], forked.logprobs[seed] = [], []
        parent = 0 if seed else None
        request = Request(key=seed, prompt_token_ids=PROMPT, params=SAMPLED, seed=seed, parent=parent)
        assert forked.engine.add(request) is None
    forked.finish()
    # Twelve full blocks of sixteen are shared; eleven tokens and the answer are separate.
    assert forked.engine.counters.scheduled_tokens == 203 + 7 * 11 + ANSWERS * 11
    answers = alone(start, folder)
    assert forked.tokens == answers
    assert len({tuple(answer) for answer in answers.values()}) > 1


WINDOWED = {"head_dim": 16, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(("family", "fields"), [("llama", {}), ("gemma3_text", WINDOWED)])
@pytest.mark.parametrize("caching", [True, False])
def test_swapped_sequence_continues_unchanged(
    make_folder: Callable[..., Path], start: Callable[..., Any], family: str, fields: dict[str, Any], caching: bool
) -> None:
    folder = make_folder(family, **fields)
    prompts = {key: [(place * 31 + key) % 240 + 3 for place in range(50)] for key in range(4)}
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    said = {}
    for kv_bytes in (64 * 2**20, 96 * 2**10):
        scheduler = SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=256, preemption_mode="swap")
        engine = start(
            folder,
            scheduler=scheduler,
            kv_cache_memory_bytes=kv_bytes,
            swap_space_bytes=16 * 2**20,
            max_model_len=100,
            enable_prefix_caching=caching,
        )
        for key, prompt in prompts.items():
            engine.add(key, prompt, params)
        engine.finish()
        said[kv_bytes] = engine.tokens
    counters = engine.engine.counters
    assert counters.preemptions["swap:forced"] > 0 and counters.recomputed_tokens == 0
    assert counters.swapped_out_blocks > 0 and counters.scheduled_tokens == 4 * (50 + 39)
    calm, tight = said.values()
    assert tight == calm
