"""The backends of linear layers, which store and multiply weights: packed, 16-bit and 8-bit (int8, fp8).

A backend converts each weight from the checkpoint into a callable; it need not keep the original. ``selection`` decides
which backend runs.

Libraries split a product's sum differently for different numbers of rows, so a row's last bits depend on the batch.
``DeterministicLinearBackend`` uses one split, at some cost in speed; the layers of ``packed_linear`` do so at no cost.

Legend: T rows, K inputs, N outputs.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from quire_kernels.fp8 import Fp8Rows
from quire_kernels.fp8_linear import SIZE_UNIT, Fp8Weights, fp8_linear, quantise_weight
from quire_kernels.linear import linear
from quire_kernels.packed_linear import (
    MAX_INT8_INPUTS,
    bfloat16_linear,
    float_linear,
    int8_linear,
    pack_bfloat16,
    pack_float,
    pack_int8,
)

Linear = Callable[[Tensor], Tensor]
"""A function from [T, K] to [T, N]: x W^T + bias."""

_log = logging.getLogger(__name__)
_WEIGHT_NAMES = {torch.float32: "float32", torch.bfloat16: "bf16", torch.float16: "fp16"}


_PACKED = (bfloat16_linear, float_linear, int8_linear)


def is_packed(linear: Linear) -> bool:
    """Return whether a layer multiplies by our own packed weights on a CPU, which is one launch."""
    return type(linear) is functools.partial and linear.func in _PACKED


class LinearBackend(Protocol):
    @property
    def name(self) -> str:
        """The library and the format of the weights, for the log: ``onednn bf16``."""
        ...

    @property
    def weights(self) -> str:
        """The format of the weights in reports: float32, bf16, fp16, int8."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def bytes_per_weight(self) -> int: ...

    @property
    def copies(self) -> bool:
        """True if a layer keeps its own copy of the weights in another format."""
        ...

    def pack(self, weight: Tensor, bias: Tensor | None, *, precise: bool = False) -> Linear:
        """Return a layer for ``weight`` [N, K], at any strides, and ``bias`` [N], in the dtype of the activations.

        ``precise`` requests unquantized weights, for a layer whose outputs are compared with one another: the router of
        a mixture of experts.
        """
        ...


class TorchLinearBackend:
    """A backend with unchanged weights and ``torch.nn.functional.linear``: cuBLAS on a GPU."""

    copies = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.weights, self.bytes_per_weight = dtype, _WEIGHT_NAMES[dtype], dtype.itemsize
        self.name = f"torch {self.weights}"

    def pack(self, weight: Tensor, bias: Tensor | None, *, precise: bool = False) -> Linear:
        return functools.partial(functional.linear, weight=weight.contiguous(), bias=bias)


class DeterministicLinearBackend:
    """A backend with unchanged weights and our own kernel: a row's result has the same bits in every batch."""

    copies = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.weights, self.bytes_per_weight = dtype, _WEIGHT_NAMES[dtype], dtype.itemsize
        self.name = f"deterministic {self.weights}"

    def pack(self, weight: Tensor, bias: Tensor | None, *, precise: bool = False) -> Linear:
        return functools.partial(linear, weight=weight.contiguous(), bias=bias)


class OneDnnLinearBackend:
    """A backend with weights that are packed once in oneDNN's blocked format.

    Compared with torch's own linear this is 2 to 3 times faster in float32 on CPUs where MKL does not use its AVX-512
    path (AMD), and 1.2 to 1.6 times faster in bfloat16 up to 64 rows, because it does not pack at each call.

    oneDNN compiles a kernel for each number of rows, in 0.3 to 6 ms, and steps of a busy engine have many different
    numbers. Rows are therefore padded to one of a few numbers.
    """

    copies = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.weights, self.bytes_per_weight = dtype, _WEIGHT_NAMES[dtype], dtype.itemsize
        self.name = f"onednn {self.weights}"

    def pack(self, weight: Tensor, bias: Tensor | None, *, precise: bool = False) -> Linear:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        multiply = torch.ops.mkldnn._linear_pointwise.default

        def multiply_filled(x: Tensor) -> Tensor:
            rows = len(x)
            filled = filled_up(rows)
            if filled == rows:
                return multiply(x, packed, bias, "none", [], "")
            padded = x.new_empty((filled, x.shape[1]))
            padded[:rows] = x
            padded[rows:] = 0.0
            return multiply(padded, packed, bias, "none", [], "")[:rows]

        return multiply_filled


