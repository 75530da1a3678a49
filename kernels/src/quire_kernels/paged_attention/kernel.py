"""Launches of the Triton kernels of ``paged_attention``.

A batch may contain decoding sequences, chunks of prompts and drafts to verify. Sequences of few queries and those of
many are two launches over one plan, each with its own tile shape; a launch without work is skipped. A third launch
merges the partial results of the first. Nothing here reads the device or waits for it.

Legend: T query tokens, B sequences, HQ/HK query/KV heads, D head dim, S block size, M blocks per sequence.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire_kernels.checks import refuse
from quire_kernels.dispatch import INTERPRETED
from quire_kernels.kv_cache import FP8, KVCache
from quire_kernels.paged_attention.device_kernels import _attend_kernel, _join_kernel, _split_kernel
from quire_kernels.paged_attention.plan import (
    MAX_SEGMENTS,
    MAX_SHORT_QUERIES,
    DevicePlan,
    Workspace,
    plan_host_lengths,
    unsupported_shape,
    workspace_floats,
)
from quire_kernels.triton_runtime.aot_case import AotCase
from quire_kernels.triton_runtime.config import LaunchConfig, config_for
from quire_kernels.triton_runtime.device import device_properties, require_device, require_fp8, target_of
from quire_kernels.triton_runtime.occupancy import register_limit
from quire_kernels.triton_runtime.sizes import next_power_of_2
from quire_kernels.triton_runtime.target import Target

# The minimum length of a split; a program for a shorter one would mostly be starting.
_MIN_SPLIT = 256
_MAX_MIN_SPLIT = 2048
# If batches are large enough, a context of this many tokens gives four items to every program.
_USUAL_CONTEXT = 4096


def plan_attention(
    block_tables: Tensor,
    query: np.ndarray,
    context: np.ndarray,
    block_size: int,
    window: int | None,
    chunked: bool,
    workspace: Workspace | None,
    deterministic: bool,
) -> DevicePlan:
    assert not chunked, "plan_attention refuses it"
    return plan_host_lengths(block_tables, query, context, window, workspace, deterministic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """The division of contexts into splits for the launches over a plan; see ``split_context``."""

    max_splits: int
    split_tokens: int
    max_queries: int


def paged_attention(
    q: Tensor,
    cache: KVCache,
    plan: DevicePlan,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    op = "paged_attention"
    require_device(op, q.device)
    if cache.keys.dtype == FP8:
        require_fp8(op, q.device)
    heads, head_dim = q.shape[1:]
    group = heads // cache.kv_heads
    if reason := unsupported_shape(head_dim, group):
        refuse(op, "q", f"has {reason}")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    target = target_of(q.device)
    processors = device_properties(q.device).multiprocessors
    key = config_key(head_dim, cache.keys.dtype.itemsize)
    shape = _shape(cache.kv_heads, group, head_dim, cache.block_size)
    tensors = {
        "q": q,
        "q_stride": q.stride(0),
        "keys": cache.keys,
        "values": cache.values,
        "key_scale": cache.key_scale,
        "value_scale": cache.value_scale,
        "num_blocks": cache.num_blocks,
        "block_tables": plan.block_tables,
        "table_stride": plan.block_tables.shape[1],
        "query_starts": plan.query_starts,
        "context_lens": plan.context_lens,
        "num_sequences": plan.context_lens.shape[0],
        "num_rows": plan.num_tokens,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "scale": scale,
        "soft_cap": soft_cap,
        "window": plan.window,
    }
    fixed = plan.workspace.split_tokens is not None
    if plan.max_query_len > MAX_SHORT_QUERIES and not fixed:
        config = config_for(f"{op}.attend", target, key)
        block_m = max(config.blocks["BLOCK_M"], next_power_of_2(group))
        grid = (cache.kv_heads, _most_tiles(plan, block_m // group, MAX_SHORT_QUERIES))
        _attend_kernel[grid](out, **tensors, **shape, **_options(config, BLOCK_M=block_m))
    if plan.min_query_len > MAX_SHORT_QUERIES and not fixed:
        return out
    config = config_for(f"{op}.{'fixed' if fixed else 'split'}", target, key)
    splitting = split_plan(plan, cache, heads, processors * config.blocks["PROGRAMS_PER_SM"])
    if fixed:
        block_m = max(config.blocks["BLOCK_M"], next_power_of_2(group))
    else:
        block_m = short_rows(splitting.max_queries, group, head_dim, q.dtype.itemsize)
    tiles = plan.context_lens.shape[0] * -(-splitting.max_queries // (block_m // group))
    takes_long = fixed and plan.max_query_len > splitting.max_queries
    most_items = tiles * splitting.max_splits + (
        _most_tiles(plan, block_m // group, splitting.max_queries) if takes_long else 0
    )
    per_processor = _programs_per_processor(config, block_m)
    programs = min(processors * per_processor, most_items * cache.kv_heads)
    partials = plan.workspace.buffer
    how = {
        "max_splits": splitting.max_splits,
        "split_tokens": splitting.split_tokens,
        "max_queries": splitting.max_queries,
    }
    limit = register_limit(target, per_processor, config.num_warps)
    tile_options = _options(config, BLOCK_M=block_m, FIXED=fixed, **({} if limit is None else {"maxnreg": limit}))
    _split_kernel[(programs,)](out, partials, **tensors, **how, **shape, **tile_options)
    if splitting.max_splits > 1:
        config_of_join = config_for(f"{op}.join", target, key)
        _join_kernel[(plan.context_lens.shape[0] * splitting.max_queries, heads)](
            out,
            partials,
            value_scale=cache.value_scale,
            query_starts=plan.query_starts,
            context_lens=plan.context_lens,
            sinks=sinks,
            window=plan.window,
            **how,
            HEADS=heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_D=shape["BLOCK_D"],
            SHORT=MAX_SHORT_QUERIES,
            TILE=config.blocks["TILE"],
            FIXED=fixed,
            **config_of_join.options,
        )
    return out


def config_key(head_dim: int, cache_bytes: int) -> str:
    """Return the key of the best tiles: the padded head dim, and the bytes of an element of the cache."""
    return f"head_dim={_padded(head_dim)} bytes={cache_bytes}"


def short_rows(max_queries: int, group: int, head_dim: int, query_bytes: int) -> int:
    """Return the rows of a query tile of the split kernel: whole tokens, at least those of a matrix instruction.

    query_bytes  bytes of an element of the queries
    """
    wanted = next_power_of_2(max_queries * group)
    # More rows of wide heads do not fit into registers, nor with the cache's tiles into 99 KiB of shared memory.
    most = 64 if _padded(head_dim) * query_bytes**2 <= 512 else 32
    return max(16, min(most, wanted), next_power_of_2(group))


def _programs_per_processor(config: LaunchConfig, rows: int) -> int:
    """Return how many programs of a persistent launch one multiprocessor is to run at once.

    The table is for the rows of one decoded token. Tiles of more rows, which verify drafts, need twice the registers
    and more shared memory.
    """
    most: int = config.blocks["PROGRAMS_PER_SM"]
    return most if rows <= max(16, config.blocks.get("BLOCK_M", 16)) else max(1, min(most - 1, 2))


def split_plan(plan: DevicePlan, cache: KVCache, heads: int, programs: int) -> Splitting:
    """Return the division into splits for the shape of the batch; the device applies it to the lengths."""
    sequences, width = plan.block_tables.shape
    max_context = width * cache.block_size
    max_queries = min(plan.max_query_len, plan.max_short_len)
    # The number of splits if each sequence has one query.
    room = plan.workspace.buffer.numel() // workspace_floats(sequences, heads, cache.head_dim)
    if (fixed := plan.workspace.split_tokens) is not None:
        needed = -(-max_context // fixed)
        if needed > max(room, 1):
            refuse(
                "paged_attention",
                "plan",
                f"has a workspace for {room} splits of {sequences} sequences; contexts of up to {max_context} tokens "
                f"in splits of {fixed} need {needed}",
            )
        # With more queries than there is room for, a program visits all splits of a sequence, with the same result.
        return Splitting(
            max_splits=needed,
            split_tokens=fixed,
            max_queries=max_queries if needed == 1 else min(max_queries, room // needed),
        )
    per_program = sequences * cache.kv_heads * _USUAL_CONTEXT // (4 * programs)
    split_tokens = min(_MAX_MIN_SPLIT, max(_MIN_SPLIT, next_power_of_2(per_program)))
    max_splits = max(1, min(room // max_queries, MAX_SEGMENTS, -(-max_context // split_tokens)))
    return Splitting(max_splits=max_splits, split_tokens=split_tokens, max_queries=max_queries)


def _most_tiles(plan: DevicePlan, tokens: int, short: int) -> int:
    """Return an upper bound of the query tiles of ``tokens`` tokens for sequences of more than ``short`` queries."""
    return plan.num_tokens // tokens + min(plan.context_lens.shape[0], plan.num_tokens // (short + 1))


@functools.cache
def _shape(kv_heads: int, group: int, head_dim: int, block_size: int) -> dict[str, int]:
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": _padded(head_dim),
        "BLOCK_SIZE": block_size,
        "SHORT": MAX_SHORT_QUERIES,
    }


def _padded(head_dim: int) -> int:
    return max(16, next_power_of_2(head_dim))


def _options(config: LaunchConfig, **constants: Any) -> dict[str, Any]:
    return {
        "TILE": config.blocks["TILE"],
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "INTERPRETED": INTERPRETED,
        **constants,
    }


def aot_cases(target: Target) -> list[AotCase]:
    """Return the kernels with the shapes that are served; each option (dtype, head dim, block size) occurs."""
    plain = _Layer(name="bf16 d128 g4", head_dim=128, group=4)
    wide = _Layer(name="bf16 d256 g2 soft cap", head_dim=256, group=2, soft_cap=True)
    layers = [
        plain,
        # A tile with a vector of block ids, and one with a single id.
        _Layer(
            name="bf16 d128 g4 window sinks block 64", head_dim=128, group=4, block_size=64, window=True, sinks=True
        ),
        _Layer(name="bf16 d64 g8 window sinks", head_dim=64, group=8, window=True, sinks=True),
        _Layer(name="bf16 d80 g1 alibi", head_dim=80, group=1, alibi=True),
        wide,
    ]
    if target.converts_fp8:
        layers.append(_Layer(name="bf16 d128 g4 fp8 cache", head_dim=128, group=4, cache="fp8e4nv"))
    cases = [_tiles_case(layer, kernel, target) for layer in layers for kernel in ("split", "attend")]
    # Decoding with every group, head dim and mask that changes the registers, each of which the launch counts on.
    groups = [_Layer(name=f"bf16 d128 g{group}", head_dim=128, group=group) for group in (1, 2, 3, 5, 6, 7, 8)]
    masks = [
        _Layer(name="bf16 d128 g8 window", head_dim=128, group=8, window=True),
        _Layer(name="bf16 d128 g4 soft cap", head_dim=128, group=4, soft_cap=True),
        _Layer(name="bf16 d128 g4 block 128", head_dim=128, group=4, block_size=128),
        _Layer(name="bf16 d64 g4", head_dim=64, group=4),
        _Layer(name="bf16 d96 g1", head_dim=96, group=1),
        _Layer(name="bf16 d256 g8 window", head_dim=256, group=8, window=True),
    ]
    cases += [_tiles_case(layer, "split", target) for layer in (*groups, *masks)]
    # Short chunks, and drafts to verify.
    cases += [_tiles_case(layer, "split", target, queries=MAX_SHORT_QUERIES) for layer in (plain, wide)]
    return [*cases, _tiles_case(plain, "fixed", target), _join_case(plain, target)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A layer to compile for."""

    name: str
    head_dim: int
    group: int
    cache: str = "bf16"
    block_size: int = 16
    window: bool = False
    sinks: bool = False
    alibi: bool = False
    soft_cap: bool = False

    def optional(self) -> dict[str, str | None]:
        return {
            "key_scale": "*fp32:16" if self.cache != "bf16" else None,
            "value_scale": "*fp32:16" if self.cache != "bf16" else None,
            "sinks": "*bf16:16" if self.sinks else None,
            "alibi_slopes": "*fp32:16" if self.alibi else None,
            "soft_cap": "fp32" if self.soft_cap else None,
            "window": "i32" if self.window else None,
        }


