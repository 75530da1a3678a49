"""A sequence that another engine has started goes on with the tokens that would have followed there."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request

World = Any
MakeWorld = Callable[..., World]
PROMPT = [7, 8, 9, 10, 11, 12]
ANSWER = 20
PARAMS = SamplingParams(max_tokens=ANSWER, ignore_eos=True)


@pytest.fixture(scope="module")
def whole(expected_tokens: Callable[..., list[int]]) -> list[int]:
    return expected_tokens(PROMPT, PARAMS, vocab_size=50, max_model_len=200)


def continued(key: int, sampled: list[int]) -> Request:
    return Request(key=key, prompt_token_ids=PROMPT, params=PARAMS, seed=key, output_token_ids=sampled)


@pytest.mark.parametrize("num_sampled", [0, 1, 5, ANSWER - 1])
@pytest.mark.parametrize("caching", [False, True])
def test_continued_request_samples_and_counts_remaining_tokens(
    make_world: MakeWorld, whole: list[int], num_sampled: int, caching: bool
) -> None:
    world = make_world(budget=4, caching=caching)
    world.add(1, PROMPT, max_tokens=ANSWER)
    world.run()
    assert world.tokens[1] == whole

    assert world.engine.add(continued(2, whole[:num_sampled])) is None
    world.run()

    assert world.tokens[2] == whole[num_sampled:]
    assert world.finished[2].reason == "length"
    # The answer's own tokens may be cached, but only those of the prompt are reported.
    assert 0 <= world.cached[2] <= len(PROMPT)


@given(st.lists(st.integers(0, ANSWER - 1), min_size=1, max_size=6), st.integers(9, 20), st.booleans())
def test_continued_request_survives_preemption(
    make_world: MakeWorld, whole: list[int], sampled: list[int], num_blocks: int, overlap: bool
) -> None:
    world = make_world(num_blocks=num_blocks, overlap=overlap, budget=6)
    for key, number in enumerate(sampled):
        assert world.engine.add(continued(key, whole[:number])) is None
    world.run()
    assert [world.tokens[key] for key in range(len(sampled))] == [whole[number:] for number in sampled]
