"""The linear layers of a native model that can have adapters, and the modules of a checkpoint that each one joins."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LinearName = Literal["qkv", "out", "gate_up", "down"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedLinear:
    """A linear layer of the model, which joins one or several modules of the checkpoint with the same input."""

    layer: int
    name: LinearName
    modules: tuple[str, ...]
    """The modules, such as ``model.layers.0.self_attn.q_proj``, in the order of their outputs."""
    outputs: tuple[int, ...]
    """The number of outputs of each module."""
    inputs: int


def module_shapes(linears: tuple[JoinedLinear, ...]) -> Mapping[str, tuple[int, int]]:
    return {
        module: (outputs, linear.inputs)
        for linear in linears
        for module, outputs in zip(linear.modules, linear.outputs, strict=True)
    }


def slot_numbers(linears: tuple[JoinedLinear, ...], max_rank: int) -> int:
    """Return how many numbers an adapter of rank ``max_rank`` for every module has."""
    return max_rank * sum(len(linear.modules) * linear.inputs + sum(linear.outputs) for linear in linears)
