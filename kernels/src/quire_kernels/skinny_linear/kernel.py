"""skinny_linear in Triton: y^T = W x^T, so that the weight's rows fill the long side of a matrix instruction.

A program multiplies a tile of outputs by one part of the inputs (split K). The last program of a tile to arrive adds
the parts in ascending order, so that a result does not depend on the order of arrival, and one launch suffices. It also
sets the count of arrivals to 0 for the next launch.

Legend: T rows, K inputs, N outputs, C splits of K.
"""

import functools

import torch
import triton.language as tl
from torch import Tensor

from quire_kernels.skinny_linear import MAX_ROWS
from quire_kernels.triton_runtime.aot_case import AotCase
from quire_kernels.triton_runtime.config import LaunchConfig, config_for
from quire_kernels.triton_runtime.debug import kernel
from quire_kernels.triton_runtime.device import device_properties, require_device, target_of
from quire_kernels.triton_runtime.launch import Launch, launches
from quire_kernels.triton_runtime.sizes import cdiv
from quire_kernels.triton_runtime.target import Target

_SHORTEST_SPLIT = 256
_START_COST = 256
"""The cost of a program besides its inputs, in inputs: the first tile's latency, and the partial sums."""
_MOST_WAVES = 2
"""Splits are made only up to this many programs for each place on a multiprocessor, which bounds the partial sums."""


