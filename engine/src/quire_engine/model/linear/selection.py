"""Which linear backend runs: what there is for a dtype on this CPU, and the fastest by the times that were taken.

What is chosen from what times is a function of values; ``timing`` takes the times, ``runner.arithmetic`` keeps them.
"""

import functools
import logging
import math
from collections.abc import Collection, Mapping
from typing import Literal

import torch
from torch.nn import functional

from quire_engine.model.linear.backends import (
    DeterministicLinearBackend,
    HalfLinearBackend,
    Int8LinearBackend,
    LinearBackend,
    OneDnnLinearBackend,
    PairLinearBackend,
    TorchLinearBackend,
)
from quire_kernels.packed_linear import multiplies_bytes, supports_bfloat16

Quantization = Literal["none", "int8"]
Times = Mapping[str, tuple[float, ...]]
"""Of each backend by name: milliseconds, for each number of rows that was tried."""

_log = logging.getLogger(__name__)

WORTH_LEAVING = 1.1
"""How many times faster than the first another must be: times are taken beside whatever else the machine does."""
WORTH_ROUNDING = 1.15
"""How many times faster a backend must be that rounds the weights once more."""


def choose_linear_backend(
    dtype: torch.dtype,
    device_type: str = "cpu",
    *,
    deterministic: bool = False,
    quantization: Quantization = "none",
) -> LinearBackend:
    """Return the backend that needs no timing: the likeliest of those for a dtype, or the one that was asked for."""
    if device_type != "cpu":
        return DeterministicLinearBackend(dtype) if deterministic else TorchLinearBackend(dtype)
    if quantization == "int8":
        if not multiplies_bytes():
            _log.warning("this CPU has no instructions for products of bytes: int8 saves memory here, but no time")
        return Int8LinearBackend(DeterministicLinearBackend(dtype) if deterministic else candidates(dtype)[0])
    if deterministic:
        has_pairs = dtype == torch.bfloat16 and supports_bfloat16()
        return PairLinearBackend() if has_pairs else DeterministicLinearBackend(dtype)
    return candidates(dtype)[0]


def candidates(
    dtype: torch.dtype, *, may_round: bool = False, avoid: Collection[str] = ()
) -> tuple[LinearBackend, ...]:
    """Return what can multiply in this dtype here, the likeliest first.

    may_round  float32 weights may be held in float16, as nobody asked for float32
    avoid      trials of ``quire_engine.cpu`` that failed: what they tried must not even be tried here
    """
    found: list[LinearBackend] = []
    if _packs(dtype):
        found.append(OneDnnLinearBackend(dtype))
    if dtype == torch.bfloat16 and supports_bfloat16():
        found.append(PairLinearBackend())
    found.append(TorchLinearBackend(dtype))
    if may_round and dtype == torch.float32 and "fbgemm-float16" not in avoid and _widens_half():
        found.append(HalfLinearBackend(found[0]))
    return tuple(found)


def fastest(times: Times, *, among: Collection[str] | None = None) -> str:
    """Return the way of the least cost, ``among`` some if given.

    The first must be beaten by ``WORTH_LEAVING``, and rounding the weights once more by ``WORTH_ROUNDING``.
    """
    names = [name for name in times if among is None or name in among]

    def weighed(name: str) -> float:
        if name == HalfLinearBackend.name:
            return cost(times[name]) * WORTH_ROUNDING
        return cost(times[name]) * (1.0 if name == names[0] else WORTH_LEAVING)

    return min(names, key=weighed)


def cost(times: tuple[float, ...]) -> float:
    """Return the geometric mean over the numbers of rows: each counts by its ratio to another way's."""
    return math.exp(sum(map(math.log, times)) / len(times))


def times_in_words(times: Times) -> str:
    """Return, for example, ``onednn bf16 0.19, 0.30 and 1.90 ms; torch bf16 0.28, 0.41 and 2.80 ms``."""
    told = {name: [f"{milliseconds:.2f}" for milliseconds in taken] for name, taken in times.items()}
    return "; ".join(f"{name} {', '.join(taken[:-1])} and {taken[-1]} ms" for name, taken in told.items())


@functools.cache
def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs and multiplies rightly here: tried on a small layer, as the operators are torch's own."""
    if dtype == torch.float16 or not torch.backends.mkldnn.is_available():
        return False
    return _multiplies(OneDnnLinearBackend(dtype), dtype)


@functools.cache
def _widens_half() -> bool:
    """Whether this torch has FBGEMM's product by float16 weights, and it is right."""
    return _multiplies(HalfLinearBackend(TorchLinearBackend(torch.float32)), torch.float32)


def _multiplies(backend: LinearBackend, dtype: torch.dtype) -> bool:
    weight = torch.linspace(-1.0, 1.0, 32 * 48).view(32, 48).to(dtype)
    x = torch.linspace(1.0, -1.0, 5 * 48).view(5, 48).to(dtype)
    try:
        found = backend.pack(weight, weight[:, 0].contiguous())(x)
    except (AttributeError, RuntimeError):
        return False
    expected = functional.linear(x.float(), weight.float(), weight[:, 0].float())
    return bool(torch.allclose(found.float(), expected, rtol=2e-2, atol=5e-2))
