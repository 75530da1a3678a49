"""A kernel on one shape: its call, its expected result, its minimum work, and the peers that support it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Result = Tensor | Sequence[Tensor]
BOUNDS = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""The largest error of a row, ||found - expected|| / ||expected||, by the dtype of the compared values."""


def _as_it_is(returned: Any) -> Result:
    return returned


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A prepared case. ``call`` and ``peers`` are timed.

    ``compared`` turns their results into what is compared with ``expected``. ``result`` replaces ``call`` there if that
    works in place.

    bytes, flops   the minimum that must be read and written, and computed
    exact          results are equal or wrong: copies, tokens
    compare_peers  whether peers can be compared: not if they work in place or use other random numbers
    """

    call: Callable[[], object]
    expected: Callable[[], Result]
    compared: Callable[[Any], Result] = _as_it_is
    result: Callable[[], Result] | None = None
    bytes: int = 0
    flops: int = 0
    exact: bool = False
    bound: float | None = None
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    compare_peers: bool = True


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case. ``prepare`` allocates on the device and may raise ArgumentError if the op rejects the shape."""

    op: str
    name: str
    prepare: Callable[[torch.device, torch.dtype], Prepared]
    quick: bool = False

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    error: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.error <= self.bound  # NaN does not


def compare(prepared: Prepared, found: Result, expected: Result) -> Verdict:
    """Return the worst row's error or, for an exact op, the share of elements that differ."""
    pairs = list(zip(_tensors(found), _tensors(expected), strict=True))
    if prepared.exact:
        wrong = max(float((a != b.to(a.device)).double().mean()) for a, b in pairs)
        return Verdict(error=wrong, bound=0.0)
    bound = prepared.bound if prepared.bound is not None else max(BOUNDS[a.dtype] for a, _ in pairs)
    return Verdict(error=max(_row_error(a, b) for a, b in pairs), bound=bound)


def _tensors(result: Result) -> Sequence[Tensor]:
    return [result] if isinstance(result, Tensor) else result


def _row_error(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    wide = expected.to(found.device).float().flatten(0, -2)  # [rows, columns]
    difference = (found.float().flatten(0, -2) - wide).norm(dim=-1)
    return float((difference / wide.norm(dim=-1).clamp_min(1e-6)).max())


def gist(error: Exception) -> str:
    """Return the type of an error and the first line of its message, if it has one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
