"""Several ranks give the same tokens as transformers in float32.

The families are those whose layers are divided differently: biases and a shared head matrix; one KV head for two ranks;
experts; fused projections; scores and logits with a cap. Each runs another schedule, and `make soak` runs all families.
"""

import os
from typing import Any

import pytest
from quire_parity.native import CASES
from quire_parity.schedules import SCHEDULES

from quire_engine.config import ParallelOptions

TWO = ParallelOptions(tensor=2)
STAGES = ParallelOptions(pipeline=2)
DIVIDED = [
    ("llama, biases, wide heads, tied", "prefix hits", TWO),
    ("qwen3", "a full batch", TWO),
    ("qwen3_moe, a layer without experts", "in chunks", TWO),
    ("phi3, window", "preemption by swap", TWO),
    ("gemma2", "preemption by recompute", TWO),
    ("gemma2", "prefix hits", STAGES),
    ("mixtral, window", "in chunks", ParallelOptions(tensor=2, pipeline=2)),
    pytest.param("llama, biases, wide heads, tied", "preemption by swap", STAGES, marks=pytest.mark.slow),
    # Two ranks for each KV head.
    pytest.param("llama, biases, wide heads, tied", "in chunks", ParallelOptions(tensor=4), marks=pytest.mark.slow),
]
if "QUIRE_HYPOTHESIS_EXAMPLES" in os.environ:
    DIVIDED += [(name, "prefix hits", TWO) for name in CASES]


@pytest.mark.parametrize(("name", "schedule", "parallel"), DIVIDED)
def test_ranks_give_the_same_tokens(name: str, schedule: str, parallel: ParallelOptions, parity: Any) -> None:
    parity.check(CASES[name], SCHEDULES[schedule], parallel)


def test_near_ties_are_rare(parity: Any) -> None:
    assert parity.tally.compared > 100
    assert parity.tally.near_ties <= 0.005 * parity.tally.compared, parity.tally
