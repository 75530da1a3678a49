"""store_kv on a CPU. Each work item is a few tokens.

A decoding sequence's block was last used a whole step ago, and one token's key is spread over as many of its cache
lines as the head has components, or half. The lines of an item's next token are therefore prefetched while a token is
rotated.
"""

from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from quire_kernels.checks import refuse
from quire_kernels.cpu_runtime import Worker, float_bits, launch
from quire_kernels.cpu_runtime.micro_kernel import is_in_pairs
from quire_kernels.cpu_runtime.scalars import (
    FAST,
    as_int64_pointer,
    fetch_add,
    float32_pointer,
    float_from_bits,
    int64_pointer,
    prefetch,
    storage_pointer,
    to_float32,
    to_storage,
)
from quire_kernels.kv_cache import KVCache
from quire_kernels.store_kv import HeadNorm

# Below this many elements, waking a second thread costs more than it saves.
_PARALLEL_ELEMENTS = 1 << 13
# Tokens per item, unless threads would be idle.
_TOKENS_PER_ITEM = 8
_POSITION_FAULT, _SLOT_FAULT = 1, 2


@njit(fastmath=FAST)
def _normalise_head(head: Any, weight: Any, dim: Any, eps: Any) -> None:
    """Normalize one head vector in place."""
    total = np.float32(0.0)
    for i in range(dim):
        value = to_float32(head[i])
        total += value * value
    scale = np.float32(1.0 / np.sqrt(np.float64(total) / dim + eps))
    for i in range(dim):
        head[i] = to_storage(to_float32(head[i]) * scale * to_float32(weight[i]), head[i])


@njit(fastmath=FAST)
def _rotate_head(head: Any, cos_sin: Any, half: Any) -> None:
    """Rotate one head vector in place; ``cos_sin`` is the table's row for its position."""
    for i in range(half):
        first, second = to_float32(head[i]), to_float32(head[half + i])
        cos, sin = cos_sin[i], cos_sin[half + i]
        head[i] = to_storage(first * cos - second * sin, head[i])
        head[half + i] = to_storage(second * cos + first * sin, head[i])


