"""How a linear layer holds its weights and multiplies by them: the seam for packed, 16-bit and 8-bit backends.

A backend takes each weight as it comes off the checkpoint and gives back a callable; it need not keep the original.

Libraries cut a product's sum differently for different numbers of rows, so that a row's last bits depend on who shares
its batch. ``DeterministicLinearBackend`` cuts it one way, at some cost in speed.

Legend: T rows, K inputs, N outputs.
"""

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from quire_kernels.linear import linear

Linear = Callable[[Tensor], Tensor]
"""[T, K] to [T, N]: x W^T + bias."""


class LinearBackend(Protocol):
    @property
    def weights(self) -> str:
        """How the weights are held, as reported to people: float32, bf16, fp16."""
        ...

    @property
    def copies(self) -> bool:
        """Whether a layer holds its weights in a form of its own, beside the tensor it was made of."""
        ...

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A layer of ``weight`` [N, K] and ``bias`` [N], in the dtype the activations will have."""
        ...


class TorchLinearBackend:
    """Weights as they are, through ``torch.nn.functional.linear``: cuBLAS on a GPU."""

    copies = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.weights = _WEIGHT_NAMES[dtype]

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return functools.partial(functional.linear, weight=weight.contiguous(), bias=bias)


class DeterministicLinearBackend:
    """Weights as they are, through our own kernel: a row's result is the same bits whatever the other rows."""

    copies = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.weights = _WEIGHT_NAMES[dtype]

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return functools.partial(linear, weight=weight.contiguous(), bias=bias)


class OneDnnLinearBackend:
    """Weights packed once into the blocks oneDNN multiplies by.

    Against torch's own linear this is 2 to 3 times faster in float32 where MKL holds back its AVX-512 path (AMD), and
    1.2 to 1.6 times faster in bfloat16 up to 64 rows, for not packing at each call.

    oneDNN compiles a kernel for each number of rows, in 0.3 to 6 ms, and steps of a busy engine have all kinds of
    numbers: rows are filled up to one of few.
    """

    copies = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.weights = _WEIGHT_NAMES[dtype]

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
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


def filled_up(rows: int) -> int:
    """The number of rows that so many are computed as: at most an eighth more, or three, and 62 numbers up to 2,048."""
    if rows <= 8:
        return rows
    step = 4 if rows <= 64 else max(8, 1 << (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


_WEIGHT_NAMES = {torch.float32: "float32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def choose_linear_backend(
    dtype: torch.dtype, device_type: str = "cpu", *, deterministic: bool = False
) -> LinearBackend:
    """On a CPU oneDNN's packed weights, where this torch has them for the dtype; torch's own otherwise."""
    if deterministic:
        return DeterministicLinearBackend(dtype)
    return OneDnnLinearBackend(dtype) if device_type == "cpu" and _packs(dtype) else TorchLinearBackend(dtype)


@functools.cache
def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs and multiplies rightly here: tried on a small layer, as the operators are torch's own."""
    if dtype == torch.float16 or not torch.backends.mkldnn.is_available():
        return False
    weight = torch.linspace(-1.0, 1.0, 32 * 48).view(32, 48).to(dtype)
    x = torch.linspace(1.0, -1.0, 5 * 48).view(5, 48).to(dtype)
    try:
        found = OneDnnLinearBackend(dtype).pack(weight, weight[:, 0].contiguous())(x)
    except (AttributeError, RuntimeError):
        return False
    expected = functional.linear(x.float(), weight.float(), weight[:, 0].float())
    return bool(torch.allclose(found.float(), expected, rtol=2e-2, atol=5e-2))
