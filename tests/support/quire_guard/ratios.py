"""Ratios of CPU time to a loop of the same kind, in one thread of one process, in interleaved runs.

A busy machine affects both alike. The minimum of many runs counts, because other work only adds time.
"""

import random
from collections.abc import Callable
from time import thread_time
from typing import Any

from benchmarks.models.random_model import SHAPES, LlamaShape
from benchmarks.serving.steps import Bench
from quire_guard.scenarios import scheduler_steps

_TURNS = 12
_SEQUENCES = 16
_PROMPT = 256
_CONTEXT = 1024


def measured_ratios(bench: Bench) -> dict[str, float]:
    """Return all ratios. ``bench`` runs the 5M shape, in one thread."""
    return {
        **_model_ratios(bench),
        "attention / dense attention, decode": _attention(),
        "scheduler / loop": _scheduler(),
    }


def least_ratio(work: Callable[[], object], reference: Callable[[], object], turns: int = _TURNS) -> float:
    work()
    reference()
    times = [(_cpu_seconds(work), _cpu_seconds(reference)) for _ in range(turns)]
    return min(own for own, _ in times) / min(other for _, other in times)


def _cpu_seconds(work: Callable[[], object]) -> float:
    began = thread_time()
    work()
    return thread_time() - began


def _model_ratios(bench: Bench) -> dict[str, float]:
    """Return whole steps relative to plain products with as many weights, in float32.

    The recorded ratios are those of a CPU for which torch's own products are fast (Intel); on others they are lower.
    """
    shape = SHAPES["5M"]
    engine = bench.decoding(_SEQUENCES, 32, 10 * _TURNS)
    return {
        "decode step / products": least_ratio(engine.step, _products(shape, _SEQUENCES)),
        "prefill / products": least_ratio(lambda: bench.prefill(1, _PROMPT), _products(shape, _PROMPT)),
    }


def _products(shape: LlamaShape, rows: int) -> Callable[[], object]:
    """Return a model's linear layers as bare matrix products."""
    import torch

    kv = 2 * shape.kv_heads * shape.head_dim
    sizes = [
        (shape.hidden, shape.hidden + kv),
        (shape.hidden, shape.hidden),
        (shape.hidden, 2 * shape.intermediate),
        (shape.intermediate, shape.hidden),
    ] * shape.layers
    weights = [torch.randn(size) for size in (*sizes, (shape.hidden, shape.vocabulary))]
    inputs = {size: torch.randn(rows, size) for size in (shape.hidden, shape.intermediate)}

    def multiply() -> None:
        for weight in weights:
            torch.mm(inputs[weight.shape[0]], weight)

    return multiply


def _attention() -> float:
    """Return the attention of decoding sequences relative to torch's products over dense keys and values."""
    import torch

    from quire_kernels.kv_cache import allocate_kv_cache
    from quire_kernels.paged_attention import paged_attention, plan_attention

    heads, kv_heads, dim, block = 8, 4, 64, 16
    per_sequence = _CONTEXT // block
    order = torch.randperm(_SEQUENCES * per_sequence).to(torch.int32)
    cache = allocate_kv_cache(
        num_blocks=_SEQUENCES * per_sequence,
        block_size=block,
        kv_heads=kv_heads,
        head_dim=dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.keys.normal_()
    cache.values.normal_()
    q = torch.randn(_SEQUENCES, heads, dim)
    plan = plan_attention(
        block_tables=order.view(_SEQUENCES, per_sequence),
        query_lens=[1] * _SEQUENCES,
        context_lens=[_CONTEXT] * _SEQUENCES,
        block_size=block,
    )
    keys, values = torch.randn(2, _SEQUENCES * kv_heads, _CONTEXT, dim)
    grouped = q.view(_SEQUENCES * kv_heads, heads // kv_heads, dim)

    def dense() -> object:
        return torch.bmm(torch.softmax(torch.bmm(grouped, keys.transpose(1, 2)), -1), values)

    return least_ratio(lambda: paged_attention(q, cache, plan, 0.1), dense)


def _scheduler() -> float:
    """Return a block's worth of steps of 64 sequences relative to a loop that moves numbers between lists."""
    chance = random.Random(1)
    numbers: list[Any] = [chance.randrange(1000) for _ in range(64 * 16)]

    def loop() -> None:
        for _ in range(10):
            kept = []
            for number in numbers:
                kept.append(number + 1)

    return least_ratio(scheduler_steps(64), loop, turns=20)
