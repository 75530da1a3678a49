#!/usr/bin/env python3
"""Compare code for a CPU level with code for this CPU: the same kernels, interleaved, on one core.

    python -m benchmarks.kernels.cpu_levels [--level x86-64-v4-bf16] [--dtype bfloat16] [--rounds 20]

Each side is a separate process, which compiles for its CPU; they alternate every few milliseconds, and the minimum CPU
time of each counts, because the machine may be busy at any moment. A ratio above 1 means that the level is slower. For
a level below this CPU's own, "this very CPU" is this CPU without the features of higher levels.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import geometric_mean
from typing import IO

from benchmarks.report import ROOT, at_least_one, machine, show_table

_TURN_SECONDS = 0.01


def cases(dtype_name: str) -> dict[str, Callable[[], object]]:
    """Return the cases at the heads of SmolLM2-135M and of Llama-3.1-8B."""
    import torch

    from benchmarks.kernels.cases_attention import Attention, decode, filled_cache, prompts
    from quire_kernels.activation import silu_and_mul
    from quire_kernels.logprobs import token_logprobs
    from quire_kernels.packed_linear import bfloat16_linear, int8_linear, pack_bfloat16, pack_int8, supports_bfloat16
    from quire_kernels.paged_attention import paged_attention, plan_attention
    from quire_kernels.rms_norm import rms_norm
    from quire_kernels.rotary import rotary_table
    from quire_kernels.sampling import greedy, sample
    from quire_kernels.store_kv import store_kv

    dtype = getattr(torch, dtype_name)
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    def attention(shape: Attention) -> Callable[[], object]:
        cache, block_tables = filled_cache(shape, torch.device("cpu"), dtype)
        q = random(sum(shape.query_lens), shape.heads, shape.head_dim)
        plan = plan_attention(
            block_tables=block_tables,
            query_lens=shape.query_lens,
            context_lens=shape.context_lens,
            block_size=shape.block_size,
        )
        return lambda: paged_attention(q, cache, plan, 0.1)

    small = {"heads": 9, "kv_heads": 3, "head_dim": 64}
    x, weight = random(64, 576), random(1536, 576) * 0.02
    wide, norm, logits = random(64, 2 * 1536), random(576), torch.randn(8, 32_000) * 3.0
    whole, rows = pack_int8(weight), torch.arange(8)
    stored, _ = filled_cache(prompts(1, 64, **small), torch.device("cpu"), dtype)
    q, k, v = random(64, 9, 64), random(64, 3, 64), random(64, 3, 64)
    positions = torch.arange(64)
    turned = rotary_table(10_000.0 ** -(torch.arange(32) / 32.0), 64)

    def drawn() -> object:
        return sample(
            logits,
            temperature=torch.full((8,), 0.8),
            top_k=torch.full((8,), 50),
            top_p=torch.full((8,), 0.9),
            min_p=torch.zeros(8),
            typical_p=torch.ones(8),
            seeds=rows,
            positions=rows,
        )

    found: dict[str, Callable[[], object]] = {
        "attention, decode 16 x 512, 9/3 heads of 64": attention(decode(16, 512, **small)),
        "attention, prompt of 512, 9/3 heads of 64": attention(prompts(1, 512, **small)),
        "attention, decode 8 x 512, 32/8 heads of 128": attention(decode(8, 512)),
        "attention, prompt of 256, 32/8 heads of 128": attention(prompts(1, 256)),
        "rotary and store_kv, 64 tokens": lambda: store_kv(q, k, v, turned, positions, positions, stored),
        "rms_norm, 64 x 576": lambda: rms_norm(x, norm, 1e-5),
        "silu_and_mul, 64 x 1,536": lambda: silu_and_mul(wide),
        "int8 linear, 64 x 576 x 1,536": lambda: int8_linear(x, whole),
        "sample, 8 x 32,000": drawn,
        "greedy, 8 x 32,000": lambda: greedy(logits),
        "logprobs, 8 x 32,000, 5 likeliest": lambda: token_logprobs(logits, rows, rows, 5),
    }
    if dtype == torch.bfloat16 and supports_bfloat16():
        pairs = pack_bfloat16(weight)
        found["bfloat16 linear, 64 x 576 x 1,536"] = lambda: bfloat16_linear(x, pairs)

    return found


def serve(dtype_name: str) -> None:
    """Read case numbers from standard input and print the CPU milliseconds of a call; runs in a process of one side."""
    import torch

    torch.set_num_threads(1)
    calls = list(cases(dtype_name).items())
    for _, call in calls:
        call()
    print("\t".join(name for name, _ in calls), flush=True)
    for line in sys.stdin:
        call = calls[int(line)][1]
        count, began = 0, time.process_time()
        while (taken := time.process_time() - began) < _TURN_SECONDS:
            call()
            count += 1
        print(1e3 * taken / count, flush=True)


class Side:
    def __init__(self, cpu: str, features: str, dtype: str) -> None:
        environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
        command = [sys.executable, "-m", "benchmarks.kernels.cpu_levels", "--side", "--dtype", dtype]
        self._child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdin is not None and self._child.stdout is not None
        self._in: IO[str] = self._child.stdin
        self._out: IO[str] = self._child.stdout

    def cases(self) -> list[str]:
        return self._out.readline().rstrip("\n").split("\t")

    def milliseconds(self, case: int) -> float:
        self._in.write(f"{case}\n")
        self._in.flush()
        return float(self._out.readline())

    def end(self) -> None:
        self._in.close()
        self._child.wait()


def main() -> None:
    from llvmlite import binding

    from quire_kernels.precompiled.levels import LEVELS, cpu_flags, highest_level

    has = {name for name, is_there in binding.get_host_cpu_features().items() if is_there}
    own = highest_level(cpu_flags())
    if own is None:
        raise SystemExit("this CPU is of no level that kernels are compiled for ahead of time")
    names = [level.name for level in LEVELS if has >= level.features]
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--level", choices=names, default=own.name, help=f"(default {own.name}, this CPU's own)")
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments.add_argument("--rounds", type=at_least_one, default=20, help="turns of each side for each case")
    args = arguments.parse_args()
    level = next(level for level in LEVELS if level.name == args.level)
    higher = {feature for other in LEVELS[: LEVELS.index(level)] for feature in other.features} - set(level.features)
    absent = higher | ({name for name in has if name.startswith("avx512")} if "avx512f" in higher else set())
    flags = ",".join(f"{'+' if name in has and name not in absent else '-'}{name}" for name in sorted(has | higher))
    sides = [
        Side(binding.get_host_cpu_name(), flags, args.dtype),
        Side(level.cpu, level.feature_string, args.dtype),
    ]
    found = [side.cases() for side in sides][0]
    least = [[float("inf")] * len(found) for _ in sides]
    for _ in range(args.rounds):
        for case in range(len(found)):
            for number, side in enumerate(sides):
                least[number][case] = min(least[number][case], side.milliseconds(case))
    for side in sides:
        side.end()
    ratios = [mine / very for very, mine in zip(*least, strict=True)]
    rows = [
        (name, f"{very:.3f}", f"{mine:.3f}", f"{ratio:.2f}")
        for name, very, mine, ratio in zip(found, *least, ratios, strict=True)
    ]
    rows.append(("geometric mean", "", "", f"{geometric_mean(ratios):.3f}"))
    show_table(f"{args.level}, {args.dtype}: CPU ms", ("", "this CPU", "the level", "ratio"), rows, (machine(),))


if __name__ == "__main__":
    if "--side" in sys.argv:
        serve(sys.argv[sys.argv.index("--dtype") + 1])
    else:
        main()
