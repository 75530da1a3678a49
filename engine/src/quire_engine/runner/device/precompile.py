"""Ahead-of-time compilation of the Triton kernels of whole models, for GPUs that are not present.

    python -m quire_engine.runner.device.precompile [--capability 80 gfx942] [--model FOLDER ...] [--check]

It runs the steps of a start (``warm_up``, and the capture of graphs) with a model without weights over a stand-in for
the driver, so that Triton compiles what a start on that GPU would, under the same keys, into TRITON_CACHE_DIR. The
models are a few popular shapes, or those of folders with a config.json. Sizes that depend on the GPU's memory or on
flags are no part of a key: ``--check`` runs with other sizes, and fails if anything had to be compiled.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.model.config import ModelConfig, load_config, parse_config
from quire_engine.model.families import FAMILIES
from quire_engine.model.weightless import build_weightless
from quire_engine.runner.device.accelerator import InterpretedAccelerator
from quire_engine.runner.device.graphs import GraphSizes
from quire_engine.runner.device_runner import DeviceRunner
from quire_engine.runner.device_steps import DeviceParts
from quire_engine.runner.warm_up import SHORT_CHUNKS, warm_up
from quire_kernels.kv_cache import allocate_kv_cache
from quire_kernels.triton_runtime.stand_in import first_tokens, standing_in
from quire_kernels.triton_runtime.target import AMD_ARCHITECTURES

CAPABILITIES = (80, 86, 89, 90, 100, 120)
_CPU = torch.device("cpu")
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "eos_token_id": 0,
}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "head_dim": 128,
    "eos_token_id": 0,
}


def _shape(family: dict[str, Any], hidden: int, inner: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1}
    return {**family, **sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **more}


# One layer of each: all layers of these models use the same kernels.
SHAPES = {
    "Llama-3.2-1B": _shape(_LLAMA, 2048, 8192, 32, 8, head_dim=64),
    "Llama-3.2-3B": _shape(_LLAMA, 3072, 8192, 24, 8, head_dim=128),
    "Llama-3.1-8B": _shape(_LLAMA, 4096, 14336, 32, 8),
    "Qwen3-4B": _shape(_QWEN3, 2560, 9728, 32, 8),
    "Qwen3-8B": _shape(_QWEN3, 4096, 12288, 32, 8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a start that depend on the GPU and on flags."""

    blocks: int = 40
    rows: int = 8
    tokens: int = 64
    max_model_len: int = 256


_OTHER_SIZES = Sizes(blocks=57, rows=5, tokens=97, max_model_len=333)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m quire_engine.runner.device.precompile",
        description="Compile the Triton kernels of models into TRITON_CACHE_DIR, for GPUs that are not present.",
    )
    parser.add_argument(
        "--capability",
        type=_gpu,
        nargs="+",
        default=CAPABILITIES,
        help="such as 80 90, or AMD's architectures, such as gfx942 (default: all of NVIDIA's)",
    )
    parser.add_argument("--model", type=Path, nargs="*", default=[], help="model folders instead of popular shapes")
    parser.add_argument("--check", action="store_true", help="use other sizes, and fail if anything had to be compiled")
    args = parser.parse_args(arguments)
    if len(args.capability) > 1:  # Triton keeps one target in a process.
        rest = [*(["--check"] if args.check else []), *(["--model", *map(str, args.model)] if args.model else [])]
        command = [sys.executable, "-m", "quire_engine.runner.device.precompile", *rest, "--capability"]
        return max(subprocess.run([*command, str(each)], check=False).returncode for each in args.capability)
    (capability,) = args.capability
    label = capability if isinstance(capability, str) else f"sm_{capability}"
    compiled = 0
    for name, config in _configs(args.model):
        began = time.perf_counter()
        found = compile_for(config, capability, _OTHER_SIZES if args.check else Sizes())
        compiled += found.compiled
        seconds = time.perf_counter() - began
        print(f"{label} {name}: {found.compiled} compiled, {found.found} in the cache, {seconds:.0f} s")
    if args.check and compiled:
        print(f"{compiled} kernels were not in {os.environ.get('TRITON_CACHE_DIR', 'the cache')}", file=sys.stderr)
        return 1
    return 0


def _gpu(text: str) -> int | str:
    if text in AMD_ARCHITECTURES:
        return text
    if not text.isdecimal():
        known = ", ".join((*map(str, CAPABILITIES), *AMD_ARCHITECTURES))
        raise argparse.ArgumentTypeError(f"{text!r} should be one of {known}")
    return int(text)


def _configs(folders: Sequence[Path]) -> Iterator[tuple[str, ModelConfig]]:
    for folder in folders:
        yield folder.name, load_config(folder, tuple(FAMILIES))
    if not folders:
        for name, raw in SHAPES.items():
            problems: list[str] = []
            config = parse_config(raw, {}, tuple(FAMILIES), problems)
            assert config is not None, problems
            yield name, config


@dataclass(slots=True)
class Compilations:
    compiled: int = 0
    found: int = 0


@contextmanager
def counted() -> Iterator[Compilations]:
    """Count the kernels that Triton compiles, and those that it finds in its cache."""
    from triton import knobs

    counts = Compilations()

    def listen(*, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            counts.found += 1
        else:
            counts.compiled += 1

    before, knobs.compilation.listener = knobs.compilation.listener, listen
    try:
        yield counts
    finally:
        knobs.compilation.listener = before


def compile_for(
    config: ModelConfig, capability: int | str, sizes: Sizes = Sizes(), dtype: torch.dtype = torch.bfloat16
) -> Compilations:
    """Run a start of the model on a GPU that is not present. Return what was compiled, and what was not."""
    with standing_in(capability) as stand_in, counted() as counts, torch.inference_mode():
        stand_in.observe = first_tokens
        layout = KVCacheLayout(
            block_size=16,
            groups=tuple(
                KVCacheGroup(
                    layers=tuple(layer for layer, own in enumerate(config.windows) if own == window),
                    num_blocks=sizes.blocks,
                    window=window,
                )
                for window in config.kv_groups
            ),
        )
        runner = DeviceRunner(
            DeviceParts(
                model=build_weightless(config, dtype, sizes.max_model_len),
                caches=tuple(
                    allocate_kv_cache(
                        num_blocks=sizes.blocks + 1,
                        block_size=16,
                        kv_heads=config.num_kv_heads,
                        head_dim=config.head_dim,
                        dtype=dtype,
                        device=_CPU,
                    )
                    for _ in range(config.num_layers)
                ),
                layout=layout,
                num_heads=config.num_heads,
                max_rows=sizes.rows,
                max_tokens=sizes.tokens,
                max_model_len=sizes.max_model_len,
                device=_CPU,
                accelerator=InterpretedAccelerator(_CPU),
            ),
            vocab_size=config.vocab_size,
            graph_sizes=GraphSizes(decode=(1,), mixed=(sizes.tokens,)),
        )
        warm_up(
            runner,
            layout,
            max_model_len=sizes.max_model_len,
            max_tokens=sizes.tokens,
            block_bytes=(1,) * len(layout.groups),
            chunks=SHORT_CHUNKS,
        )
        runner.capture_graphs()
        runner.close()
    return counts


if __name__ == "__main__":
    sys.exit(main())
