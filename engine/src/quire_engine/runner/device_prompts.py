"""The choice between our attention and FlashAttention 3 for steps with prompts, by their times on this GPU.

At the first start of a model, both compute chunks of a prompt with the heads of the model's widest layer, and the times
are kept for later starts. The library is used from the smallest number of tokens on at which it is faster, if
it is faster at all larger ones too, and only if its results agree with ours here.

Legend: T query tokens, HQ query heads, D head dim.
"""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire_engine import __version__, kept
from quire_engine.config import EngineConfig
from quire_engine.model.shape import ModelShape
from quire_engine.runner.device.accelerator import Accelerator, make_accelerator
from quire_engine.runner.device.measuring import LARGEST_ERROR, largest_error, least_microseconds
from quire_kernels.kv_cache import allocate_kv_cache
from quire_kernels.paged_attention import paged_attention
from quire_kernels.paged_attention.flash import NAME, FlashAttention, find_flash_attention, flash_problem
from quire_kernels.paged_attention.plan import PromptAttention, Workspace, allocate_workspace, plan_host_lengths

_log = logging.getLogger(__name__)
_KIND = "gpu-attention-timings"
_TOKENS = (64, 256, 1024, 4096)
_BEFORE = 2048
"""The tokens of context before the timed chunk, as of a prompt whose first chunks are computed."""
_WORTH_LEAVING = 1.03
"""The factor by which the library must be faster, because times differ from run to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTimes:
    """A file of the cache folder: the microseconds of a layer's attention, by number of tokens."""

    facts: tuple[str, ...]
    tokens: tuple[int, ...]
    ours: tuple[float, ...]
    library: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChoice:
    attention: PromptAttention | None
    line: str
    """The choice and its reason, for the start report."""


def choose_prompt_attention(
    config: EngineConfig,
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    find: Callable[[], Callable[..., Any] | str] = find_flash_attention,
) -> PromptChoice:
    """Return the attention of steps with prompts. ``device`` is a GPU, or the CPU where a stand-in runs."""
    function = find()
    problem = function if isinstance(function, str) else _problem(config, shape, device, dtype, cache_dtype)
    if isinstance(function, str) or problem is not None:
        return PromptChoice(attention=None, line=f"prompts by quire's attention: {NAME} {problem}")
    tokens = tuple(count for count in _TOKENS if count <= config.scheduler.max_num_batched_tokens)
    try:
        times = _times(config, shape, device, dtype, tokens, function)
    # A library fails in many ways, and our kernels are always there.
    except Exception as failure:
        reason = " ".join(str(failure).split()) or type(failure).__name__
        _log.warning("prompts have quire's attention, because %s failed: %s", NAME, reason)
        return PromptChoice(attention=None, line=f"prompts by quire's attention: {NAME} failed: {reason}")
    first = first_faster(times)
    attention = None if first is None else FlashAttention(function=function, from_tokens=first)
    return PromptChoice(attention=attention, line=times_in_words(times, first))


def first_faster(times: AttentionTimes) -> int | None:
    """Return the number of tokens from which on the library is always faster, or None."""
    first: int | None = None
    rows = list(zip(times.tokens, times.ours, times.library, strict=True))
    for count, ours, library in reversed(rows):
        if library * _WORTH_LEAVING >= ours:
            break
        first = count
    return first


def times_in_words(times: AttentionTimes, first: int | None) -> str:
    chosen = "prompts by quire's attention" if first is None else f"steps from {first} tokens with a prompt by {NAME}"
    measured = ", ".join(
        f"{count}: {ours:.0f} and {library:.0f}"
        for count, ours, library in zip(times.tokens, times.ours, times.library, strict=True)
    )
    others = "" if first is None else "; layers with soft caps, sinks or ALiBi keep quire's"
    return f"{chosen} (µs of quire and {NAME} by tokens: {measured}{others})"


def _problem(
    config: EngineConfig, shape: ModelShape, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype
) -> str | None:
    """Return why the library is not considered, or None."""
    from quire_kernels.triton_runtime.device import device_properties  # needs Triton

    if config.device.deterministic:
        return "divides prompts by their length, which --deterministic excludes"
    if config.parallel.ranks > 1:
        return "is not tried with several ranks"
    properties = device_properties(device)
    problems = (
        flash_problem(
            capability=None if properties.amd else properties.capability,
            head_dim=heads.head_dim,
            dtype=dtype,
            cache_dtype=cache_dtype,
        )
        for heads in dict.fromkeys(shape.layer_heads)
    )
    return next((problem for problem in problems if problem is not None), None)


