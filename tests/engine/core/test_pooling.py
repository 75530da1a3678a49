"""Pooled prompts: each position once, however the prompt is computed, and nothing is sampled."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.core.sampling_params import Pooling, SamplingParams
from quire_engine.core.scheduler import refuse

World = Callable[..., Any]
PROMPT = list(range(1, 24))


def pooling(*, mean: bool) -> SamplingParams:
    return SamplingParams(max_tokens=1, ignore_eos=True, pooling=Pooling(mean=mean))


def whole(prompt: list[int]) -> list[float]:
    return [len(prompt), sum(prompt), sum(range(len(prompt)))]


def last(prompt: list[int]) -> list[float]:
    return [1, prompt[-1], len(prompt) - 1]


def totals(here: Any, key: int) -> list[float]:
    return [sum(column) for column in zip(*here.pooled[key], strict=True)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [4, 7, 64])
def test_each_position_is_pooled_once(make_world: World, budget: int, overlap: bool) -> None:
    here = make_world(budget=budget, overlap=overlap, pools=True)
    here.add(1, PROMPT, params=pooling(mean=True))
    here.add(2, PROMPT[:5], params=pooling(mean=False))
    here.run()
    assert (totals(here, 1), totals(here, 2)) == (whole(PROMPT), last(PROMPT[:5]))
    assert {ended.reason for ended in here.finished.values()} == {"length"}
    assert here.engine.counters.generation_tokens == 0


def test_a_mean_computes_a_cached_prefix_again(make_world: World) -> None:
    here = make_world(pools=True)
    for key, mean in ((1, True), (2, True), (3, False), (4, False)):
        here.add(key, PROMPT, params=pooling(mean=mean))
        here.run()
    assert totals(here, 2) == whole(PROMPT) and totals(here, 4) == last(PROMPT)
    assert [here.cached[key] for key in (1, 2, 3, 4)] == [0, 0, 20, 20]


def test_last_token_is_computed_even_if_all_blocks_are_cached(make_world: World) -> None:
    here = make_world(pools=True)
    for key in (1, 2):
        here.add(key, PROMPT[:20], params=pooling(mean=False))
        here.run()
    assert totals(here, 2) == last(PROMPT[:20])
    assert here.cached[2] == 16


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    means=st.lists(st.booleans(), min_size=8, max_size=8),
    budget=st.integers(3, 30),
    blocks=st.integers(11, 24),
    swapped=st.integers(0, 12),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_preemption_and_swapping_keep_pooled_states(
    make_world: World, lengths: list[int], means: list[bool], budget: int, blocks: int, swapped: int, policy: str
) -> None:
    here = make_world(
        pools=True, num_blocks=blocks, budget=budget, num_swap_blocks=swapped, policy=policy, max_num_seqs=3
    )
    prompts = {key: [(7 * key + place) % 50 for place in range(length)] for key, length in enumerate(lengths)}
    for key, prompt in prompts.items():
        # The later ones are more urgent, so that the earlier ones are preempted within their prompt.
        here.add(key, prompt, params=pooling(mean=means[key]), priority=-key if policy == "priority" else 0)
        here.step()
    here.run()
    for key, prompt in prompts.items():
        assert totals(here, key) == (whole(prompt) if means[key] else last(prompt))


def test_a_cancelled_request_is_pooled_no_further(make_world: World) -> None:
    here = make_world(budget=4, pools=True)
    here.add(1, PROMPT, params=pooling(mean=True))
    here.step()
    here.engine.cancel(1)
    here.run()
    assert len(here.pooled[1]) == 1 and 1 not in here.finished


@pytest.mark.parametrize(
    ("length", "cached", "accepted"),
    [(200, None, True), (201, None, False), (100, 100, True), (101, 100, False)],
)
def test_a_prompt_may_fill_the_context(length: int, cached: int | None, accepted: bool) -> None:
    refusal = refuse(num_prompt=length, limit=length + 1, max_model_len=200, max_cached_tokens=cached, pools=True)
    assert (refusal is None) == accepted


def test_the_longest_prompt_is_pooled(make_world: World) -> None:
    here = make_world(pools=True, max_model_len=40)
    prompt = [place % 50 for place in range(40)]
    assert here.add(1, prompt, params=pooling(mean=True)) is None
    here.run()
    assert totals(here, 1) == whole(prompt)
