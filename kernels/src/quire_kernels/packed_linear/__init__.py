"""Linear layers on a CPU with weights packed once for the instructions that multiply them: int8, bfloat16 or float32.

int8 is W8A8: the weights of an output share a scale, and each row of activations gets its own scale and zero point at
run time (Dettmers et al., "LLM.int8()", 2022, without its outliers; Yao et al., "ZeroQuant", 2022). Its products are
accumulated as integers, the others in float32 in the order of K. In both cases a row's result has the same bits in
every batch, at every position in it, and on any number of threads.

Legend: T rows, K inputs, N outputs, P panels of 32 outputs, U units of K.
"""

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from quire_kernels.checks import check_dense, check_storage, refuse
from quire_kernels.errors import UnsupportedDeviceError
from quire_kernels.host_memory import in_large_pages

PANEL = 32
"""The number of outputs whose weights are packed together."""
INT8_UNIT = 4
PAIR_UNIT = 2
"""The number of inputs that one instruction reads from each row: four bytes."""

MAX_INT8_INPUTS = 65_536
"""The number of products of 255 by 127 whose sum fits into an int32."""

# Rows quantized together: a whole matrix in float32 would need several times the memory of the result.
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weights:
    inputs: int
    outputs: int
    panels: Tensor  # [P, U, 32, 4] int8
    scales: Tensor  # [P * 32] float32
    sums: Tensor  # [P * 32] int32: the sum of an output's quantized weights
    bias: Tensor  # [P * 32] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class BFloat16Weights:
    inputs: int
    outputs: int
    panels: Tensor  # [P, U, 32, 2] bfloat16
    bias: Tensor  # [P * 32] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatWeights:
    inputs: int
    outputs: int
    panels: Tensor  # [P, K, 32] float32 or float16
    bias: Tensor  # [P * 32] float32