class PairLinearBackend:
    """A backend for bfloat16 with our own kernel and the instruction for bfloat16 pairs (AVX512-BF16).

    Compared with oneDNN it is 1.0 to 1.5 times as fast at 1 row, 0.8 to 1.3 times at 16, and as fast at 256. A row's
    result has the same bits in every batch.
    """

    dtype = torch.bfloat16
    weights, name, bytes_per_weight = "bf16", "quire bf16", 2
    copies = True

    def pack(self, weight: Tensor, bias: Tensor | None, *, precise: bool = False) -> Linear:
        if weight.shape[1] % 2:
            return DeterministicLinearBackend(weight.dtype).pack(weight, bias)
        return functools.partial(bfloat16_linear, weights=pack_bfloat16(weight.contiguous(), bias))


class FloatLinearBackend:
    """A backend for float32 with our own kernel, whose rows have the same bits in every batch.

    It is about twice as fast as oneDNN at 1 row, where reading the weights takes most of the time, and as fast at more.
    """

    dtype = torch.float32
    weights, name, bytes_per_weight = "float32", "quire float32", 4
    copies = True

    def pack(self, weight: Tensor, bias: Tensor | None, *, precise: bool = False) -> Linear:
        return functools.partial(float_linear, weights=pack_float(weight.contiguous(), bias))


class HalfLinearBackend:
    """A backend for float32 activations with float16 weights, which our own kernel widens while it reads them.

    This halves the bytes of float32 on CPUs that multiply no shorter type (AVX2). A row's result has the same bits in
    every batch.
    """

    dtype = torch.float32
    weights, name, bytes_per_weight = "fp16", "quire fp16", 2
    copies = True
    _otherwise = FloatLinearBackend()

    def pack(self, weight: Tensor, bias: Tensor | None, *, precise: bool = False) -> Linear:
        largest = float(weight.abs().max()) if weight.numel() else 0.0
        if precise or largest > torch.finfo(torch.float16).max:
            if not precise:
                _log.warning(
                    "a linear layer %s has the weight %g, and float16 ends at 65504: its weights stay %s",
                    list(weight.shape),
                    largest,
                    self._otherwise.weights,
                )
            return self._otherwise.pack(weight, bias, precise=precise)
        return functools.partial(float_linear, weights=pack_float(weight.contiguous(), bias, halves=True))


class Int8LinearBackend:
    """A backend with int8 weights, one scale per output, and activations quantized row by row at run time (W8A8).

    FBGEMM's own dynamic int8 has one scale for a whole batch, so a sequence's output would depend on the rest of the
    batch. Here it does not depend on it, to the last bit.
    """

    weights, name, bytes_per_weight = "int8", "quire int8", 1
    copies = True

    def __init__(self, otherwise: LinearBackend) -> None:
        self.dtype = otherwise.dtype
        self._otherwise = otherwise

    def pack(self, weight: Tensor, bias: Tensor | None, *, precise: bool = False) -> Linear:
        if precise or weight.shape[1] > MAX_INT8_INPUTS:
            return self._otherwise.pack(weight, bias, precise=precise)
        return functools.partial(int8_linear, weights=pack_int8(weight.contiguous(), bias))


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """A layer with fp8 weights. It takes rows that a norm or an activation has quantized, or quantizes them itself."""

    weights: Fp8Weights

    def __call__(self, x: Tensor | Fp8Rows) -> Tensor:
        return fp8_linear(x, self.weights)


class Fp8LinearBackend:
    """A backend for GPUs with fp8 weights (e4m3), one scale per output, and activations quantized row by row.

    A layer whose inputs or outputs are no multiple of 16 keeps its weights. The library selects its product by the
    number of rows, so that a row's last bits depend on the batch.
    """

    weights, name, bytes_per_weight = "fp8", "torch fp8", 1
    copies = True

    def __init__(self, otherwise: LinearBackend) -> None:
        self.dtype = otherwise.dtype
        self._otherwise = otherwise

    def pack(self, weight: Tensor, bias: Tensor | None, *, precise: bool = False) -> Linear:
        if precise or any(size % SIZE_UNIT for size in weight.shape):
            return self._otherwise.pack(weight, bias, precise=precise)
        return Fp8Linear(quantise_weight(weight, bias))


def filled_up(rows: int) -> int:
    """Return the padded number of rows: at most an eighth more, or three; there are 62 such numbers up to 2,048."""
    if rows <= 8:
        return rows
    step = 4 if rows <= 64 else max(8, 1 << (rows - 1).bit_length() - 4)
    return -(-rows // step) * step
