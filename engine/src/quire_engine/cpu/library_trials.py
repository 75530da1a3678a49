"""A program that multiplies small matrices with torch's libraries and reports whether each result was correct.

``python -m quire_engine.cpu.library_trials NAME…`` may die of any of them: ``findings`` reads its last output, and runs
it again with oneDNN limited further. The first line reports that torch could be loaded.
"""

import signal
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Trial = Callable[[Tensor, Tensor], Tensor]
"""A function from x [T, K] and weight [N, K] to x W^T."""

_MOST_SECONDS = 120
_ROWS, _INPUTS, _OUTPUTS = (1, 5, 64), 96, 80


def _linear(dtype: torch.dtype) -> Trial:
    return lambda x, weight: functional.linear(x.to(dtype), weight.to(dtype))


def _packed(dtype: torch.dtype) -> Trial:
    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), None)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(dtype), packed, None, "none", [], "")
        return product

    return multiply


def _batched(dtype: torch.dtype) -> Trial:
    return lambda x, weight: torch.bmm(x.to(dtype)[None], weight.to(dtype).t()[None])[0]


def _bytes(x: Tensor, weight: Tensor) -> Tensor:
    return torch._int_mm(x.to(torch.int8), weight.to(torch.int8).t())


TRIALS: dict[str, tuple[Trial, ...]] = {
    "onednn-float32": (_linear(torch.float32), _packed(torch.float32)),
    "onednn-bfloat16": (_linear(torch.bfloat16), _packed(torch.bfloat16), _batched(torch.bfloat16)),
    "onednn-float16": (_linear(torch.float16), _batched(torch.float16)),
    "onednn-int8": (_bytes,),
}


def run_trial(name: str) -> str:
    """Run every variant of the trial, and return ``ok`` or the error. The process may die of it.

    The factors are small integers, so that every type represents them and their products exactly.
    """
    weight = (torch.arange(_OUTPUTS * _INPUTS).view(_OUTPUTS, _INPUTS) % 5 - 2).float()
    for rows in _ROWS:
        x = (torch.arange(rows * _INPUTS).view(rows, _INPUTS) % 7 - 3).float()
        expected = x.double() @ weight.double().t()
        for multiply in TRIALS[name]:
            try:
                found = multiply(x, weight)
            except (AttributeError, RuntimeError):
                continue  # torch raises an error if it has no such variant; that does no harm.
            # Sums beyond 256 are rounded to bfloat16 when they are stored.
            if not torch.allclose(found.double(), expected, rtol=1e-2, atol=0.0):
                return "wrong results"
    return "ok"


def main(names: list[str]) -> int:
    signal.alarm(_MOST_SECONDS)  # The alarm also ends the process when its parent no longer waits for it.
    print("loaded", flush=True)
    for name in names:
        print("begin", name, flush=True)
        print("end", name, run_trial(name), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
