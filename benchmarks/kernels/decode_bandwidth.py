#!/usr/bin/env python3
"""Measure how fast linear layers of a few rows read their weights, and how fast many rows multiply by tiles.

    python -m benchmarks.kernels.decode_bandwidth [--level x86-64-v3] [--threads 2] [--forms bf16 int8] [--rows 1 2 4 8]

Weights are read once per call, from a rotation of layers that is several times larger than the last cache. The share is
that of a plain read of memory by as many threads in the same run. With AMX, products of 256 and 1,024 rows are measured
as well, as a share of what tiles reach without loads. A level below this CPU's own limits our kernels, and not oneDNN.
"""

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from benchmarks.report import ROOT, at_least_one, machine, show_table
from quire_engine.model.linear import OneDnnLinearBackend
from quire_kernels import packed_linear as packed
from quire_kernels.cpu_runtime import Worker, launch
from quire_kernels.cpu_runtime.amx import may_use_tiles
from quire_kernels.cpu_runtime.features import multiplies_tiles
from quire_kernels.cpu_runtime.scalars import as_int64_pointer, fetch_add, int64_pointer
from quire_kernels.cpu_runtime.tiles import TILE_BYTES, configure, multiply_registers, release
from quire_kernels.precompiled.levels import LEVELS

Layer = Callable[[Tensor], Tensor]

SHAPES = {
    "SmolLM2-135M qkv": (960, 576),
    "SmolLM2-135M o": (576, 576),
    "SmolLM2-135M gate, up": (3072, 576),
    "SmolLM2-135M down": (576, 1536),
    "14336 x 4096": (14336, 4096),
}
"""Outputs and inputs."""
FORMS = ("bf16", "int8", "fp32", "fp16", "onednn fp32", "onednn bf16")