_VARYING_SPLIT = {"max_splits": "i32", "split_tokens": "i32", "max_queries": "i32"}


def _tiles_case(layer: _Layer, kernel: str, target: Target, *, queries: int = 1) -> AotCase:
    cache_bytes = 2 if layer.cache == "bf16" else 1
    config = config_for(f"paged_attention.{kernel}", target, config_key(layer.head_dim, cache_bytes))
    pointers = {name: f"*{layer.cache}:16" for name in ("keys", "values")}
    tables = {name: "*i32:16" for name in ("block_tables", "query_starts", "context_lens")}
    numbers = {name: "i32" for name in ("num_blocks", "table_stride", "num_sequences", "num_rows")}
    optional = layer.optional()
    signature = (
        {"out": "*bf16:16", "q": "*bf16:16", "q_stride": "i32:16", "scale": "fp32"} | pointers | tables | numbers
    )
    signature |= {name: kind for name, kind in optional.items() if kind is not None}
    if kernel == "split":
        rows = short_rows(queries, layer.group, layer.head_dim, 2)
    else:
        rows = max(config.blocks["BLOCK_M"], next_power_of_2(layer.group))
    constants: dict[str, object] = {name: None for name, kind in optional.items() if kind is None}
    constants |= {**_shape(8, layer.group, layer.head_dim, layer.block_size)}
    constants |= {"BLOCK_M": rows, "TILE": config.blocks["TILE"], "INTERPRETED": False}
    if kernel != "attend":
        signature |= {"partials": "*fp32:16", **_VARYING_SPLIT}
        constants["FIXED"] = kernel == "fixed"
    programs = _programs_per_processor(config, rows) if kernel != "attend" else 1
    return AotCase(
        name=f"{kernel} {layer.name}{f' {queries} queries' * (queries > 1)}",
        kernel=_attend_kernel if kernel == "attend" else _split_kernel,
        signature=signature,
        constexprs=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=register_limit(target, programs, config.num_warps),
        programs_per_sm=programs,
        decode_path=kernel != "attend" and queries == 1,
    )


def _join_case(layer: _Layer, target: Target) -> AotCase:
    key = config_key(layer.head_dim, 2)
    config = config_for("paged_attention.join", target, key)
    signature = {"out": "*bf16:16", "partials": "*fp32:16", "query_starts": "*i32:16", "context_lens": "*i32:16"}
    constants = {
        "value_scale": None,
        "sinks": None,
        "window": None,
        "HEADS": 8 * layer.group,
        "GROUP": layer.group,
        "HEAD_DIM": layer.head_dim,
        "BLOCK_D": _padded(layer.head_dim),
        "SHORT": MAX_SHORT_QUERIES,
        "TILE": config_for("paged_attention.split", target, key).blocks["TILE"],
        "FIXED": False,
        **config.blocks,
    }
    return AotCase(
        name=f"join {layer.name}",
        kernel=_join_kernel,
        signature=signature | _VARYING_SPLIT,
        constexprs=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        decode_path=True,
    )
