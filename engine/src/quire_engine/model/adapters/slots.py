"""The adapter slots of a native model: its linear layers with slots, and the copy of an adapter into a slot."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire_engine.model.adapters.layout import JoinedLinear
from quire_engine.model.layers import AdaptedLinear, DecoderLayer, DecoderStack, GatedMlp
from quire_kernels.lora import RANK_UNIT, LayerSlots, TokenGroups, add_adapters, allocate_slots, group_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleAdapter:
    """The two matrices of one module, with the type of the activations."""

    a: Tensor  # [r, K]
    b: Tensor  # [r, N], transposed and multiplied by the adapter's scale


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterWeights:
    rank: int
    """The largest rank of its modules."""
    modules: Mapping[str, ModuleAdapter]

    @property
    def num_bytes(self) -> int:
        return sum(module.a.nbytes + module.b.nbytes for module in self.modules.values())

    def pinned(self) -> "AdapterWeights":
        """Return the adapter in page-locked memory, from which a GPU copies without waiting for the host."""
        modules = {
            name: ModuleAdapter(a=module.a.pin_memory(), b=module.b.pin_memory())
            for name, module in self.modules.items()
        }
        return replace(self, modules=modules)


class AdapterPool:
    """The slots of all linear layers of a model."""

    def __init__(self, layers: tuple[tuple[JoinedLinear, LayerSlots], ...]) -> None:
        self._layers = layers

    @property
    def num_bytes(self) -> int:
        return sum(slots.a.nbytes + slots.b.nbytes for _, slots in self._layers)

    @property
    def num_slots(self) -> int:
        return self._layers[0][1].ranks.shape[0]

    def warm_up(self) -> None:
        """Run the kernels once for every shape of layers, so that no request waits for their compilation."""
        groups = group_tokens(np.zeros(1, dtype=np.int32))
        assert groups is not None
        for linear, slots in {
            (linear.inputs, linear.outputs): (linear, slots) for linear, slots in self._layers
        }.values():
            device = slots.a.device
            on_device = TokenGroups(order=groups.order.to(device), blocks=groups.blocks.to(device))
            x = slots.a.new_zeros((1, linear.inputs))
            add_adapters(slots.b.new_zeros((1, sum(linear.outputs))), x, slots, on_device)

    def write(self, slot: int, weights: AdapterWeights) -> None:
        for linear, slots in self._layers:
            begin, largest = 0, slots.b.shape[1]
            for part, (module, outputs) in enumerate(zip(linear.modules, linear.outputs, strict=True)):
                found = weights.modules.get(module)
                rank = 0 if found is None else found.a.shape[0]
                slots.ranks[slot, part] = rank
                if found is not None:
                    filled = -(-rank // RANK_UNIT) * RANK_UNIT
                    a = slots.a[slot, part * largest : part * largest + filled]
                    b = slots.b[slot, :filled, begin : begin + outputs]
                    a[:rank].copy_(found.a, non_blocking=True)
                    b[:rank].copy_(found.b, non_blocking=True)
                    if filled > rank:
                        a[rank:].zero_()
                        b[rank:].zero_()
                begin += outputs


def with_adapter_slots(
    stack: DecoderStack,
    linears: tuple[JoinedLinear, ...],
    *,
    slots: int,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[DecoderStack, AdapterPool]:
    """Return the model with ``slots`` for adapters in each of ``linears``, and the pool of the slots."""
    made: dict[tuple[int, str], LayerSlots] = {
        (linear.layer, linear.name): allocate_slots(
            slots=slots, max_rank=max_rank, inputs=linear.inputs, parts=linear.outputs, dtype=dtype, device=device
        )
        for linear in linears
    }
    layers = tuple(_with_slots(layer, index, made) for index, layer in enumerate(stack.layers))
    pool = AdapterPool(tuple((linear, made[linear.layer, linear.name]) for linear in linears))
    return replace(stack, layers=layers), pool


def _with_slots(layer: DecoderLayer, index: int, made: Mapping[tuple[int, str], LayerSlots]) -> DecoderLayer:
    attention, mlp = layer.attention, layer.mlp
    attention = replace(
        attention,
        qkv=AdaptedLinear(base=attention.qkv, slots=made[index, "qkv"]),
        out=AdaptedLinear(base=attention.out, slots=made[index, "out"]),
    )
    if isinstance(mlp, GatedMlp):  # adapters of experts are refused
        mlp = replace(
            mlp,
            gate_up=AdaptedLinear(base=mlp.gate_up, slots=made[index, "gate_up"]),
            down=AdaptedLinear(base=mlp.down, slots=made[index, "down"]),
        )
    return replace(layer, attention=attention, mlp=mlp)
