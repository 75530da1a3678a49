"""Linear layers on a GPU that our own kernel multiplies for few rows, where it is faster than the library.

``ProductTimes`` are measured at the start (``runner.device_products``); which layers have the kernel for which numbers
of rows is a function of them.

Legend: T rows, K inputs, N outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire_engine.model.linear.backends import Linear, LinearBackend
from quire_kernels.skinny_linear import MAX_ROWS, skinny_linear

TIMED_ROWS = (1, 2, 4, 8, 16)
"""The numbers of rows that are timed. Others are as the next larger one."""
WORTH_LEAVING = 1.03
"""The factor by which the kernel must be faster than the library, because times differ from run to run."""

Size = tuple[int, int]
"""Outputs and inputs of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTimes:
    """The microseconds of one product for each of ``TIMED_ROWS``."""

    library: tuple[float, ...]
    skinny: tuple[float, ...]
    problem: str = ""
    """The reason for which the kernel is not used whatever its times, or empty."""


def rows_by_kernel(times: ProductTimes) -> tuple[bool, ...]:
    """Return for 0 to ``MAX_ROWS`` rows whether the kernel multiplies them."""
    if times.problem:
        return (False,) * (MAX_ROWS + 1)
    wins = [skinny * WORTH_LEAVING < library for skinny, library in zip(times.skinny, times.library, strict=True)]
    next_timed = [
        next(place for place, timed in enumerate(TIMED_ROWS) if timed >= rows) for rows in range(MAX_ROWS + 1)
    ]
    return (False, *(wins[place] for place in next_timed[1:]))


ALL_ROWS = (False, *(True,) * MAX_ROWS)
"""The kernel multiplies every number of rows up to ``MAX_ROWS``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkinnyLinear:
    """A layer with the library's product, ``otherwise``, for the numbers of rows at which the kernel is not used."""

    weight: Tensor
    bias: Tensor | None
    rows: tuple[bool, ...]
    otherwise: Linear

    def __call__(self, x: Tensor) -> Tensor:
        # Layers of transformers' models may give views that only the library accepts.
        if x.shape[0] <= MAX_ROWS and self.rows[x.shape[0]] and x.stride(-1) == 1:
            return skinny_linear(x, self.weight, self.bias)
        return self.otherwise(x)


@dataclass(frozen=True, slots=True)
class SkinnyLinearBackend:
    """The backend ``otherwise``, which keeps weights as they are, with the kernel for the sizes in ``rows``.

    ``default`` is for the other sizes.
    """

    otherwise: LinearBackend
    rows: Mapping[Size, tuple[bool, ...]] = field(default_factory=dict)
    default: tuple[bool, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.otherwise.name}, for few rows also quire's kernel"

    @property
    def weights(self) -> str:
        return self.otherwise.weights

    @property
    def dtype(self) -> torch.dtype:
        return self.otherwise.dtype

    @property
    def bytes_per_weight(self) -> int:
        return self.otherwise.bytes_per_weight

    @property
    def copies(self) -> bool:
        return self.otherwise.copies

    def pack(self, weight: Tensor, bias: Tensor | None, *, precise: bool = False) -> Linear:
        outputs, inputs = weight.shape
        rows = self.rows.get((outputs, inputs), self.default)
        dense = weight.contiguous()
        layer = self.otherwise.pack(dense, bias, precise=precise)
        return SkinnyLinear(weight=dense, bias=bias, rows=rows, otherwise=layer) if any(rows) else layer
