"""Whole tiny models on the device runner give the tokens of transformers, however their steps are formed.

Each case uses the Triton kernels, of which an interpreted program takes milliseconds: few tokens, and several features
in one schedule. ``runner/test_device_schedules`` tests that any schedule keeps sequences apart.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from quire_parity import cases
from quire_parity.reference import Answer, Tally, compare

from quire_engine.core.sampling_params import SamplingParams
from quire_engine.runner.captured import GraphSizes

ANSWER = 4
LENGTHS = (3, 17, 22)
CROWDED = (13, 14, 15)
"""Each starts with one block of four and then needs another."""
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, logprobs=0)

SCHEDULES: dict[str, dict[str, Any]] = {
    "llama in chunks, padded, overlapped, with fixed splits": {
        "family": "llama",
        "budget": 16,
        "graph_sizes": GraphSizes(decode=(4,), mixed=(8, 16)),
        "deterministic": True,
    },
    "qwen3 preempted and recomputed, launch by launch, one step at a time": {
        "family": "qwen3",
        "num_blocks": 4,
        "preemption_mode": "recompute",
        "graph_sizes": GraphSizes(),
        "overlap": False,
    },
    "gemma2 with windows, preempted and swapped": {
        "family": "gemma2",
        "num_blocks": 4,
        "num_swap_blocks": 20,
        "preemption_mode": "swap",
    },
    "llama, as many rows as the tokens of a graph": {
        "family": "llama",
        "max_rows": 64,
        "graph_sizes": GraphSizes(decode=(8,), mixed=(32, 64)),
    },
    "mixtral, padded": {"family": "mixtral", "graph_sizes": GraphSizes(decode=(4,), mixed=(24, 64))},
}


@pytest.mark.parametrize("changes", SCHEDULES.values(), ids=list(SCHEDULES))
def test_device_runner_equals_transformers(
    start: Callable[..., Any], transformers_says: Callable[..., Answer], world: Any, changes: dict[str, Any]
) -> None:
    mode = changes.get("preemption_mode")
    prompts = cases.prompts(CROWDED if mode else LENGTHS)
    running = start(replace(world, **changes))
    for key, prompt in enumerate(prompts):
        running.add(key, prompt, GREEDY)
    running.finish()
    assert {label.partition(":")[0] for label in +running.engine.counters.preemptions} == ({mode} if mode else set())
    for key, prompt in enumerate(prompts):
        said = [entry.logprobs[0] for entry in running.logprobs[key]]
        answer = transformers_says(changes["family"], tuple(prompt))
        compare(beginning(answer), running.tokens[key], said, Tally(), f"prompt {key}")


def beginning(answer: Answer) -> Answer:
    return Answer(token_ids=answer.token_ids[:ANSWER], logprobs=answer.logprobs[:ANSWER], gaps=answer.gaps[:ANSWER])
