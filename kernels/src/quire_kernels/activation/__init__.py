"""Gated activations of the feed-forward layers.

Legend: T rows, I intermediate size.
"""

import functools
from types import ModuleType

from torch import Tensor

from quire_kernels.checks import check_storage, refuse, unsupported


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """y = gate / (1 + exp(-gate)) * up: the activation of SwiGLU (Shazeer, arXiv 2002.05202).

    gate_up  [T, 2 I]: I columns of gate, then I of up; rows at any stride
    returns  [T, I], new and contiguous, same dtype

    Computed in float32. Raises ArgumentError on other shapes, strides or dtypes.
    """
    check_storage("silu_and_mul", "gate_up", gate_up)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        refuse("silu_and_mul", "gate_up", f"has shape {tuple(gate_up.shape)}; [rows, 2 * intermediate size] is needed")
    return _implementation(gate_up.device.type).silu_and_mul(gate_up)


@functools.cache
def _implementation(device_type: str) -> ModuleType:
    if device_type != "cpu":
        unsupported("silu_and_mul", device_type)
    from quire_kernels.activation import cpu

    return cpu
