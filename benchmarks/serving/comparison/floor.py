"""What the machine needs for a workload if nothing but linear layers and attention cost time, measured here and now.

A round of a workload is C requests of I tokens in and O out: their C * I prompt tokens, in steps as large as is
fastest, then O - 1 steps of C rows. ``floor_of`` adds up, of that schedule,

- the linear layers, of the model's own shapes with weights of their own for every layer, by the fastest of: oneDNN on
  packed weights, torch's own, the layer quire chooses;
- attention over prompts, by torch's SDPA on one sequence at a time;
- attention in decode steps, as the bytes of keys and values it reads over the bandwidth of reading so many bytes.

Norms, sampling, scheduling, Python and HTTP are what a server has on top. Runs as a process of its own (``python -m
benchmarks.serving.comparison.floor``): the comparison holds neither torch nor its threads while servers are measured.

Legend: C requests at a time, I and O tokens in and out, T rows, K inputs, N outputs, D head dim.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.serving.comparison.workloads import Workload, parse_workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CHUNKS = (256, 1024, 2048)
"""Sizes of a prompt step that are tried; the fastest per token counts."""
_ROUNDS, _LONG_SECONDS = 6, 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What of a Llama's config decides on its floor."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    def linear_shapes(self) -> list[tuple[int, int]]:
        """[N, K] of a layer's products, those of one input made together."""
        attention = self.heads * self.head_dim
        return [
            (attention + 2 * self.kv_heads * self.head_dim, self.hidden),
            (self.hidden, attention),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]

    def kv_bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Seconds of each part by its size: ``layers`` by rows without, ``head`` by rows of the output layer;
    ``prompt_attention`` by tokens of one prompt, all layers; ``decode_attention`` by bytes that a step reads."""

    layers: dict[int, float]
    head: dict[int, float]
    prompt_attention: dict[int, float]
    decode_attention: Callable[[int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    workload: str
    linear_seconds: float
    attention_seconds: float
    total_tokens_per_second: float


def floor_of(workload: Workload, kv_bytes_per_token: int, measured: Measurements) -> Floor:
    """Of one round; pure."""
    concurrency, prompt, output = workload.concurrency, workload.input_tokens, workload.output_tokens
    tokens = concurrency * prompt
    per_token = min(measured.layers[rows] / rows for rows in prompt_steps(workload))
    steps = output - 1
    linear = tokens * per_token + steps * measured.layers[concurrency] + output * measured.head[concurrency]
    # Every token so far is read in each step, the mean over the steps of an answer.
    context = prompt + output / 2
    attention = concurrency * measured.prompt_attention[prompt]
    attention += steps * measured.decode_attention(round(concurrency * context) * kv_bytes_per_token)
    return Floor(
        workload=str(workload),
        linear_seconds=linear,
        attention_seconds=attention,
        total_tokens_per_second=workload.round_tokens / (linear + attention),
    )


def prompt_steps(workload: Workload) -> list[int]:
    """Numbers of rows in which a round's prompts may be computed."""
    tokens = workload.concurrency * workload.input_tokens
    return sorted({min(rows, tokens) for rows in CHUNKS})


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


def measure(sizes: ModelSizes, workloads: Sequence[Workload], dtype: "torch.dtype") -> Measurements:
    from benchmarks.serving.machine_limits import read_bytes_per_second

    small = {workload.concurrency for workload in workloads}
    rows = sorted(small.union(*(prompt_steps(workload) for workload in workloads)))
    rates: dict[int, float] = {}

    def decode_attention(total: int) -> float:
        # Bandwidth depends on what fits into caches, to within a power of two.
        power = 1 << max(20, total.bit_length() - 1)
        if power not in rates:
            rates[power] = read_bytes_per_second(power)
        return total / rates[power]

    return Measurements(
        layers=_fastest(sizes.linear_shapes() * sizes.layers, rows, dtype),
        head=_fastest([(sizes.vocabulary, sizes.hidden)], sorted(small), dtype),
        prompt_attention={
            tokens: sizes.layers * _attention_seconds(sizes, tokens, dtype)
            for tokens in {workload.input_tokens for workload in workloads}
        },
        decode_attention=decode_attention,
    )


