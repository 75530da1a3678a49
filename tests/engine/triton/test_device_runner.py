"""Whole models on the device runner say what transformers says, however their steps come about."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from quire_parity import cases
from quire_parity.reference import Tally, compare

from quire_engine.core.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=cases.ANSWER, temperature=0.0, ignore_eos=True, logprobs=0)
PROMPTS = cases.prompts((1, 17, 33, 16, 47))


def test_smoke(start: Callable[..., Any], transformers_says: Callable[..., Any], world: Any) -> None:
    running = start(world)
    for key, prompt in enumerate(PROMPTS):
        running.add(key, prompt, GREEDY)
    running.finish()
    for key, prompt in enumerate(PROMPTS):
        answer = transformers_says(world.family, tuple(prompt))
        compare(answer, running.tokens[key], [e.logprobs[0] for e in running.logprobs[key]], Tally(), f"{key}")
