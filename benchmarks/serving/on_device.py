#!/usr/bin/env python3
"""Measure the engine on this GPU, in this process: tokens/s, time to first token, inter-token latency.

A decode step is also compared with the time to read its weights and KV cache. The model is Llama-3.1-8B's shape with
random weights, in a closed loop at each concurrency; there is no HTTP, IPC or tokenizer. A decode step's floor is the
weights and the KV cache that it reads, divided by the read bandwidth measured in the same run. "Outside the GPU" is the
share of wall time in which no step ran on the GPU, by CUDA events. JSON is written after each case. Without a GPU the
demo model runs on the CPU, which shows that the command works.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.report import DEMO_MODEL, ROOT, interrupt_on_terminate, show_table, usable_cpus, write_json
from benchmarks.serving.in_process import Clients, Decoded, Load, Served
from quire_engine.config import CacheOptions, DeviceOptions, EngineConfig, ModelOptions, ServerOptions
from quire_engine.core.options import SchedulerOptions
from quire_engine.engine import make_engine
from quire_engine.errors import EngineError

if TYPE_CHECKING:
    from quire_engine.core.ports import LoadedModel

LLAMA_8B = ROOT / "benchmarks" / "models" / "llama-3.1-8b"
DEFAULT_JSON = Path("out/bench/on_device.json")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Row:
    """The results of one concurrency. Without a GPU there is no floor, because the bandwidth is unknown."""

    concurrency: int
    served: Served
    decoded: Decoded
    bytes_per_step: float
    floor_seconds: float | None

    @property
    def over_floor(self) -> float | None:
        return None if self.floor_seconds is None else self.decoded.step_seconds / self.floor_seconds


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="a model folder (default: Llama-3.1-8B's shape; without a GPU, demo)"
    )
    parser.add_argument("--load-format", choices=("safetensors", "dummy"), help="default: dummy for the default model")
    parser.add_argument("--dtype", choices=("auto", "float32", "float16", "bfloat16"), default="auto")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (default 512)")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer (default 128)")
    parser.add_argument("--rounds", type=int, default=3, help="answers per client (default 3)")
    parser.add_argument("--steps", type=int, default=64, help="decode steps to time (default 64)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--seconds", type=float, default=420.0, help="begin no case after these (default 420)")
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, help=f"default {DEFAULT_JSON}")
    return parser.parse_args()


def configure(arguments: argparse.Namespace, *, gpu: bool) -> EngineConfig:
    folder = arguments.model or (LLAMA_8B if gpu else DEMO_MODEL)
    dummy = arguments.load_format == "dummy" or (arguments.load_format is None and folder == LLAMA_8B)
    return EngineConfig(
        model=ModelOptions(
            path=folder,
            dtype=arguments.dtype,
            load_format="dummy" if dummy else "safetensors",
            max_model_len=arguments.prompt + 1024,
        ),
        cache=CacheOptions(
            kv_cache_dtype=arguments.kv_cache_dtype,
            kv_cache_memory_bytes=None if gpu else 256 << 20,
        ),
        scheduler=SchedulerOptions(
            max_num_seqs=max(arguments.concurrency),
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            max_generation_stall_seconds=0.0,
            enable_prefix_caching=False,
        ),
        server=ServerOptions(),
        device=DeviceOptions(enforce_eager=arguments.enforce_eager, deterministic=arguments.deterministic),
        threads=len(usable_cpus()),
    )


def measure(model: "LoadedModel", config: EngineConfig, load: Load, steps: int, bandwidth: float | None) -> Row:
    def clients() -> Clients:
        engine = make_engine(model, scheduler=config.scheduler)
        return Clients(engine, vocab_size=model.vocab_size, max_model_len=model.traits.max_model_len)

    clients().serve(Load(concurrency=load.concurrency, requests=load.concurrency, prompt=load.prompt, output=4))
    served = clients().serve(load)
    decoded = clients().decode(load.concurrency, load.prompt, steps, gpu_seconds=gpu_clock(model))
    read = weight_bytes(model, config.model.path) + decoded.context_tokens * sum(model.block_bytes) / block_size(model)
    return Row(
        concurrency=load.concurrency,
        served=served,
        decoded=decoded,
        bytes_per_step=read,
        floor_seconds=None if bandwidth is None else read / bandwidth,
    )


def gpu_clock(model: "LoadedModel") -> Callable[[], float] | None:
    """Return a clock of the GPU's time on steps, if the runner counts it."""
    runner = model.runner
    return (lambda: float(runner.gpu_seconds)) if hasattr(runner, "gpu_seconds") else None


def weight_bytes(model: "LoadedModel", folder: Path) -> int:
    """Return the bytes of weights that a step reads: all except an embedding table, of which it reads a few rows."""
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if fields.get("tie_word_embeddings", True):
        return model.model_bytes
    return model.model_bytes - fields["vocab_size"] * fields["hidden_size"] * _ITEM_BYTES[model.dtype]


def block_size(model: "LoadedModel") -> int:
    return model.layout.block_size


