"""The layouts of experts in checkpoints: one tensor per expert, as on the hub, or one for all, as in transformers 5.

Legend: E experts, I intermediate size of an expert, H hidden size.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from quire_engine.model.experts import ExpertNames, ExpertsConfig
from quire_engine.model.family import ReadTensor

# transformers' own names, which apply to all families.
_FUSED_PART, _GATE_UP, _DOWN = "mlp", "experts.gate_up_proj", "experts.down_proj"


def expert_shapes(
    names: ExpertNames, config: ExpertsConfig, hidden: int, layer: str, found: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the sparse layer ``layer``, by the layout of ``found``; else by the family's own."""
    count, inner = config.num_experts, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {_router(names, layer, found): (count, hidden)}
    if _is_fused(layer, found):
        shapes[f"{layer}.{_FUSED_PART}.{_GATE_UP}"] = (count, 2 * inner, hidden)
        shapes[f"{layer}.{_FUSED_PART}.{_DOWN}"] = (count, hidden, inner)
        return shapes
    for expert in range(count):
        for projection, shape in (
            (names.gate, (inner, hidden)),
            (names.up, (inner, hidden)),
            (names.down, (hidden, inner)),
        ):
            shapes[_single(names, layer, expert, projection)] = shape
    return shapes


def read_router(names: ExpertNames, layer: str, read: ReadTensor) -> Tensor:
    """Return the router's weight [E, H]."""
    return read(_router(names, layer, read.names))


def read_gate_and_up(names: ExpertNames, layer: str, expert: int, read: ReadTensor) -> list[Tensor]:
    """Return gate and up [I, H] of an expert, or both as one [2 I, H]."""
    if _is_fused(layer, read.names):
        return [read(f"{layer}.{_FUSED_PART}.{_GATE_UP}", expert)]
    return [read(_single(names, layer, expert, projection)) for projection in (names.gate, names.up)]


def read_down(names: ExpertNames, layer: str, expert: int, read: ReadTensor) -> Tensor:
    """Return the expert's down projection [H, I]."""
    if _is_fused(layer, read.names):
        return read(f"{layer}.{_FUSED_PART}.{_DOWN}", expert)
    return read(_single(names, layer, expert, names.down))


def read_stacked(names: ExpertNames, layer: str, num_experts: int, read: ReadTensor) -> tuple[Tensor, Tensor]:
    """Return gate and up of all experts [E, 2 I, H], and down [E, H, I].

    If the experts are separate tensors, at most one of them is in memory twice.
    """
    if _is_fused(layer, read.names):
        fused = (read(f"{layer}.{_FUSED_PART}.{name}") for name in (_GATE_UP, _DOWN))
        gate_up, down = (tensor.contiguous() for tensor in fused)
        return gate_up, down
    first_down = read_down(names, layer, 0, read)
    hidden, inner = first_down.shape
    gate_up = first_down.new_empty((num_experts, 2 * inner, hidden))
    down = first_down.new_empty((num_experts, hidden, inner))
    down[0] = first_down
    for expert in range(num_experts):
        gate_up[expert] = torch.cat(read_gate_and_up(names, layer, expert, read))
        if expert:
            down[expert] = read_down(names, layer, expert, read)
    return gate_up, down


def _is_fused(layer: str, found: Collection[str]) -> bool:
    return any(f"{layer}.{_FUSED_PART}.{name}" in found for name in (_GATE_UP, _DOWN))


def _router(names: ExpertNames, layer: str, found: Collection[str]) -> str:
    own, other = f"{layer}.{names.part}.gate.weight", f"{layer}.{_FUSED_PART}.gate.weight"
    return other if own not in found and other in found else own


def _single(names: ExpertNames, layer: str, expert: int, projection: str) -> str:
    return f"{layer}.{names.part}.experts.{expert}.{projection}.weight"