_READ_BYTES = 256 << 20
_PIECE_BYTES = 1 << 18
_ROTATION_BYTES = 128 << 20
_TURNS = 5
_TILE_ROWS = (256, 1024)
_PEAK_STEPS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A way to hold weights, and the layer that multiplies by them."""

    bytes_per_weight: int
    activations: torch.dtype
    pack: Callable[[Tensor], Layer]


def forms() -> dict[str, Form]:
    """Return the forms that this process can multiply by."""

    def onednn(dtype: torch.dtype) -> Callable[[Tensor], Layer]:
        return lambda weight: OneDnnLinearBackend(dtype).pack(weight, None)

    def whole(weight: Tensor) -> Layer:
        return functools.partial(packed.int8_linear, weights=packed.pack_int8(weight))

    def floats(weight: Tensor) -> Layer:
        return functools.partial(packed.float_linear, weights=packed.pack_float(weight))

    def halves(weight: Tensor) -> Layer:
        return functools.partial(packed.float_linear, weights=packed.pack_float(weight, halves=True))

    def pairs(weight: Tensor) -> Layer:
        return functools.partial(packed.bfloat16_linear, weights=packed.pack_bfloat16(weight))

    found = {
        "int8": Form(bytes_per_weight=1, activations=torch.float32, pack=whole),
        "fp32": Form(bytes_per_weight=4, activations=torch.float32, pack=floats),
        "fp16": Form(bytes_per_weight=2, activations=torch.float32, pack=halves),
        "onednn fp32": Form(bytes_per_weight=4, activations=torch.float32, pack=onednn(torch.float32)),
    }
    if packed.supports_bfloat16():
        found["bf16"] = Form(bytes_per_weight=2, activations=torch.bfloat16, pack=pairs)
        found["onednn bf16"] = Form(bytes_per_weight=2, activations=torch.bfloat16, pack=onednn(torch.bfloat16))
    return found


def _read_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 6)
    total = 0
    while True:
        item = fetch_add(counter, 0)
        if item >= a[1]:
            break
        part = carray(int64_pointer(a[3] + item * a[4]), a[4] // 8)
        for i in range(part.size):
            total += part[i]
    # Stored, or nothing would be read.
    carray(int64_pointer(a[5]), 1)[0] = total


def _peak_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 4)
    ones, configuration = np.full(TILE_BYTES // 2, 0x3F80, np.uint16), np.zeros(64, np.uint8)
    while fetch_add(counter, 0) < a[1]:
        configure(configuration, 16, 16)
        multiply_registers(a[3], ones.ctypes.data)
        release()
        configuration[:] = 0


_READ = Worker(_read_worker)
_PEAK = Worker(_peak_worker) if multiplies_tiles() else None


def read_bandwidth() -> float:
    """Return the bytes per second of a plain read by all threads."""
    memory, sums = torch.ones(_READ_BYTES // 8, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    arguments = (memory.data_ptr(), _PIECE_BYTES, sums.data_ptr())
    pieces = _READ_BYTES // _PIECE_BYTES
    return _READ_BYTES / _least(lambda: launch(_READ, torch.float32, pieces, arguments, parallel=True))


def peak_of_tiles(threads: int) -> float:
    """Return the operations per second of bfloat16 tiles that are neither loaded nor stored between products."""
    assert _PEAK is not None
    worker = _PEAK
    seconds = _least(lambda: launch(worker, torch.bfloat16, threads, (_PEAK_STEPS,), parallel=True))
    return threads * _PEAK_STEPS * 4 * 2 * 16 * 16 * 32 / seconds


def _least(call: Callable[[], object]) -> float:
    call()
    least = float("inf")
    for _ in range(_TURNS):
        began = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - began)
    return least


def _rotation(form: Form, outputs: int, inputs: int) -> tuple[list[Layer], int]:
    size = outputs * inputs * form.bytes_per_weight
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(form.activations)
    return [form.pack(weight) for _ in range(max(2, -(-_ROTATION_BYTES // size)))], size


def decode_rows(chosen: dict[str, Form], shapes: list[str], rows: list[int], bandwidth: float) -> list[tuple[str, ...]]:
    """Return a line of the table for each form and shape."""
    lines = []
    for name, form in chosen.items():
        for shape in shapes:
            outputs, inputs = SHAPES[shape]
            layers, size = _rotation(form, outputs, inputs)
            cells = []
            for count in rows:
                x = torch.randn(count, inputs).to(form.activations)
                seconds = _least(lambda x=x, layers=layers: [layer(x) for layer in layers])  # type: ignore[misc]
                speed = size * len(layers) / seconds
                cells.append(f"{speed / 1e9:.1f} ({speed / bandwidth:.0%})")
            lines.append((name, shape, *cells))
    return lines


def tile_rows(shapes: list[str], peak: float) -> list[tuple[str, ...]]:
    """Return a line for each shape: bfloat16 products of many rows, and their share of the peak."""
    lines = []
    for shape in shapes:
        outputs, inputs = SHAPES[shape]
        layer = forms()["bf16"].pack((torch.randn(outputs, inputs) / inputs**0.5).bfloat16())
        cells = []
        for count in _TILE_ROWS:
            x = torch.randn(count, inputs).bfloat16()
            speed = 2 * count * outputs * inputs / _least(lambda x=x, layer=layer: layer(x))  # type: ignore[misc]
            cells.append(f"{speed / 1e9:.0f} ({speed / peak:.0%})")
        lines.append((shape, *cells))
    return lines


def _start_at(name: str) -> None:
    """Start this program again with numba compiling for the level, unless it does already: it reads that once."""
    level = next(level for level in LEVELS if level.name == name)
    chosen = {"NUMBA_CPU_NAME": level.cpu, "NUMBA_CPU_FEATURES": level.feature_string}
    if any(os.environ.get(variable) != value for variable, value in chosen.items()):
        os.chdir(ROOT)
        command = [sys.executable, "-m", "benchmarks.kernels.decode_bandwidth", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **chosen})


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--level", choices=[level.name for level in LEVELS], help="(default: this very CPU)")
    arguments.add_argument("--threads", type=at_least_one, default=torch.get_num_threads())
    arguments.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, metavar="FORM", help=", ".join(FORMS))
    arguments.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SHAPE")
    arguments.add_argument("--rows", nargs="+", type=at_least_one, default=[1, 2, 4, 8])
    args = arguments.parse_args()
    if args.level:
        _start_at(args.level)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    before = read_bandwidth()
    chosen = {name: form for name, form in forms().items() if name in args.forms}
    lines = decode_rows(chosen, args.shapes, args.rows, before)
    after = read_bandwidth()
    title = (
        f"{machine()}, {args.level or 'this very CPU'}, {args.threads} threads: GB/s of weights, and the share of a "
        f"plain read ({before / 1e9:.1f} GB/s before, {after / 1e9:.1f} after)"
    )
    show_table(title, ("weights", "layer", *(f"{count} rows" for count in args.rows)), lines)
    if may_use_tiles():
        peak = peak_of_tiles(args.threads)
        title = f"GFLOP/s of bfloat16 tiles, and the share of the peak ({peak / 1e9:.0f} GFLOP/s)"
        show_table(title, ("layer", *(f"{count} rows" for count in _TILE_ROWS)), tile_rows(args.shapes, peak))


if __name__ == "__main__":
    main()