def _times(
    config: EngineConfig,
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    tokens: tuple[int, ...],
    function: Callable[..., Any],
) -> AttentionTimes:
    """Return the times of an earlier start on this kind of GPU, or measure and keep them."""
    facts = _facts(config, shape, device, dtype, tokens, function)
    found = kept.read(_KIND, facts, AttentionTimes)
    if found is not None and found.tokens == tokens and _are_whole(found):
        return found
    began = time.perf_counter()
    accelerator = make_accelerator(device)
    library = FlashAttention(function=function, from_tokens=1)
    pairs = [time_attention(accelerator, config, shape, dtype, count, library) for count in tokens]
    accelerator.close()
    found = AttentionTimes(
        facts=facts, tokens=tokens, ours=tuple(ours for ours, _ in pairs), library=tuple(other for _, other in pairs)
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    kept.write(_KIND, found)
    _log.info("timed attention of prompts in %.1f s", time.perf_counter() - began)
    return found


def _facts(
    config: EngineConfig,
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    tokens: tuple[int, ...],
    function: Callable[..., Any],
) -> tuple[str, ...]:
    """Return everything that determines the times."""
    import triton

    from quire_kernels.triton_runtime.device import device_properties  # needs Triton

    return (
        f"gpu: {device_properties(device)}",
        f"quire: {__version__}",
        f"torch: {torch.__version__} {torch.version.cuda}",
        f"triton: {triton.__version__}",
        f"library: {_release(function)}",
        f"attention: {dtype} {config.cache.block_size} {tokens} {_BEFORE}",
        f"heads: {shape.num_heads} {shape.num_kv_heads} {shape.head_dim} {shape.kv_groups}",
    )


def _release(function: Callable[..., Any]) -> str:
    """Return the module of the library, and its version if it says so."""
    module = sys.modules.get(function.__module__)
    return f"{function.__module__} {getattr(module, '__version__', '')}"


def _are_whole(times: AttentionTimes) -> bool:
    columns = (times.ours, times.library)
    return all(len(column) == len(times.tokens) and all(0.0 <= one < 1e9 for one in column) for column in columns)


@torch.inference_mode()
def time_attention(
    accelerator: Accelerator,
    config: EngineConfig,
    shape: ModelShape,
    dtype: torch.dtype,
    tokens: int,
    library: PromptAttention,
) -> tuple[float, float]:
    """Return the least microseconds of ours and of the library for a chunk of ``tokens`` behind ``_BEFORE`` others.

    Raise ArithmeticError if their results differ.
    """
    device, block = accelerator.device, config.cache.block_size
    blocks = -(-(_BEFORE + tokens) // block)
    cache = allocate_kv_cache(
        num_blocks=blocks,
        block_size=block,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        device=device,
    )
    cache.keys.uniform_(-1, 1)
    cache.values.uniform_(-1, 1)
    q = torch.empty((tokens, shape.num_heads, shape.head_dim), dtype=dtype, device=device).uniform_(-1, 1)
    tables = torch.randperm(blocks, device=device).to(torch.int32)[None]  # scattered, as in service

    def attend_with(prompts: PromptAttention | None, window: int | None = None) -> Callable[[], Tensor]:
        workspace = _workspace(shape, tokens, device, prompts)
        plan = plan_host_lengths(tables, np.array([tokens]), np.array([_BEFORE + tokens]), window, workspace, False)

        def attend() -> Tensor:
            plan.restart()
            return paged_attention(q, cache, plan, shape.head_dim**-0.5)

        return attend

    for window in dict.fromkeys((None, *shape.kv_groups)):
        error = largest_error(attend_with(library, window)(), attend_with(None, window)())
        if not error <= LARGEST_ERROR:  # NaN is not
            raise ArithmeticError(f"its results differ from quire's by {error:.2g} (window {window})")
    return _time(accelerator, attend_with(None)), _time(accelerator, attend_with(library))


def _workspace(shape: ModelShape, tokens: int, device: torch.device, prompts: PromptAttention | None) -> Workspace:
    return allocate_workspace(
        max_tokens=tokens, heads=shape.num_heads, head_dim=shape.head_dim, device=device, prompts=prompts
    )


def _time(accelerator: Accelerator, attend: Callable[[], Tensor]) -> float:
    def work() -> None:
        attend()

    return least_microseconds(accelerator, work)
