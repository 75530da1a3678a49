"""The device runner samples as the CPU's does: seeds, penalties and reports, combined and overlapped."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from quire_parity import cases

from quire_engine.core.sampling_params import SamplingParams

PROMPTS = cases.prompts((5, 9, 2, 12))
ANSWER = 6
SAMPLED: tuple[SamplingParams, ...] = (
    SamplingParams(max_tokens=ANSWER, temperature=0.9, top_k=40, top_p=0.9, ignore_eos=True, logprobs=2),
    SamplingParams(
        max_tokens=ANSWER,
        temperature=1.3,
        min_p=0.01,
        typical_p=0.95,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias=((7, 3.0), (9, -4.0)),
        bad_words_token_ids=((3,), (4, 5)),
        min_tokens=ANSWER - 1,
        stop_token_ids=tuple(range(10, 200)),
        logprobs=1,
        prompt_logprobs=2,
    ),
    SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, prompt_logprobs=0),
    SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, allowed_token_ids=tuple(range(50, 70))),
)


def ask(running: Any) -> None:
    for key, (prompt, params) in enumerate(zip(PROMPTS, SAMPLED, strict=True)):
        running.add(key, prompt, params, seed=key - 2)
    running.finish()


def test_device_samples_the_same_tokens_as_the_cpu(
    start: Callable[..., Any], on_the_cpu_path: Callable[..., AbstractContextManager[Any]], world: Any
) -> None:
    here = start(world)
    ask(here)
    with on_the_cpu_path(world) as there:
        ask(there)
    assert here.tokens == there.tokens
    assert all(SAMPLED[3].allowed_token_ids and token in SAMPLED[3].allowed_token_ids for token in here.tokens[3])
    for reported, expected in ((here.logprobs, there.logprobs), (here.prompt_logprobs, there.prompt_logprobs)):
        assert reported.keys() == expected.keys()
        for key in expected:
            for one, other in zip(reported[key], expected[key], strict=True):
                assert (one.token_ids, one.rank) == (other.token_ids, other.rank)
                assert one.logprobs == pytest.approx(other.logprobs, abs=2e-4)
