"""The selection of the linear backend: the candidates for a dtype on this CPU, and the fastest by measured times.

The choice is a function of the times; ``timing`` measures them, ``runner.arithmetic`` stores them.
"""

import functools
import logging
import math
from collections.abc import Mapping
from typing import Literal

import torch

from quire_engine.model.linear.backends import (
    DeterministicLinearBackend,
    FloatLinearBackend,
    Fp8LinearBackend,
    HalfLinearBackend,
    Int8LinearBackend,
    LinearBackend,
    OneDnnLinearBackend,
    PairLinearBackend,
    TorchLinearBackend,
)
from quire_kernels.packed_linear import multiplies_bytes, supports_bfloat16

Quantization = Literal["none", "int8", "fp8"]
Times = Mapping[str, tuple[float, ...]]
"""The milliseconds for each number of rows that was tried, by the backend's name."""

_log = logging.getLogger(__name__)

WORTH_LEAVING = 1.1
"""The factor by which another backend must be faster than the first one, because the machine may be busy meanwhile."""
ROWS = (1, 16, 256)
"""The numbers of rows to time: a step that decodes one sequence, one that decodes several, and one with a prompt."""
_ANSWER_TOKENS = 64
"""The tokens of the answer to the prompt of a typical request."""


def choose_linear_backend(
    dtype: torch.dtype,
    device_type: str = "cpu",
    *,
    deterministic: bool = False,
    quantization: Quantization = "none",
) -> LinearBackend:
    """Return the backend without timing: the probably fastest one for a dtype, or the requested one."""
    if quantization == "fp8":
        return Fp8LinearBackend(TorchLinearBackend(dtype))
    if device_type != "cpu":
        return DeterministicLinearBackend(dtype) if deterministic else TorchLinearBackend(dtype)
    chosen = _same_bits(dtype) if deterministic else candidates(dtype)[0]
    if quantization != "int8":
        return chosen
    if not multiplies_bytes():
        _log.warning("this CPU has no instructions for products of bytes: int8 saves memory here, but no time")
    return Int8LinearBackend(chosen)


def candidates(dtype: torch.dtype, *, may_round: bool = False) -> tuple[LinearBackend, ...]:
    """Return the backends that support this dtype here, the probably fastest first.

    may_round  float32 weights may be stored in float16, because float32 was not requested
    """
    found: list[LinearBackend] = []
    if _packs(dtype):
        found.append(OneDnnLinearBackend(dtype))
    if (own := _own(dtype)) is not None:
        found.append(own)
    found.append(TorchLinearBackend(dtype))
    if may_round and dtype == torch.float32:
        found.append(HalfLinearBackend())
    return tuple(found)


def _same_bits(dtype: torch.dtype) -> LinearBackend:
    """Return the backend whose rows have the same bits in every batch."""
    return _own(dtype) or DeterministicLinearBackend(dtype)


def _own(dtype: torch.dtype) -> LinearBackend | None:
    """Return the backend of our own kernel, or None if there is no kernel for the dtype on this CPU."""
    if dtype == torch.float32:
        return FloatLinearBackend()
    return PairLinearBackend() if dtype == torch.bfloat16 and supports_bfloat16() else None


def fastest(times: Times) -> str:
    """Return the name with the lowest cost. Another one must be better than the first by ``WORTH_LEAVING``."""
    names = list(times)
    return min(names, key=lambda name: cost(times[name]) * (1.0 if name == names[0] else WORTH_LEAVING))


def cost(times: tuple[float, ...]) -> float:
    """Return the milliseconds that a layer takes for a typical request, from those for each of ``ROWS``.

    The request is a prompt of the last number of rows and an answer. It is the geometric mean of two: alone, and among
    as many as the second number of rows, which share each step that decodes. So steps count by how often they occur.
    """
    one, several, prompt = times
    return math.sqrt((prompt + _ANSWER_TOKENS * one) * (prompt + _ANSWER_TOKENS / ROWS[1] * several))


def times_in_words(times: Times) -> str:
    """Return, for example, ``onednn bf16 0.19, 0.30 and 1.90 ms; torch bf16 0.28, 0.41 and 2.80 ms``."""
    told = {name: [f"{milliseconds:.2f}" for milliseconds in taken] for name, taken in times.items()}
    return "; ".join(f"{name} {', '.join(taken[:-1])} and {taken[-1]} ms" for name, taken in told.items())


@functools.cache
def _packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN packs weights of this type for this CPU and its limits, which only a call can show.

    Whether its results are right was tested in a child program (``quire_engine.cpu``).
    """
    if dtype == torch.float16 or not torch.backends.mkldnn.is_available():
        return False
    small = torch.zeros((32, 48), dtype=dtype)
    try:
        OneDnnLinearBackend(dtype).pack(small, None)(small)
    except (AttributeError, RuntimeError):
        return False
    return True
