"""Our attention under a name that transformers knows: keys and values are stored in the paged cache and read there.

In every layer a model gets the function of its ``attn_implementation`` from ``AttentionInterface``, and passes the
arguments of its forward pass to it: the step's metadata arrives as ``quire_step``. The name has no mask function, so
transformers builds no mask: the plan of the step's batch determines which tokens a query sees.

Legend: T tokens, HQ/HK query/KV heads, D head dim of the cache, DQ, DV dims of a model's queries and values (<= D).
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from quire_engine.model.layers import ModelInputs
from quire_kernels.kv_cache import KVCache
from quire_kernels.paged_attention import paged_attention
from quire_kernels.store_kv import store_kv

SERVING = "quire"
"""The ``attn_implementation`` of serving."""


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The place of a layer's keys and values."""

    cache: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """The data that the attention layers of one forward pass share."""

    inputs: ModelInputs
    caches: tuple[KVCache, ...]
    places: Mapping[nn.Module, LayerPlace]


@functools.cache
def _no_rotation(device: torch.device) -> Tensor:
    """Return a table that rotates no component at any position, because models apply their own rotation."""
    return torch.empty((1 << 40, 0), dtype=torch.float32, device=device)


def register() -> None:
    """Register ``SERVING`` with transformers."""
    AttentionInterface.register(SERVING, attend)


def attend(
    module: nn.Module,
    query: Tensor,  # [1, HQ, T, DQ]
    key: Tensor,  # [1, HK, T, DQ]
    value: Tensor,  # [1, HK, T, DV]
    attention_mask: Tensor | None = None,
    *,
    quire_step: AttentionStep,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_handed_on: object,  # the model's arguments that do not concern attention; ``layers`` has refused others
) -> tuple[Tensor, None]:
    """Return the result [1, T, HQ, DV], and None instead of attention weights."""
    assert attention_mask is None, "no mask is built under this name"
    place = quire_step.places[module]
    cache, group = quire_step.caches[place.cache], quire_step.inputs.groups[place.group]
    value_dim = value.shape[-1]
    scale = float(query.shape[-1]) ** -0.5 if scaling is None else scaling
    query = _temper(module, query, quire_step.inputs.positions)
    q, k, v = (_by_token(x, cache.head_dim) for x in (query, key, value))
    store_kv(q, k, v, _no_rotation(q.device), quire_step.inputs.positions, group.slots, cache)
    attended = paged_attention(q, cache, group.plan, scale, softcap, sinks=s_aux)  # [T, HQ, D]
    return attended[None, :, :, :value_dim], None


def _temper(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Return queries of Llama 4's layers without rotation as scaled by their positions; others as they are.

    The model counts the tokens of the batch for positions, so that what it scaled by is divided out.
    """
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query
    counted = torch.arange(len(positions), device=positions.device)
    right, found = (
        torch.log1p(torch.floor((place.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        for place in (positions, counted)
    )
    tempered: Tensor = query * (right / found)[:, None]
    return tempered.to(query.dtype)


def _by_token(x: Tensor, head_dim: int) -> Tensor:
    """Return [1, H, T, *] as [T, H, D], a token's heads adjacent; components beyond a model's own are 0."""
    heads = x[0].transpose(0, 1)
    if heads.shape[2] < head_dim:
        return functional.pad(heads, (0, head_dim - heads.shape[2]))
    is_dense = heads.stride(2) == 1 and (heads.stride(1) == head_dim or heads.shape[1] == 1)
    return heads if is_dense else heads.contiguous()
