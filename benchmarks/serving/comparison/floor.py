"""The least time that this machine needs for a workload: its arithmetic and its bytes at the hardware's own rates.

A round of a workload is C requests of I tokens in and O out: their C * I prompt tokens, and then O - 1 steps of C rows.
Each of these takes as long as its multiply-adds at the arithmetic peak, or its bytes at the rate of reading, whichever
is longer. Weights, keys and values are 16 bits wide at every level, as in the checkpoint. Norms, sampling, scheduling,
Python and HTTP take no time here. No kernel is a part of this: ``machine_limits`` measures both rates.

It runs as a separate process (``python -m benchmarks.serving.comparison.floor``), so that its threads do not exist
while servers are measured.

Legend: C requests at a time, I and O tokens in and out, K inputs, N outputs, D head dim.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.comparison.levels import NAMES
from benchmarks.serving.comparison.workloads import Workload, parse_workload
from quire_engine.cpu.limits import CpuLevel

_ITEM_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The fields of a Llama's config on which its floor depends."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    def linear_shapes(self) -> list[tuple[int, int]]:
        """Return [N, K] of a layer's products; products of one input are combined."""
        attention = self.heads * self.head_dim
        return [
            (attention + 2 * self.kv_heads * self.head_dim, self.hidden),
            (self.hidden, attention),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]

    @property
    def layer_weights(self) -> int:
        """The weights of all linear layers except the last, which computes logits."""
        return self.layers * sum(outputs * inputs for outputs, inputs in self.linear_shapes())

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def attention_flops_per_pair(self) -> int:
        """The arithmetic of a token and one that it attends to: a score, and its share of the values."""
        return 4 * self.layers * self.heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * _ITEM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The rates of the hardware. ``read_rate`` gives the bytes per second by the bytes that are read repeatedly."""

    flops: float
    read_rate: Callable[[int], float]

    def seconds(self, *, flops: float, read_bytes: int) -> float:
        return max(flops / self.flops, read_bytes / self.read_rate(read_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    workload: str
    prompt_seconds: float
    decode_seconds: float
    total_tokens_per_second: float


def floor_of(workload: Workload, sizes: ModelSizes, limits: Limits) -> Floor:
    """Return the floor of one round."""
    requests, prompt, output = workload.concurrency, workload.input_tokens, workload.output_tokens
    weight_bytes = _ITEM_BYTES * (sizes.layer_weights + sizes.head_weights)
    pairs = requests * prompt * (prompt + 1) / 2
    prompt_flops = 2.0 * requests * (prompt * sizes.layer_weights + sizes.head_weights)
    prompts = limits.seconds(flops=prompt_flops + pairs * sizes.attention_flops_per_pair, read_bytes=weight_bytes)
    # Each step reads every token so far; this is the mean over the steps of an answer.
    context = round(requests * (prompt + output / 2))
    decode = (output - 1) * decode_step_seconds(sizes, limits, sequences=requests, context_tokens=context)
    return Floor(
        workload=str(workload),
        prompt_seconds=prompts,
        decode_seconds=decode,
        total_tokens_per_second=workload.round_tokens / (prompts + decode),
    )


def decode_step_seconds(sizes: ModelSizes, limits: Limits, *, sequences: int, context_tokens: int) -> float:
    """Return the floor of a step with one token of each sequence, over so many tokens of context together."""
    weights = sizes.layer_weights + sizes.head_weights
    return limits.seconds(
        flops=2.0 * sequences * weights + context_tokens * sizes.attention_flops_per_pair,
        read_bytes=_ITEM_BYTES * weights + context_tokens * sizes.kv_bytes_per_token,
    )


def measured_limits(level: CpuLevel, threads: int) -> Limits:
    """Measure what the hardware allows at a level."""
    from benchmarks.serving.machine_limits import arithmetic_flops, read_bytes_per_second

    rates: dict[int, float] = {}

    def read_rate(total: int) -> float:
        # Bandwidth depends on what fits into caches, to within a power of two.
        power = 1 << max(20, total.bit_length() - 1)
        if power not in rates:
            rates[power] = read_bytes_per_second(power, threads)
        return rates[power]

    return Limits(flops=arithmetic_flops(level, threads), read_rate=read_rate)


def sizes_of(config: dict[str, Any]) -> ModelSizes:
    heads = config["num_attention_heads"]
    return ModelSizes(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one JSON document: the machine's figures and each workload's floor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("workloads", type=parse_workload, nargs="+")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cpu-level", choices=NAMES, required=True)
    options = parser.parse_args(arguments)
    limits = measured_limits(options.cpu_level, options.threads)
    sizes = sizes_of(json.loads((options.model / "config.json").read_text(encoding="utf-8")))
    floors = [floor_of(workload, sizes, limits) for workload in options.workloads]
    document = {
        "cpu_level": options.cpu_level,
        "arithmetic_flops": limits.flops,
        "memory_bytes_per_second": limits.read_rate(256 << 20),
        "floors": [asdict(floor) for floor in floors],
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