@kernel(varying=["rows", "splits"])
def _skinny_linear_kernel(
    x,  # [T, K]
    weight,  # [N, K]
    bias,  # [N], not read unless BIAS
    out,  # [T, N]
    partials,  # float32 [tiles, C, ROWS, BLOCK_N], not accessed unless SPLIT
    arrivals,  # int32 [tiles], 0 before and after a launch, not accessed unless SPLIT
    rows,
    inputs,
    outputs,
    x_stride,
    split_inputs,  # of a split, a multiple of BLOCK_K
    splits,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, BLOCK_N)
    row, column = tl.arange(0, ROWS), tile * BLOCK_N + within  # [ROWS], [BLOCK_N]
    # Indices beyond the last row and column read the last one again; their results are not stored.
    x_rows = x + tl.minimum(row, rows - 1).to(tl.int64)[None, :] * x_stride
    weight_rows = weight + tl.minimum(column, outputs - 1)[:, None] * inputs
    first = tl.program_id(1) * split_inputs
    total = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for begin in range(first, tl.minimum(first + split_inputs, inputs), BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        if EVEN_K:
            # Weights are read once in a step and should not displace what is read again.
            left = tl.load(weight_rows + k[None, :], eviction_policy="evict_first")
            right = tl.load(x_rows + k[:, None])
        else:
            left = tl.load(weight_rows + k[None, :], mask=k[None, :] < inputs, other=0.0)
            right = tl.load(x_rows + k[:, None], mask=k[:, None] < inputs, other=0.0)
        total = tl.dot(left, right, total)
    is_last = True
    if SPLIT:
        own = partials + tile * splits * (ROWS * BLOCK_N) + row[None, :] * BLOCK_N + within[:, None]
        tl.store(own + tl.program_id(1) * (ROWS * BLOCK_N), total, mask=row[None, :] < rows)
        # All threads' stores come before the arrival, which other multiprocessors acquire.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == splits - 1
    if is_last:
        if SPLIT:
            total = tl.zeros((BLOCK_N, ROWS), tl.float32)
            for split in range(splits):
                # From the L2 cache, where the stores of other multiprocessors are.
                place = own + split * (ROWS * BLOCK_N)
                total += tl.load(place, mask=row[None, :] < rows, other=0.0, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
        if BIAS:
            total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[:, None]
        inside = (row[None, :] < rows) & (column[:, None] < outputs)
        tl.store(out + row[None, :] * outputs + column[:, None], total.to(out.dtype.element_ty), mask=inside)


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    device = x.device
    require_device("skinny_linear", device)
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=device)
    if not out.numel():
        return out
    if not inputs:
        return out.copy_(bias) if bias is not None else out.zero_()
    layer = _layer(inputs, outputs, device_properties(device).multiprocessors, bias is not None, target_of(device))
    tiles, splits, split_inputs = layer.cut
    partials, arrivals = _scratch(device, layer.most_programs, layer.partial_floats)
    layer.launch(
        (tiles, splits),
        x,
        weight,
        x if bias is None else bias,  # An argument that is not read still needs a pointer.
        out,
        partials,
        arrivals,
        rows,
        inputs,
        outputs,
        x.stride(0),
        split_inputs,
        splits,
    )
    return out


class _Layer:
    """The launch for one shape of weights."""

    __slots__ = ("cut", "launch", "most_programs", "partial_floats")

    def __init__(self, inputs: int, outputs: int, slots: int, *, biased: bool, config: LaunchConfig) -> None:
        tiles, splits, split_inputs = self.cut = cut(inputs, outputs, slots, config)
        self.most_programs = _MOST_WAVES * slots
        self.partial_floats = self.most_programs * MAX_ROWS * config.blocks["BLOCK_N"]
        self.launch = _launch(config, split=splits > 1, biased=biased, even=inputs % config.blocks["BLOCK_K"] == 0)


@launches
def _layer(inputs: int, outputs: int, multiprocessors: int, biased: bool, target: Target) -> _Layer:
    config = config_for("skinny_linear.multiply", target)
    slots = multiprocessors * config.blocks["PROGRAMS_PER_SM"]
    return _Layer(inputs, outputs, slots, biased=biased, config=config)


def _launch(config: LaunchConfig, *, split: bool, biased: bool, even: bool) -> Launch:
    options = config.options
    del options["PROGRAMS_PER_SM"]
    return Launch(_skinny_linear_kernel, SPLIT=split, BIAS=biased, EVEN_K=even, ROWS=MAX_ROWS, **options)


@functools.cache
def _scratch(device: torch.device, programs: int, floats: int) -> tuple[Tensor, Tensor]:
    """Return the memory that all launches share: partial sums, and counts of arrivals. Graphs contain its address."""
    return (
        torch.empty(floats, dtype=torch.float32, device=device),
        torch.zeros(programs, dtype=torch.int32, device=device),
    )


def cut(inputs: int, outputs: int, slots: int, config: LaunchConfig) -> tuple[int, int, int]:
    """Return the tiles of N, the splits of K, and the inputs of each split except the last.

    slots  the programs that the device runs at once

    With more splits, more programs read at once; the cost is that of all waves of programs, one after another.
    """
    tiles, block = cdiv(outputs, config.blocks["BLOCK_N"]), config.blocks["BLOCK_K"]
    most = max(1, min(inputs // _SHORTEST_SPLIT, _MOST_WAVES * slots // tiles))

    def split_inputs(splits: int) -> int:
        return cdiv(cdiv(inputs, splits), block) * block

    def cost(splits: int) -> int:
        return cdiv(tiles * splits, slots) * (split_inputs(splits) + _START_COST)

    best = min(range(1, most + 1), key=cost)
    size = split_inputs(best)
    return tiles, cdiv(inputs, size), size


def aot_cases(target: Target) -> list[AotCase]:
    config = config_for("skinny_linear.multiply", target)

    def case(dtype: str, name: str, *, split: bool, bias: bool = False, even: bool = True) -> AotCase:
        pointers = dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}:16")
        sizes = dict.fromkeys(("outputs", "x_stride", "split_inputs", "inputs"), "i32:16")
        scratch = {"partials": "*fp32:16", "arrivals": "*i32:16"}
        return AotCase(
            name=f"{dtype} {name}",
            launch=_launch(config, split=split, biased=bias, even=even),
            signature={**pointers, **scratch, "rows": "i32", **sizes, "splits": "i32"},
            programs_per_sm=config.blocks["PROGRAMS_PER_SM"],
        )

    return [
        case("bf16", "whole", split=False),
        case("bf16", "split", split=True),
        case("bf16", "split, bias", split=True, bias=True),
        case("bf16", "split, uneven", split=True, even=False),
        case("fp16", "split", split=True),
    ]
