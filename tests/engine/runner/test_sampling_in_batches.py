"""Seeds through the whole engine: the same request gives the same tokens, whatever runs next to it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_engine.core.sampling_params import SamplingParams

PROMPTS = [[5], list(range(3, 20)), list(range(40, 75)), [9] * 33]
VOCABULARY = 250

tokens = st.integers(0, VOCABULARY - 1)
anything = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([1, 5, 60]),
        "top_p": st.sampled_from([0.1, 0.9]),
        "min_p": st.sampled_from([0.01, 0.3]),
        "typical_p": st.sampled_from([0.2, 0.95]),
        "presence_penalty": st.sampled_from([-1.0, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.8, 1.5]),
        "logit_bias": st.dictionaries(tokens, st.floats(-20, 20, width=32), max_size=4).map(
            lambda it: tuple(it.items())
        ),
        "allowed_token_ids": st.lists(tokens, min_size=1, max_size=20).map(tuple),
        "bad_words_token_ids": st.lists(st.lists(tokens, min_size=1, max_size=2).map(tuple), max_size=5).map(tuple),
        "min_tokens": st.integers(1, 8),
        "stop_token_ids": st.lists(tokens, min_size=1, max_size=30).map(tuple),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 2),
    },
)
requests = st.tuples(st.sampled_from(PROMPTS), anything, st.integers(0, 2**64 - 1))


@pytest.fixture(scope="module")
def endless(make_folder: Callable[..., Path], start: Callable[..., Any]) -> Any:
    """Return one engine for all examples, because the rest of earlier ones must not matter either."""
    return start(make_folder())


# The same examples each time: a batch rounds its matrix products differently, which decides between two tokens once in
# many thousand samples.
@settings(derandomize=True)
@given(batch=st.lists(requests, min_size=2, max_size=6))
def test_mixed_batch_equals_each_request_alone(endless: Any, batch: list[Any]) -> None:
    endless.tokens, endless.logprobs, endless.prompt_logprobs = {}, {}, {}
    for key, (prompt, params, seed) in enumerate(batch):
        endless.add(key, prompt, SamplingParams(max_tokens=9, **params), seed=seed)
    endless.finish()
    for key, (prompt, params, seed) in enumerate(batch):
        alone = 100 + key
        endless.add(alone, prompt, SamplingParams(max_tokens=9, **params), seed=seed)
        endless.finish()
        assert endless.tokens[key] == endless.tokens[alone]
        for reports in (endless.logprobs, endless.prompt_logprobs):
            assert [one.token_ids[0] for one in reports.get(key, [])] == [
                one.token_ids[0] for one in reports.get(alone, [])
            ]
        keeps_its_word(SamplingParams(max_tokens=9, **params), endless.tokens[key])


def keeps_its_word(params: SamplingParams, answer: list[int]) -> None:
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (2,))}
    allowed = set(range(VOCABULARY)) if params.allowed_token_ids is None else set(params.allowed_token_ids)
    forbidden = {word[-1] for word in params.bad_words_token_ids} | (stops if params.min_tokens else set())
    if not allowed - forbidden:
        return  # the server rejects such a request, because no token may be left to sample
    assert allowed.issuperset(answer)
    assert not stops.intersection(answer[: params.min_tokens])
    for word in params.bad_words_token_ids:
        assert all(tuple(answer[at : at + len(word)]) != word for at in range(len(answer)))


def test_different_seeds_give_different_outputs(make_folder: Callable[..., Path], start: Callable[..., Any]) -> None:
    running = start(make_folder())
    for seed in range(8):
        running.add(seed, PROMPTS[1], SamplingParams(max_tokens=12, ignore_eos=True), seed=seed)
    running.finish()
    assert len({tuple(answer) for answer in running.tokens.values()}) == 8


def test_seed_gives_the_same_text_after_preemption(
    make_folder: Callable[..., Path], start: Callable[..., Any], sampled: Callable[..., SamplingParams]
) -> None:
    params = sampled(
        max_tokens=40,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        min_tokens=35,
        ignore_eos=False,
        stop_token_ids=tuple(range(100, 200)),
        bad_words_token_ids=((3,), (4, 5), (6, 7, 8)),
        typical_p=0.95,
    )
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


def test_logprobs_are_returned_only_to_their_request(
    make_folder: Callable[..., Path], start: Callable[..., Any], sampled: Callable[..., SamplingParams]
) -> None:
    running = start(make_folder())
    running.add(1, [5, 6], sampled(logprobs=2, max_tokens=4))
    running.add(2, [5, 6], sampled(max_tokens=4))
    running.finish()
    assert [entry.token_ids[0] for entry in running.logprobs[1]] == running.tokens[1]
    assert all(len(entry.token_ids) == len(entry.logprobs) == 3 for entry in running.logprobs[1])
    assert not running.logprobs[2]
