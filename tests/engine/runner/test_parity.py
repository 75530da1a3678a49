"""The same tokens as transformers, in float32 and greedy, whatever the schedule.

Identical means: equal tokens, or at the first difference the reference's own choice was a near tie (its two best logits
closer than 1e-3 of the logits' standard deviation: a matrix product rounds differently in another batch). Near ties are
counted, and may be at most 0.5 % of the tokens compared.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire_engine.config import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams

ANSWER = 20
LENGTHS = [1, 2, 15, 16, 17, 33, 61, 130]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA: dict[str, Any] = {
    "head_dim": 24,
    "sliding_window": 24,
    "query_pre_attn_scalar": 40,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
# Beside Llama. Windows shorter than most prompts, of which 24 is no whole number of blocks.
OTHERS: dict[str, dict[str, Any]] = {
    "qwen2": {"family": "qwen2"},
    "qwen2, windows in its last layers": {
        "family": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"family": "qwen3", "head_dim": 24},
    "mistral": {"family": "mistral", "sliding_window": None},
    "mistral, window": {"family": "mistral", "sliding_window": 24},
    "phi3": {"family": "phi3", "sliding_window": 24, "pad_token_id": 0},
    "gemma2": {**GEMMA, "family": "gemma2", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3": {
        **GEMMA,
        "family": "gemma3_text",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 4.0},
        },
    },
    "phi3, partly rotated": {
        "family": "phi3",
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    "grouped-query": {},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 40},
    "llama3 scaling": {"rope_parameters": LLAMA3},
    "linear scaling": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    **OTHERS,
}
# Of 2 layers with 2 KV heads of 16 in float32. All prompts with their answers want 33 blocks, the longest 10.
BLOCK_BYTES = 16 * 512
SCHEDULES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "in chunks": {"scheduler": SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=16)},
    "two at a time": {"scheduler": SchedulerOptions(max_num_seqs=2, max_num_batched_tokens=64)},
    "with preemption": {"kv_cache_memory_bytes": 10 * BLOCK_BYTES, "enable_prefix_caching": False},
    "with preemption and prefixes": {"kv_cache_memory_bytes": 22 * BLOCK_BYTES},
    "blocks of 64": {"block_size": 64},
}


@dataclass
class Comparison:
    compared: int = 0
    near_ties: int = 0


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return Comparison()


def prompts() -> list[list[int]]:
    numbers = random.Random(5)
    return [[numbers.randrange(3, 250) for _ in range(length)] for length in LENGTHS]


def compare(model: PreTrainedModel, prompt: list[int], answer: list[int], comparison: Comparison) -> None:
    """One forward pass over prompt and answer gives the reference's choice after every token of the answer."""
    assert len(answer) == ANSWER
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    for token, row in zip(answer, logits, strict=True):
        comparison.compared += 1
        best = row.topk(2).values
        if token != int(row.argmax()):
            assert float(best[0] - best[1]) <= 1e-3 * float(row.std()), "not the reference's token, nor a near tie"
            comparison.near_ties += 1
            return


def reference(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",  # the others leave out Gemma 2's soft cap
    )
    return model.requires_grad_(False)


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
def test_tokens_equal_transformers_for_every_kind_of_layer(
    changes: dict[str, Any],
    make_folder: Callable[..., Path],
    start: Callable[..., Any],
    greedy: Callable[[int], SamplingParams],
    comparison: Comparison,
) -> None:
    folder = make_folder(**changes)
    running = start(folder, scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=96))
    for key, prompt in enumerate(prompts()):
        running.add(key, prompt, greedy(ANSWER))
    running.finish()
    model = reference(folder)
    for key, prompt in enumerate(prompts()):
        compare(model, prompt, running.tokens[key], comparison)


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
def test_tokens_equal_transformers_under_every_schedule(
    options: dict[str, Any],
    make_folder: Callable[..., Path],
    start: Callable[..., Any],
    greedy: Callable[[int], SamplingParams],
    comparison: Comparison,
) -> None:
    running = start(make_folder(), **options)
    # The second half arrives while the first runs, and repeats its prompts: hits, where prefixes are kept.
    for key, prompt in enumerate(prompts()):
        running.add(key, prompt, greedy(ANSWER))
    for _ in range(12):
        running.step()
    for key, prompt in enumerate(prompts()):
        running.add(100 + key, prompt, greedy(ANSWER))
    running.finish()
    model = reference(make_folder())
    for key, prompt in enumerate(prompts()):
        compare(model, prompt, running.tokens[key], comparison)
        compare(model, prompt, running.tokens[100 + key], comparison)
    if "kv_cache_memory_bytes" in options:
        assert sum(running.engine.counters.preemptions.values()) > 0
    if options.get("enable_prefix_caching", True):
        assert running.engine.counters.prefix_cache_hits > 0


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_tokens_of_other_families_survive_chunks_preemption_and_prefix_hits(
    changes: dict[str, Any],
    make_folder: Callable[..., Path],
    start: Callable[..., Any],
    greedy: Callable[[int], SamplingParams],
    comparison: Comparison,
) -> None:
    folder = make_folder(**changes)
    chunks = SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=40)
    # With half as much again as the longest sequence wants.
    probe = start(folder, max_model_len=100).model
    block_bytes = probe.kv_cache_bytes // probe.layout.groups[0].num_blocks
    running = start(folder, scheduler=chunks, max_model_len=100, kv_cache_memory_bytes=9 * block_bytes)
    chosen = [prompt for prompt in prompts() if len(prompt) <= 80]
    for key, prompt in enumerate(chosen):
        running.add(key, prompt, greedy(ANSWER))
    running.finish()
    for key in (100, 101):
        running.add(key, chosen[-1], greedy(ANSWER))
        running.finish()
    model = reference(folder)
    for key, prompt in [*enumerate(chosen), (100, chosen[-1]), (101, chosen[-1])]:
        compare(model, prompt, running.tokens[key], comparison)
    assert sum(running.engine.counters.preemptions.values()) > 0
    assert running.engine.counters.prefix_cache_hits > 0


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_probabilities_of_other_families_equal_transformers(
    changes: dict[str, Any],
    make_folder: Callable[..., Path],
    start: Callable[..., Any],
    greedy: Callable[[int], SamplingParams],
) -> None:
    """Soft caps, windows and scales may leave the likeliest token as it is, but not its probability."""
    folder = make_folder(**changes)
    running = start(folder, scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=96))
    prompt = prompts()[-1]
    running.add(0, prompt, replace(greedy(ANSWER), logprobs=1))
    running.finish()
    answer = running.tokens[0]
    with torch.inference_mode():
        logits = reference(folder)(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    expected = logits.log_softmax(-1)[torch.arange(ANSWER), torch.tensor(answer)]
    found = torch.tensor([entry.logprobs[0] for entry in running.logprobs[0]])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def test_a_sequence_alone_says_what_it_says_in_a_batch(
    make_folder: Callable[..., Path],
    start: Callable[..., Any],
    greedy: Callable[[int], SamplingParams],
    comparison: Comparison,
) -> None:
    model = reference(make_folder())
    running = start(make_folder(), enable_prefix_caching=False)
    for key, prompt in enumerate(prompts()):
        running.add(key, prompt, greedy(ANSWER))
        running.finish()
        compare(model, prompt, running.tokens[key], comparison)


def test_near_ties_are_rare(comparison: Comparison) -> None:
    assert comparison.near_ties <= 0.005 * comparison.compared
