"""The counted work of the engine process: steps of the scheduler alone, and of engines with small random models.

Steps are counted over one block's worth of tokens, so that each count contains the one step in sixteen in which every
sequence gets a new block.
"""

import random
from collections.abc import Callable

import msgspec

from benchmarks.models.random_model import LlamaShape, model_folder
from benchmarks.serving.steps import Bench
from quire_engine.core.batch import RunnerOutput
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.options import ModelTraits, SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.sequence import Request
from quire_engine.engine import Engine
from quire_guard.counting import (
    allocated,
    compilations,
    native_calls,
    page_faults,
    python_cost,
    torch_operators,
)

BLOCK = 16
_PROMPT = 40
_LAUNCH = "quire_kernels.cpu_runtime.workers.launch"
_PER_STEP = ("quire_engine.runner.", "quire_engine.model.", "quire_kernels.")
_KV_CACHE_BYTES = 2**28


def scheduler_steps(running: int, *, waiting: int = 0) -> Callable[[], None]:
    """Return a block's worth of decode steps of ``running`` sequences; ``waiting`` more have no row."""
    layout = KVCacheLayout(block_size=BLOCK, groups=(KVCacheGroup(layers=(0,), num_blocks=64 * running),))
    options = SchedulerOptions(max_num_seqs=running, max_num_batched_tokens=64 * running)
    scheduler = Scheduler(options, ModelTraits(max_model_len=1024), layout)
    chance = random.Random(1)
    for key in range(running + waiting):
        prompt = [chance.randrange(1000) for _ in range(_PROMPT)]
        params = SamplingParams(max_tokens=900, ignore_eos=True)
        assert scheduler.add(Request(key=key, prompt_token_ids=prompt, params=params, seed=key)) is None

    def step() -> None:
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.commit(batch, RunnerOutput(token_ids=[5] * sum(batch.samples)))

    def steps() -> None:
        for _ in range(BLOCK):
            step()

    steps()
    steps()
    return steps


def engine_steps(bench: Bench, sequences: int) -> tuple[Engine, Callable[[], None]]:
    """Return an engine and a block's worth of its decode steps, warmed up."""
    engine = bench.decoding(sequences, _PROMPT, 100 * BLOCK)

    def steps() -> None:
        for _ in range(BLOCK):
            engine.step()

    steps()
    return engine, steps


def bench_of(shape: LlamaShape) -> Bench:
    with model_folder(shape) as folder:
        return Bench(folder, threads=1, dtype="float32", dummy=True, kv_cache_bytes=_KV_CACHE_BYTES)


def _small_bench(layers: int) -> Bench:
    return bench_of(LlamaShape(hidden=64, layers=layers, heads=4, kv_heads=2, intermediate=128, vocabulary=256))


def scheduler_counts() -> dict[str, float]:
    one, many, most = (python_cost(scheduler_steps(count)).instructions / BLOCK for count in (1, 64, 256))
    queued = python_cost(scheduler_steps(64, waiting=1000)).instructions / BLOCK
    return {
        "scheduler: instructions of a step, 1 sequence": one,
        "scheduler: instructions per sequence, 1 to 64": (many - one) / 63,
        "scheduler: instructions per sequence, 64 to 256": (most - many) / 192,
        "scheduler: more instructions with 1,000 waiting": queued - many,
    }


def step_counts() -> dict[str, float]:
    bench = _small_bench(2)
    counts = _counts_of_steps(bench) | _message_counts(bench)
    two_layers = _python_and_torch(bench)
    compiled = compilations(lambda: _steps_of_every_kind(bench))
    four_layers = _python_and_torch(_small_bench(4))
    per_layer = {name: (four_layers[name] - two_layers[name]) / 2 for name in two_layers}
    return {
        **counts,
        **{f"layer: {name}": value for name, value in per_layer.items()},
        "steady engine: numba compilations": compiled,
    }


def _counts_of_steps(bench: Bench) -> dict[str, float]:
    found: dict[str, float] = {}
    in_model: dict[int, int] = {}
    operators: dict[int, int] = {}
    for sequences in (1, 64):
        name = f"{sequences} sequence{'s' if sequences > 1 else ''}"
        cost = python_cost(engine_steps(bench, sequences)[1])
        found[f"step: instructions, {name}"] = cost.instructions / BLOCK
        found[f"step: Python calls, {name}"] = sum(cost.calls.values()) / BLOCK
        found[f"step: C calls, {name}"] = native_calls(engine_steps(bench, sequences)[1]) / BLOCK
        in_model[sequences] = cost.calls_in(*_PER_STEP)
        operators[sequences] = sum(torch_operators(engine_steps(bench, sequences)[1]).values())
        found[f"step: torch operators, {name}"] = operators[sequences] / BLOCK
    found["step: more Python calls in runner, model and kernels at 64"] = in_model[64] - in_model[1]
    found["step: more torch operators at 64"] = operators[64] - operators[1]
    return found


def _python_and_torch(bench: Bench) -> dict[str, float]:
    cost = python_cost(engine_steps(bench, 4)[1])
    return {
        "instructions": cost.instructions / BLOCK,
        "Python calls": sum(cost.calls.values()) / BLOCK,
        "kernel launches": cost.calls[_LAUNCH] / BLOCK,
        "torch operators": sum(torch_operators(engine_steps(bench, 4)[1]).values()) / BLOCK,
    }


def _steps_of_every_kind(bench: Bench) -> None:
    """Run numbers of sequences and lengths of prompts that no step had before."""
    for sequences, length in ((3, 5), (7, 33), (19, 130), (50, 64)):
        bench.prefill(sequences, length)


def _message_counts(bench: Bench) -> dict[str, float]:
    """Return counts of the messages from a step to the API process."""
    sizes = {}
    for sequences in (1, 64):
        step = engine_steps(bench, sequences)[0].step()
        assert step is not None
        sizes[sequences] = len(msgspec.msgpack.encode(step))
    return {"IPC: bytes of a step's message, 1 sequence": sizes[1], "IPC: bytes per token at 64": sizes[64] / 64}


def memory_amounts(bench: Bench) -> dict[str, float]:
    """Return the memory of steps whose activations would be requested from the kernel each time if they were not kept.

    ``bench`` runs the 5M shape.
    """
    _, steps = engine_steps(bench, 64)
    for _ in range(4):
        steps()
    faults = page_faults(steps) / BLOCK
    memory = allocated(steps)
    return {
        "memory: page faults of a step, 64 sequences": faults,
        "memory: Python's blocks kept by a step, 64 sequences": memory.kept_blocks / BLOCK,
        "memory: Python's KiB at most, 64 sequences": memory.peak_bytes / 1024,
    }