def machine(*, gpu: bool) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "device": "CPU"}
    if gpu:
        import triton

        found |= {"device": torch.cuda.get_device_name(0), "triton": triton.__version__, "cuda": torch.version.cuda}
    return found


def read_bandwidth() -> dict[str, Any]:
    """Measure the read bandwidth before the model uses the memory."""
    import torch

    from benchmarks.kernels.gpu_timing import Timer, measure_card

    device = torch.device("cuda", torch.cuda.current_device())
    return asdict(measure_card(Timer(device), device))


def show(rows: Sequence[Row], notes: Sequence[str]) -> None:
    def both(seconds: Any) -> str:
        return f"{seconds.median * 1e3:,.1f} / {seconds.p99 * 1e3:,.1f}"

    lines = []
    for row in rows:
        share, over = row.decoded.gpu_share, row.over_floor
        lines.append(
            [
                str(row.concurrency),
                f"{row.served.output_tokens_per_second:,.0f}",
                both(row.served.ttft),
                both(row.served.itl),
                f"{row.decoded.step_seconds * 1e3:,.2f}",
                "" if row.floor_seconds is None else f"{row.floor_seconds * 1e3:,.2f}",
                "" if over is None else f"{over:.2f}",
                "" if share is None else f"{max(0.0, 1.0 - share):.1%}",
            ]
        )
    columns = ["concurrency", "output tokens/s", "TTFT p50 / p99 ms", "ITL p50 / p99 ms", "decode step ms", "floor ms"]
    show_table("Serving in process", [*columns, "over floor", "outside the GPU"], lines, notes)


class Run:
    """The results so far, written to the file after each case."""

    def __init__(self, arguments: argparse.Namespace, *, gpu: bool, began: float) -> None:
        self.arguments = arguments
        self.began = began
        self.card = read_bandwidth() if gpu else None
        self.rows: list[Row] = []
        self.waiting: list[int] = list(arguments.concurrency)
        self.found: dict[str, Any] = {"machine": machine(gpu=gpu), "card": self.card, "rows": []}

    def measure_all(self, model: "LoadedModel", config: EngineConfig) -> None:
        arguments = self.arguments
        self.found |= {"model": config.model.path.name, "dtype": model.dtype, "start_seconds": model.phase_seconds}
        self.found |= {"prompt": arguments.prompt, "output": arguments.output}
        while self.waiting and perf_counter() - self.began < arguments.seconds:
            load = Load(
                concurrency=self.waiting[0],
                requests=max(4, arguments.rounds * self.waiting[0]),
                prompt=arguments.prompt,
                output=arguments.output,
            )
            bandwidth = None if self.card is None else self.card["read_bytes_per_second"]
            row = measure(model, config, load, arguments.steps, bandwidth)
            self.waiting.pop(0)
            self.rows.append(row)
            self.found["rows"].append(asdict(row) | {"over_floor": row.over_floor})
            self.found["not_measured"] = list(self.waiting)
            write_json(arguments.json, self.found)
            at, rate = perf_counter() - self.began, row.served.output_tokens_per_second
            print(f"[{at:5.0f} s] concurrency {row.concurrency}: {rate:,.0f} output tokens/s", file=sys.stderr)

    def notes(self, model: "LoadedModel") -> list[str]:
        start = sum(model.phase_seconds.values())
        machine = ", ".join(f"{name} {value}" for name, value in self.found["machine"].items())
        lengths = f"prompts of {self.arguments.prompt}, answers of {self.arguments.output}"
        notes = [machine, f"{self.found['model']}, {model.dtype}, {lengths}; loaded in {start:.1f} s"]
        if self.card is None:
            notes.append("Skipped, as there is no GPU: Llama-3.1-8B's shape, the floor, time outside the GPU.")
        else:
            rate = self.card["read_bytes_per_second"] / 1e9
            notes.append(f"floor: weights and KV cache read at {rate:,.0f} GB/s, as measured in this run")
        if self.waiting:
            notes.append(f"not measured, the time was up: concurrency {', '.join(map(str, self.waiting))}")
        return notes


def main() -> None:
    arguments = parse_arguments()
    began = perf_counter()
    # As in the engine's process (ipc.process): spinning threads take the CPU from working ones.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    try:
        import torch
    except ImportError:
        raise SystemExit("torch is not installed here: no model can run") from None
    gpu = torch.cuda.is_available()
    if not gpu:
        print("No GPU here: a small model on the CPU, to show that the command works.", flush=True)
    run = Run(arguments, gpu=gpu, began=began)
    config = configure(arguments, gpu=gpu)
    from quire_engine.runner import load_model

    try:
        model = load_model(config)
    except EngineError as error:
        raise SystemExit(str(error)) from None
    interrupt_on_terminate()
    try:
        run.measure_all(model, config)
    except KeyboardInterrupt:
        print("stopped early", file=sys.stderr)
    finally:
        model.runner.close()
    show(run.rows, run.notes(model))


if __name__ == "__main__":
    main()