@njit
def _write_pairs(block: Any, key: Any, place: Any, block_size: Any, offset: Any) -> None:
    """Write a token's column of a key block [D / 2, S, 2]."""
    dim = key.size
    key_block = carray(storage_pointer(block, place), (dim + dim % 2) * block_size)
    for i in range(dim // 2):
        first = (i * block_size + offset) * 2
        key_block[first] = key[2 * i]
        key_block[first + 1] = key[2 * i + 1]
    if dim % 2:
        first = ((dim // 2) * block_size + offset) * 2
        key_block[first] = key[dim - 1]
        key_block[first + 1] = 0


@njit
def _write_half_pairs(block: Any, value: Any, place: Any, value_dim: Any, offset: Any) -> None:
    """Write a token's row of a value block [S / 2, DV, 2]; another thread may write the other half of its pairs."""
    row = carray(storage_pointer(block, place + (offset // 2) * value_dim * 4), value_dim * 2)
    for i in range(value.size):
        row[2 * i + offset % 2] = value[i]


@njit
def _write_token(
    block: Any, key: Any, value: Any, key_block: Any, value_block: Any, block_size: Any, value_dim: Any, offset: Any
) -> None:
    """Write a token's key and value; ``key_block`` and ``value_block`` are a KV head's addresses in its block."""
    if is_in_pairs(block):
        _write_pairs(block, key, key_block, block_size, offset)
        _write_half_pairs(block, value, value_block, value_dim, offset)
        return
    keys = carray(storage_pointer(block, key_block), key.size * block_size)
    values = carray(storage_pointer(block, value_block), (offset + 1) * value_dim)
    for i in range(key.size):
        keys[i * block_size + offset] = key[i]
    for i in range(value.size):
        values[offset * value_dim + i] = value[i]


@njit
def _prefetch_token(slot: Any, place: Any, steps: Any, sizes: Any, layout: Any) -> None:
    """Prefetch a token's lines of the key and the value block of each KV head.

    place   addresses of the keys and the values
    steps   bytes from component to component of a key, and of a token's values
    sizes   bytes of a head in a block, of keys and of values
    layout  KV heads, tokens of a block, adjacent tokens, bytes of adjacent components of a key
    """
    kv_heads, block_size, unit, width = layout
    index, offset = slot // block_size, slot % block_size
    for h in range(kv_heads):
        keys = place[0] + (index * kv_heads + h) * sizes[0] + offset * width
        for line in range(keys, keys + sizes[0], max(steps[0], 64)):
            prefetch(line, 1)
        prefetch(place[1] + (index * kv_heads + h) * sizes[1] + offset // unit * steps[1], steps[1])


def _store_kv_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 29)
    items, q, q_bytes, k, k_bytes, v, v_bytes = a[1], a[3], a[4], a[5], a[6], a[7], a[8]
    q_heads, kv_heads, dim, size = a[9], a[10], a[11], a[12]
    table, width, table_rows = a[13], a[14], a[15]
    tokens, tokens_per_item = a[27], a[28]
    positions, slots = carray(int64_pointer(a[16]), tokens), carray(int64_pointer(a[17]), tokens)
    key_cache, value_cache, num_blocks, block_size, value_dim = a[18], a[19], a[20], a[21], a[22]
    q_weight, k_weight = carray(storage_pointer(block, a[23]), dim), carray(storage_pointer(block, a[25]), dim)
    q_eps, k_eps = float_from_bits(a[24]), float_from_bits(a[26])
    # If pairs are multiplied, two components of a key are adjacent, and so are the values of two tokens.
    unit = 2 if is_in_pairs(block) else 1
    steps = (block_size * unit * size, value_dim * unit * size)
    sizes = ((dim + unit - 1) // unit * steps[0], block_size * value_dim * size)
    layout = (kv_heads, block_size, unit, unit * size)
    while True:
        taken = fetch_add(counter, 0)
        if taken >= items:
            break
        begin = taken * tokens_per_item
        for token in range(begin, min(tokens, begin + tokens_per_item)):
            position, slot = positions[token], slots[token]
            if position < 0 or position >= table_rows:
                a[2] = 1
                return
            if slot < 0 or slot >= num_blocks * block_size:
                a[2] = 2
                return
            for ahead in range(token + (token > begin), min(token + 2, tokens, begin + tokens_per_item)):
                if ahead == token or slots[ahead] // block_size != slot // block_size:
                    _prefetch_token(slots[ahead], (key_cache, value_cache), steps, sizes, layout)
            cos_sin = carray(float32_pointer(table + position * width * 4), width)
            for h in range(q_heads):
                query = carray(storage_pointer(block, q + token * q_bytes + h * dim * size), dim)
                if a[23] != 0:
                    _normalise_head(query, q_weight, dim, q_eps)
                _rotate_head(query, cos_sin, width // 2)
            for h in range(kv_heads):
                key = carray(storage_pointer(block, k + token * k_bytes + h * dim * size), dim)
                if a[25] != 0:
                    _normalise_head(key, k_weight, dim, k_eps)
                _rotate_head(key, cos_sin, width // 2)
                value = carray(storage_pointer(block, v + token * v_bytes + h * dim * size), dim)
                index = slot // block_size * kv_heads + h
                key_block, value_block = key_cache + index * sizes[0], value_cache + index * sizes[1]
                _write_token(block, key, value, key_block, value_block, block_size, value_dim, slot % block_size)


_WORKER = Worker(_store_kv_worker)


def store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: KVCache,
    q_norm: HeadNorm | None,
    k_norm: HeadNorm | None,
) -> None:
    tokens, q_heads, dim = q.shape
    size = q.element_size()
    parallel = tokens * q.stride(0) >= _PARALLEL_ELEMENTS
    per_item = max(1, min(_TOKENS_PER_ITEM, tokens // (2 * torch.get_num_threads()) if parallel else tokens))
    arguments = (
        q.data_ptr(),
        q.stride(0) * size,
        k.data_ptr(),
        k.stride(0) * size,
        v.data_ptr(),
        v.stride(0) * size,
        q_heads,
        cache.kv_heads,
        dim,
        size,
        cos_sin.data_ptr(),
        cos_sin.shape[1],
        cos_sin.shape[0],
        positions.data_ptr(),
        slots.data_ptr(),
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        cache.num_blocks,
        cache.block_size,
        cache.value_dim,
        *_norm_arguments(q_norm),
        *_norm_arguments(k_norm),
        tokens,
        per_item,
    )

    def refuse_fault(fault: int) -> None:
        if fault == _POSITION_FAULT:
            refuse("store_kv", "positions", f"leave the table of {cos_sin.shape[0]} positions")
        assert fault == _SLOT_FAULT
        refuse("store_kv", "slots", f"leave the cache of {cache.num_blocks} blocks of {cache.block_size} tokens")

    keeps = (q, k, v, cos_sin, positions, slots, cache, q_norm, k_norm)
    items = -(-tokens // per_item)
    launch(_WORKER, q.dtype, items, arguments, parallel=parallel, keeps=keeps, refuse=refuse_fault)


def _norm_arguments(norm: HeadNorm | None) -> tuple[int, int]:
    return (0, 0) if norm is None else (norm.weight.data_ptr(), float_bits(norm.eps))