def _fastest(shapes: Sequence[tuple[int, int]], rows: Sequence[int], dtype: "torch.dtype") -> dict[int, float]:
    """Of all layers of these shapes, by number of rows, each by the fastest way there is."""
    import torch

    best = dict.fromkeys(rows, math.inf)
    for pack in _ways(dtype):
        try:
            layers = [(pack(torch.randn(out, inputs).to(dtype)), inputs) for out, inputs in shapes]
        except (AttributeError, RuntimeError):
            continue  # this torch, or this processor, has no such way
        inputs = {width for _, width in layers}
        for count in rows:
            xs = {width: torch.randn(count, width).to(dtype) for width in inputs}

            def run(layers: Any = layers, xs: Any = xs) -> None:
                for layer, width in layers:
                    layer(xs[width])

            best[count] = min(best[count], _least_seconds(run))
    return best


def _ways(dtype: "torch.dtype") -> "list[Callable[[Tensor], Callable[[Tensor], Tensor]]]":
    import torch
    from torch.nn import functional

    from quire_engine.model.linear import choose_linear_backend

    def packed(weight: "Tensor") -> "Callable[[Tensor], Tensor]":
        blocks = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return lambda x: torch.ops.mkldnn._linear_pointwise.default(x, blocks, None, "none", [], "")

    def plain(weight: "Tensor") -> "Callable[[Tensor], Tensor]":
        return lambda x: functional.linear(x, weight)

    backend = choose_linear_backend(dtype)
    return [packed, plain, lambda weight: backend.pack(weight, None)]


def _attention_seconds(sizes: ModelSizes, tokens: int, dtype: "torch.dtype") -> float:
    """Of one layer over one prompt."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    q = torch.randn(1, sizes.heads, tokens, sizes.head_dim).to(dtype)
    k, v = (torch.randn(1, sizes.kv_heads, tokens, sizes.head_dim).to(dtype) for _ in range(2))
    shared = sizes.heads != sizes.kv_heads
    return _least_seconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared))


def _least_seconds(work: Callable[[], object]) -> float:
    """Other work on the machine only takes away. Long work is repeated less."""
    best = math.inf
    work()
    for count in range(_ROUNDS):
        if count >= 2 and best > _LONG_SECONDS:
            break
        began = perf_counter()
        work()
        best = min(best, perf_counter() - began)
    return best


def main() -> None:
    """Prints one JSON document: the machine's figures and each workload's floor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("workloads", type=parse_workload, nargs="+")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), required=True)
    arguments = parser.parse_args()
    import torch

    from benchmarks.serving.machine_limits import gemm_flops, read_bytes_per_second

    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    sizes = sizes_of(json.loads((arguments.model / "config.json").read_text(encoding="utf-8")))
    gemm = {
        str(kind).removeprefix("torch."): gemm_flops(kind, arguments.threads)
        for kind in ((torch.bfloat16, torch.float32) if dtype is torch.bfloat16 else (torch.float32,))
    }
    with torch.inference_mode():
        measured = measure(sizes, arguments.workloads, dtype)
        kv_bytes = sizes.kv_bytes_per_token(dtype.itemsize)
        floors = [floor_of(workload, kv_bytes, measured) for workload in arguments.workloads]
    document = {
        "dtype": arguments.dtype,
        "gemm_flops": gemm,
        "memory_bytes_per_second": read_bytes_per_second(256 << 20),
        "layers_seconds": measured.layers,
        "head_seconds": measured.head,
        "prompt_attention_seconds": measured.prompt_attention,
        "floors": [asdict(floor) for floor in floors],
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
