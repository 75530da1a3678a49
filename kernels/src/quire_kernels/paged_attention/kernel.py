"""Launches of the Triton kernels of ``paged_attention``.

A batch may contain decoding sequences, drafts to verify and chunks of prompts. Each of the three kinds is a launch with
its own tile shape over one schedule, which the first layer of a step computes on the device for all that are alike. A
launch without work is skipped. A last one merges partial results. Nothing here reads the device or waits for it.

Legend: T query tokens, B sequences, HQ/HK query/KV heads, D head dim, S block size, M blocks per sequence.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_kernels.checks import refuse
from quire_kernels.kv_cache import FP8, KVCache
from quire_kernels.paged_attention.device_kernels import _attend_kernel, _join_kernel
from quire_kernels.paged_attention.device_plan import _plan_kernel
from quire_kernels.paged_attention.plan import (
    DevicePlan,
    ScheduleKey,
    Workspace,
    plan_host_lengths,
    unsupported_shape,
)
from quire_kernels.paged_attention.schedule import LONG, MAX_SHORT_QUERIES, ONE, SHORT, Rule
from quire_kernels.paged_attention.tiles import config_key, item_lists, layer_shape, list_rules
from quire_kernels.triton_runtime.config import config_for
from quire_kernels.triton_runtime.device import device_properties, require_device, require_fp8, target_of
from quire_kernels.triton_runtime.launch import Launch, cdiv, launches
from quire_kernels.triton_runtime.target import Target

_JOINS_PER_SM = 16


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


def paged_attention(
    q: Tensor,
    cache: KVCache,
    plan: DevicePlan,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
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
    fixed = plan.workspace.split_tokens
    layer = _layer(
        cache.kv_heads,
        group,
        head_dim,
        cache.block_size,
        cache.keys.dtype.itemsize,
        q.dtype.itemsize,
        fixed,
        device_properties(q.device).multiprocessors,
        target_of(q.device),
    )
    workspace = plan.workspace
    key = ScheduleKey(window=plan.window, room=workspace.room(heads, head_dim, layer.own_results), rules=layer.rules)
    schedule = _scheduled(plan, key, layer.plan)
    partials = workspace.buffer
    sizes = (workspace.capacity(key), key.room, workspace.num_results(head_dim))
    for kind in _lists_with_work(plan, fixed=fixed is not None):
        programs = layer.programs[kind]
        if kind == ONE and fixed is None:
            rule = key.rules[ONE]
            longest = plan.block_tables.shape[1] * cache.block_size
            splits = min(rule.most, rule.fill, cdiv(longest, rule.least))
            programs = min(programs, plan.context_lens.shape[0] * max(splits, 1) * cache.kv_heads)
        layer.attend[kind](
            (programs,),
            out,
            partials,
            schedule,
            q,
            q.stride(0),
            cache.keys,
            cache.values,
            cache.key_scale,
            cache.value_scale,
            cache.num_blocks,
            plan.block_tables,
            plan.block_tables.shape[1],
            plan.query_starts,
            plan.context_lens.shape[0],
            plan.num_tokens,
            sinks,
            scale,
            soft_cap,
            plan.window,
            *sizes,
        )
    programs = min(plan.num_tokens * heads, layer.join_programs)
    layer.join((programs,), out, partials, schedule, cache.value_scale, sinks, *sizes)
    return out


def _lists_with_work(plan: DevicePlan, *, fixed: bool) -> list[int]:
    """Return the lists that can have items, in the order of their launches: the long items first."""
    if fixed:
        return [ONE]
    shorts = min(plan.max_short_len, plan.max_query_len)
    there = {LONG: plan.max_query_len > MAX_SHORT_QUERIES, SHORT: shorts > 1, ONE: plan.min_query_len == 1}
    return [kind for kind, has_work in there.items() if has_work]


def _scheduled(plan: DevicePlan, key: ScheduleKey, launch: Launch) -> Tensor:
    """Return the schedule for a layer, which the first such layer of a step computes."""
    schedule = plan.workspace.schedule_for(key)
    if key not in plan.scheduled:
        sequences = plan.context_lens.shape[0]
        sizes = (sequences, key.window, plan.workspace.capacity(key), key.room)
        launch((sequences,), schedule, plan.query_starts, plan.context_lens, *sizes)
        plan.scheduled.add(key)
    return schedule


_PLAN_OPTIONS = {"BLOCK_B": 256, "BLOCK_I": 64, "num_warps": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerLaunches:
    """The launches for one shape of layers, by list where there are several."""

    rules: tuple[Rule, Rule, Rule]
    plan: Launch
    attend: tuple[Launch, ...]
    programs: tuple[int, ...]
    join: Launch
    join_programs: int
    own_results: int
    """The results of one head that the programs of the first list keep for themselves."""


@launches
def _layer(
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    cache_bytes: int,
    query_bytes: int,
    split_tokens: int | None,
    processors: int,
    target: Target,
) -> _LayerLaunches:
    shape = layer_shape(kv_heads, group, head_dim, block_size)
    lists = item_lists(shape, cache_bytes, query_bytes, split_tokens, target)
    programs = tuple(processors * each.per_processor for each in lists)
    join = config_for("paged_attention.join", target, config_key(head_dim, cache_bytes))
    heads = {"HEADS": kv_heads * group, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_D": shape["BLOCK_D"]}
    return _LayerLaunches(
        rules=list_rules(lists, processors, kv_heads, split_tokens),
        plan=Launch(_plan_kernel, SHORT=MAX_SHORT_QUERIES, FIXED=split_tokens is not None, **_PLAN_OPTIONS),
        attend=tuple(Launch(_attend_kernel, **shape, **each.options(target)) for each in lists),
        programs=programs,
        join=Launch(_join_kernel, **heads, **join.options),
        join_programs=processors * _JOINS_PER_SM,
        own_results=programs[ONE] * lists[ONE].rows,
    )
