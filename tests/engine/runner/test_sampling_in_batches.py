"""Seeds through the whole engine: the same request says the same, whatever runs beside it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire_engine.core.sampling_params import SamplingParams

PROMPTS = [[5], list(range(3, 20)), list(range(40, 75)), [9] * 33]


@pytest.mark.parametrize(
    "params",
    [{}, {"top_p": 0.9, "temperature": 0.7}, {"top_k": 20, "repetition_penalty": 1.3, "frequency_penalty": 0.5}],
    ids=str,
)
def test_a_seed_draws_the_same_text_alone_and_in_a_batch(
    params: dict[str, Any],
    make_folder: Callable[..., Path],
    start: Callable[..., Any],
    sampled: Callable[..., SamplingParams],
) -> None:
    running = start(make_folder())
    for key, prompt in enumerate(PROMPTS):
        running.add(key, prompt, sampled(**params), seed=key)
    running.finish()
    for key, prompt in enumerate(PROMPTS):
        running.add(10 + key, prompt, sampled(**params), seed=key)
        running.finish()
    for key in range(len(PROMPTS)):
        assert running.tokens[key] == running.tokens[10 + key]
    assert len({tuple(tokens) for tokens in running.tokens.values()}) == len(PROMPTS)


def test_a_seed_draws_the_same_text_after_preemption(
    make_folder: Callable[..., Path], start: Callable[..., Any], sampled: Callable[..., SamplingParams]
) -> None:
    params = sampled(max_tokens=40, presence_penalty=0.4)
    roomy, tight = (
        start(make_folder(), enable_prefix_caching=False, **options)
        for options in ({}, {"kv_cache_memory_bytes": 7 * 16 * 512})
    )
    for running in (roomy, tight):
        for key, prompt in enumerate(PROMPTS):
            running.add(key, prompt, params, seed=key)
        running.finish()
    assert sum(tight.engine.counters.preemptions.values()) > 0
    assert tight.tokens == roomy.tokens


def test_logprobs_reach_the_one_who_asked(
    make_folder: Callable[..., Path], start: Callable[..., Any], sampled: Callable[..., SamplingParams]
) -> None:
    running = start(make_folder())
    running.add(1, [5, 6], sampled(logprobs=2, max_tokens=4))
    running.add(2, [5, 6], sampled(max_tokens=4))
    running.finish()
    assert [entry.token_ids[0] for entry in running.logprobs[1]] == running.tokens[1]
    assert all(len(entry.token_ids) == len(entry.logprobs) == 3 for entry in running.logprobs[1])
    assert not running.logprobs[2]
