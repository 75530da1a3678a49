"""A program that multiplies small matrices by everything that a model's linear layers may use on this CPU.

``python -m quire_engine.cpu.self_test`` may die of it: ``choice`` reads the last product that it printed. The status is
``FAILED`` after a wrong result, and the last line is the reason. The environment limits the instructions, as it does
for an engine process.
"""

import signal
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quire_engine.cpu.choice import FAILED
from quire_engine.model.linear import Int8LinearBackend, candidates
from quire_kernels.cpu_runtime.amx import request_permission
from quire_kernels.cpu_runtime.features import multiplies_tiles
from quire_kernels.packed_linear import supports_bfloat16

Product = Callable[[Tensor, Tensor], Tensor]
"""A function from x [T, K] and weight [N, K], both float32, to x W^T."""

_MAX_SECONDS = 240
"""The time after which the program ends, also when its parent no longer waits for it; it may compile kernels."""
_ROWS, _INPUTS, _OUTPUTS = (1, 5, 64), 96, 80
_TOLERANCE = 0.02
"""The error of the int8 quantization, relative to the largest result; every other type represents the factors."""


def products() -> Iterator[tuple[str, Product]]:
    """Yield each product and its name: every linear backend of every type."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for backend in candidates(dtype, may_round=True):
            yield backend.name, lambda x, w, b=backend: b.pack(w.to(b.dtype), None)(x.to(b.dtype))  # type: ignore[misc]
    dtype = torch.bfloat16 if supports_bfloat16() else torch.float32
    quantized = Int8LinearBackend(candidates(dtype)[0])
    yield quantized.name, lambda x, w: quantized.pack(w.to(dtype), None)(x.to(dtype))


def is_right(multiply: Product) -> bool:
    """Return whether a product of small integers is right for each number of rows."""
    weight = (torch.arange(_OUTPUTS * _INPUTS).view(_OUTPUTS, _INPUTS) % 5 - 2).float()  # [N, K]
    for rows in _ROWS:
        x = (torch.arange(rows * _INPUTS).view(rows, _INPUTS) % 7 - 3).float()  # [T, K]
        # Sums of whole numbers without a matrix product, whose instructions are those under test.
        expected = (x.double()[:, None] * weight.double()).sum(-1)  # [T, N]
        error = (multiply(x, weight).double() - expected).abs().max()
        if not error <= _TOLERANCE * expected.abs().max():
            return False
    return True


def main() -> int:
    signal.alarm(_MAX_SECONDS)
    # Linux may refuse the permission once there are threads.
    if multiplies_tiles() and not request_permission():
        print("Linux does not permit the use of tiles")
        return FAILED
    torch.set_num_threads(1)
    for name, multiply in products():
        print(name, flush=True)
        if not is_right(multiply):
            print(f"{name}: wrong results")
            return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
