"""Sequences that are swapped out and in give the tokens of a request alone, whatever their windows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire_common.errors import FlagsError
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.runner import load_model

Make = Callable[..., Any]
SIX = SchedulerOptions(max_num_seqs=6, max_num_batched_tokens=64, preemption_mode="swap")
FAMILIES = {
    "full attention": ("llama", {}, 16),
    "a window": ("mistral", {"sliding_window": 24}, 9),
    "both": ("gemma2", {"sliding_window": 24, "head_dim": 16, "num_hidden_layers": 3}, 16),
}


def prompts() -> dict[int, list[int]]:
    return {key: [(7 * key + 3 * place) % 240 + 3 for place in range(17 + 5 * key)] for key in range(6)}


@pytest.mark.parametrize(("family", "changes", "num_blocks"), FAMILIES.values(), ids=FAMILIES)
def test_swapped_sequences_continue_unchanged(
    family: str,
    changes: dict[str, Any],
    num_blocks: int,
    make_folder: Callable[..., Path],
    start: Make,
    greedy: Make,
) -> None:
    folder = make_folder(family, **changes)
    roomy = start(folder, scheduler=SchedulerOptions(max_num_seqs=6, max_num_batched_tokens=64), max_model_len=120)
    cache_bytes = sum(roomy.model.block_bytes) * num_blocks
    tight = start(
        folder,
        scheduler=SIX,
        max_model_len=120,
        kv_cache_memory_bytes=cache_bytes,
        swap_space_bytes=4 * cache_bytes,
        enable_prefix_caching=False,
    )
    for running in (roomy, tight):
        for key, prompt in prompts().items():
            running.add(key, prompt, greedy(60))
        running.finish()
    assert tight.tokens == roomy.tokens
    counters = tight.engine.counters
    assert counters.preemptions and all(label.startswith("swap") for label in counters.preemptions)
    assert counters.swapped_in_blocks > 0 and counters.recomputed_tokens == 0


def test_warm_up_measures_the_costs_of_preemption_and_stalls(make_folder: Callable[..., Path], start: Make) -> None:
    model = start(make_folder(), swap_space_bytes=1 << 20).model
    assert 1e6 < model.swap_bytes_per_second < 1e12
    costs = model.step_costs
    assert 0.0 < costs.per_pair < costs.per_token < costs.fixed < 10.0 and 1e-8 < costs.per_token < 0.1
    assert sum(model.block_bytes) * model.layout.groups[0].num_blocks == model.kv_cache_bytes
    assert start(make_folder()).model.swap_bytes_per_second is None


@pytest.mark.parametrize("max_model_len", [1, 2, 30, 500])
def test_a_model_of_any_length_is_measured(
    max_model_len: int, make_folder: Callable[..., Path], start: Make, greedy: Make
) -> None:
    folder = make_folder("gemma2", sliding_window=24, head_dim=16, num_hidden_layers=3)
    running = start(folder, max_model_len=max_model_len, swap_space_bytes=1 << 20)
    assert running.model.step_costs.per_token > 0.0
    if max_model_len > 1:
        running.add(1, [5] * (max_model_len // 2), SamplingParams(max_tokens=20, temperature=0.0))
        running.finish()
        assert running.tokens[1]


def test_swap_space_of_less_than_a_block_is_refused_by_number(
    make_folder: Callable[..., Path], engine_config: Make
) -> None:
    with pytest.raises(
        FlagsError, match="--swap-space-bytes 9 is less than one block of each layer: 8192 is the minimum"
    ):
        load_model(engine_config(make_folder(), kv_cache_memory_bytes=1 << 20, swap_space_bytes=9))