def pack_int8(weight: Tensor, bias: Tensor | None = None) -> Int8Weights:
    """Return ``weight`` [N, K] rounded to 255 levels with a scale per output, and packed.

    Raise ArgumentError on other shapes or dtypes, or for more inputs than ``MAX_INT8_INPUTS``.
    """
    _check_weight("pack_int8", weight, bias)
    outputs, inputs = weight.shape
    if inputs > MAX_INT8_INPUTS:
        refuse("pack_int8", "weight", f"has {inputs} inputs; at most {MAX_INT8_INPUTS} are added up in an int32")
    filled_outputs = _filled(outputs, PANEL)
    quantised, scales = quantise_weight(weight)
    held = torch.zeros((filled_outputs, _filled(inputs, INT8_UNIT)), dtype=torch.int8)
    held[:outputs, :inputs] = quantised
    return Int8Weights(
        inputs=inputs,
        outputs=outputs,
        panels=_in_panels(held, INT8_UNIT),
        scales=_vector(scales, filled_outputs),
        sums=held.sum(dim=1, dtype=torch.int32),
        bias=_vector(bias, filled_outputs),
    )


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``weight`` [N, K] as int8 from -127 to 127, and the float32 scales [N] that restore it approximately."""
    levels = torch.zeros(weight.shape, dtype=torch.int8)
    scales = torch.ones(len(weight))
    if not weight.shape[1]:
        return levels, scales
    for begin in range(0, len(weight), _ROWS_AT_ONCE):
        rows = weight[begin : begin + _ROWS_AT_ONCE]
        own = rows.abs().amax(dim=1).float() / 127.0
        own = torch.where(own > 0, own, torch.ones_like(own))
        scales[begin : begin + _ROWS_AT_ONCE] = own
        levels[begin : begin + _ROWS_AT_ONCE] = (
            torch.round(rows.float() / own[:, None]).clamp_(-127, 127).to(torch.int8)
        )
    return levels, scales


def pack_bfloat16(weight: Tensor, bias: Tensor | None = None) -> BFloat16Weights:
    """Return ``weight`` [N, K], bfloat16, packed. Raise ArgumentError on another shape or dtype, or an odd K."""
    _check_weight("pack_bfloat16", weight, bias)
    outputs, inputs = weight.shape
    if weight.dtype != torch.bfloat16 or inputs % PAIR_UNIT:
        refuse("pack_bfloat16", "weight", f"is {weight.dtype} with {inputs} inputs; bfloat16 and an even number")
    held = _filled_outputs(weight)
    panels = _in_panels(held, PAIR_UNIT)
    return BFloat16Weights(inputs=inputs, outputs=outputs, panels=panels, bias=_vector(bias, len(held)))


def pack_float(weight: Tensor, bias: Tensor | None = None, *, halves: bool = False) -> FloatWeights:
    """Return ``weight`` [N, K], float32, packed. Raise ArgumentError on another shape or dtype.

    With ``halves`` the weights are rounded to float16; those beyond its range become infinite.
    """
    _check_weight("pack_float", weight, bias)
    outputs, inputs = weight.shape
    if weight.dtype != torch.float32:
        refuse("pack_float", "weight", f"is {weight.dtype}; float32 is needed")
    held = _filled_outputs(weight.half() if halves else weight)
    panels = _in_panels(held, 1).squeeze(3)
    return FloatWeights(inputs=inputs, outputs=outputs, panels=panels, bias=_vector(bias, len(held)))


def int8_linear(x: Tensor, weights: Int8Weights) -> Tensor:
    """Compute y = x W^T + bias, with each row of x quantized to 256 levels.

    x        [T, K], float32, bfloat16 or float16, rows at any stride
    returns  [T, N], new and contiguous, dtype of x

    A row with NaN or infinity gives NaN. Raise ArgumentError on other shapes, strides or dtypes.
    """
    check_storage("int8_linear", "x", x)
    _check_rows("int8_linear", x, weights.inputs)
    return _implementation(x.device.type).int8_linear(x, weights)


def bfloat16_linear(x: Tensor, weights: BFloat16Weights) -> Tensor:
    """Compute y = x W^T + bias, accumulated in float32 and rounded once; see ``supports_bfloat16``.

    x        [T, K] bfloat16, rows at any even stride
    returns  [T, N], new and contiguous, bfloat16

    Numbers below the smallest normal float32 count as 0. Raise ArgumentError on other shapes, strides or dtypes.
    """
    _check_rows("bfloat16_linear", x, weights.inputs)
    if x.dtype != torch.bfloat16 or x.stride(0) % PAIR_UNIT:
        refuse("bfloat16_linear", "x", f"is {x.dtype}, rows {x.stride(0)} apart; bfloat16 at an even stride is needed")
    return _implementation(x.device.type).bfloat16_linear(x, weights)


def float_linear(x: Tensor, weights: FloatWeights) -> Tensor:
    """Compute y = x W^T + bias, accumulated in float32.

    x        [T, K] float32, rows at any stride
    returns  [T, N], new and contiguous, float32

    Raise ArgumentError on other shapes, strides or dtypes.
    """
    _check_rows("float_linear", x, weights.inputs)
    if x.dtype != torch.float32:
        refuse("float_linear", "x", f"is {x.dtype}; float32 is needed")
    return _implementation(x.device.type).float_linear(x, weights)


def supports_bfloat16() -> bool:
    """Return whether this CPU has the bfloat16 instructions that ``bfloat16_linear`` requires."""
    supported: bool = _implementation("cpu").supports_bfloat16()
    return supported


def multiplies_bytes() -> bool:
    """Return whether this CPU multiplies bytes by instructions; otherwise ``int8_linear`` saves memory, but no time."""
    multiplied: bool = _implementation("cpu").multiplies_bytes()
    return multiplied


@functools.cache
def _implementation(device_type: str) -> ModuleType:
    if device_type != "cpu":
        raise UnsupportedDeviceError(f"packed_linear: no path for {device_type} devices; weights are packed for a CPU")
    return importlib.import_module("quire_kernels.packed_linear.cpu")


def _check_weight(op: str, weight: Tensor, bias: Tensor | None) -> None:
    check_storage(op, "weight", weight)
    if weight.dim() != 2:
        refuse(op, "weight", f"has shape {tuple(weight.shape)}; [outputs, inputs] is needed")
    if bias is not None:
        check_dense(op, "bias", bias, weight.dtype, (weight.shape[0],))


def _check_rows(op: str, x: Tensor, inputs: int) -> None:
    if x.dim() != 2 or x.shape[1] != inputs or x.stride(1) != 1:
        refuse(op, "x", f"is {tuple(x.shape)} with strides {x.stride()}; dense rows of {inputs} inputs are needed")


def _filled(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _filled_outputs(weight: Tensor) -> Tensor:
    """Return ``weight`` padded with outputs of zeros to a whole number of panels."""
    outputs, inputs = weight.shape
    if not outputs % PANEL:
        return weight
    filled = weight.new_zeros((_filled(outputs, PANEL), inputs))
    filled[:outputs] = weight
    return filled


def _in_panels(held: Tensor, unit: int) -> Tensor:
    outputs, inputs = held.shape
    return in_large_pages(held.view(outputs // PANEL, PANEL, inputs // unit, unit).permute(0, 2, 1, 3))


def _vector(values: Tensor | None, count: int) -> Tensor:
    vector = torch.zeros(count)
    if values is not None:
        vector[: len(values)] = values
    return vector
