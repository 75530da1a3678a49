"""Mixtures of experts on a CPU: tokens sorted by expert, one call per expert that has tokens, one pass for the sum.

The sum visits the experts' output rows token by token, not the tokens expert by expert. Each result is therefore
written to memory once, and a token's sum does not depend on the rest of the batch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor
from torch.nn import functional

from quire_kernels.activation import gelu_tanh_and_mul, silu_and_mul
from quire_kernels.checks import refuse
from quire_kernels.cpu_runtime import Worker, launch
from quire_kernels.cpu_runtime.scalars import (
    as_int64_pointer,
    fetch_add,
    float32_pointer,
    int64_pointer,
    storage_pointer,
    to_float32,
    to_storage,
)
from quire_kernels.moe import Expert, Routes

# Below this many elements, waking a second thread costs more than it saves.
_PARALLEL_ELEMENTS = 1 << 16
# Columns per pass of the sum: enough for long vector loops, few enough for the nearest cache.
_COLUMNS = 512


def route_tokens(logits: Tensor, per_token: int, normalise: bool) -> Routes:
    probabilities = logits.float().softmax(dim=-1)  # [T, E]
    weights, experts = probabilities.topk(per_token, dim=-1)  # [T, K] each
    if normalise:
        weights /= weights.sum(dim=-1, keepdim=True)
    return Routes(experts=experts, weights=weights)


def apply_experts(x: Tensor, routes: Routes, experts: Sequence[Expert]) -> Tensor:
    tokens, per_token = routes.experts.shape
    if tokens == 0:
        return torch.empty_like(x)
    by_expert, order = routes.experts.view(-1).sort(stable=True)  # [T K] each
    if by_expert[0] < 0 or by_expert[-1] >= len(experts):
        refuse("apply_experts", "experts", f"name one from {by_expert[0]} to {by_expert[-1]}; there are {len(experts)}")
    counts = by_expert.bincount().tolist()
    rows = x.index_select(0, order // per_token)  # [T K, H]
    parts = []
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            taken = rows[begin : begin + count]
            made = experts[expert](taken)
            if made.shape != taken.shape or made.dtype != x.dtype:
                refuse(
                    "apply_experts", "experts", f"differ: an expert made {tuple(made.shape)} of {tuple(taken.shape)}"
                )
            parts.append(made)
            begin += count
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0])  # The position of the row of each token and choice.
    return _sum_up(parts[0] if len(parts) == 1 else torch.cat(parts), places, routes.weights, tokens)


def fused_experts(x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor, gelu: bool, deterministic: bool) -> Tensor:
    activate = gelu_tanh_and_mul if gelu else silu_and_mul

    def expert(index: int) -> Expert:
        return lambda rows: functional.linear(activate(functional.linear(rows, gate_up[index])), down[index])

    return apply_experts(x, routes, [expert(index) for index in range(gate_up.shape[0])])


def _sum_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 10)
    items, per_token, width, rows, target, element_bytes = a[1], a[3], a[4], a[5], a[6], a[7]
    places = carray(int64_pointer(a[8]), items * per_token)
    weights = carray(float32_pointer(a[9]), items * per_token)
    sums = np.empty(_COLUMNS, np.float32)
    while True:
        token = fetch_add(counter, 0)
        if token >= items:
            break
        for begin in range(0, width, _COLUMNS):
            count = min(_COLUMNS, width - begin)
            for i in range(count):
                sums[i] = np.float32(0.0)
            for k in range(token * per_token, (token + 1) * per_token):
                weight = weights[k]
                row = carray(storage_pointer(block, rows + (places[k] * width + begin) * element_bytes), count)
                for i in range(count):
                    sums[i] += weight * to_float32(row[i])
            out = carray(storage_pointer(block, target + (token * width + begin) * element_bytes), count)
            for i in range(count):
                out[i] = to_storage(sums[i], out[i])


_SUM = Worker(_sum_worker)


def _sum_up(rows: Tensor, places: Tensor, weights: Tensor, tokens: int) -> Tensor:
    """Return rows t = sum over k of weights[t, k] * rows[places[t, k]]."""
    rows = rows.contiguous()
    width = rows.shape[1]
    out = torch.empty((tokens, width), dtype=rows.dtype)
    arguments = (
        weights.shape[1],
        width,
        rows.data_ptr(),
        out.data_ptr(),
        rows.element_size(),
        places.data_ptr(),
        weights.data_ptr(),
    )
    launch(_SUM, rows.dtype, tokens, arguments, parallel=rows.numel() >= _PARALLEL_ELEMENTS)
    return out
