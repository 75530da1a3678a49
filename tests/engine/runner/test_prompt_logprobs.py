"""Logprobs of prompts through a whole engine equal those of transformers, however the prompt was computed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams

PROMPTS = [list(range(3, 70)), [5, 9, 200], list(range(100, 149))]


@pytest.fixture(scope="module")
def expected(make_folder: Callable[..., Path]) -> list[torch.Tensor]:
    """Return for each prompt the log-probabilities [P - 1, V] of the tokens after each position."""
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    model = factory.from_pretrained(make_folder(), dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0, :-1].log_softmax(dim=-1) for prompt in PROMPTS]


def asking(num: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 3, "temperature": 0.0, "ignore_eos": True, **changes}, prompt_logprobs=num)


def check(running: Any, key: int, prompt: list[int], own: torch.Tensor, num: int) -> None:
    entries = running.prompt_logprobs[key]
    assert [entry.token_ids[0] for entry in entries] == prompt[1:]
    for entry, token, line in zip(entries, prompt[1:], own, strict=True):
        assert len(entry.token_ids) == len(entry.logprobs) == 1 + num
        assert entry.logprobs == pytest.approx(line[entry.token_ids].tolist(), abs=2e-4)
        assert abs(entry.rank - 1 - int((line > line[token]).sum())) <= 1  # rounding swaps near-equal values
        assert entry.logprobs[1:] == pytest.approx(line.topk(num).values.tolist(), abs=2e-4)


@pytest.mark.parametrize("budget", [16, 40, 256])
def test_prompt_logprobs_equal_transformers(
    budget: int, make_folder: Callable[..., Path], start: Callable[..., Any], expected: list[torch.Tensor]
) -> None:
    running = start(make_folder(), scheduler=SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=budget))
    for key, prompt in enumerate(PROMPTS):
        running.add(key, prompt, asking(key))
    running.add(9, PROMPTS[0], SamplingParams(max_tokens=3, temperature=1.0, repetition_penalty=1.5))
    running.finish()
    for key, prompt in enumerate(PROMPTS):
        check(running, key, prompt, expected[key], key)
    assert 9 not in running.prompt_logprobs


def test_cached_and_preempted_prompts_have_all_logprobs(
    make_folder: Callable[..., Path], start: Callable[..., Any], expected: list[torch.Tensor]
) -> None:
    running = start(make_folder(), kv_cache_memory_bytes=7 * 16 * 512)
    for key in (0, 10):
        for place, prompt in enumerate(PROMPTS[1:], start=1):
            running.add(key + place, prompt, asking(2, max_tokens=50))
        running.finish()
    assert sum(running.engine.counters.preemptions.values()) > 0
    for key in (0, 10):
        for place, prompt in enumerate(PROMPTS[1:], start=1):
            check(running, key + place, prompt, expected[place], 2)
    assert running.tokens[1] == running.tokens[11] and running.tokens[2] == running.tokens[12]


def test_prompt_logprobs_do_not_change_the_output(make_folder: Callable[..., Path], start: Callable[..., Any]) -> None:
    running = start(make_folder())
    for key, num in enumerate((None, 3)):
        running.add(key, PROMPTS[2], SamplingParams(max_tokens=8, seed=4, ignore_eos=True, prompt_logprobs=num), seed=4)
        running.finish()
    assert running.tokens[0] == running.tokens[1]
