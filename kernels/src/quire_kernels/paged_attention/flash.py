"""FlashAttention 3 in place of the Triton kernels for steps with prompts, where it is installed.

It reads the same paged cache, block tables and lengths (Shah et al., "FlashAttention-3", 2024). Its package is either
``flash_attn_interface`` or ``flash_attn_3``, built for Hopper, and is no dependency of ours.

Legend: T query tokens, B sequences, HQ/HK query/KV heads, D head dim, S block size, N blocks, M blocks per sequence.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire_kernels.kv_cache import KVCache
from quire_kernels.paged_attention.plan import DevicePlan
from quire_kernels.paged_attention.schedule import MAX_SHORT_QUERIES

NAME = "FlashAttention 3"
MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
_FUNCTION = "flash_attn_with_kvcache"
_PARAMETERS = (
    "q",
    "k_cache",
    "v_cache",
    "cache_seqlens",
    "page_table",
    "cu_seqlens_q",
    "max_seqlen_q",
    "softmax_scale",
    "causal",
    "window_size",
)
_CAPABILITY = (9, 0)
_LARGEST_HEAD_DIM, _HEAD_DIM_UNIT = 256, 8
_DTYPES = (torch.bfloat16, torch.float16)


def find_flash_attention(load: Callable[[str], Any] = importlib.import_module) -> Callable[..., Any] | str:
    """Return the function of the installed package, or why it cannot be used."""
    for name in MODULES:
        try:
            module = load(name)
        except ModuleNotFoundError:
            continue
        # A package for another torch or CUDA fails in many ways while it is imported.
        except Exception as error:
            return f"{name} cannot be imported: {' '.join(str(error).split())}"
        function: Callable[..., Any] | None = getattr(module, _FUNCTION, None)
        if function is None:
            return f"{name} has no {_FUNCTION}"
        known = inspect.signature(function).parameters
        missing = [parameter for parameter in _PARAMETERS if parameter not in known]
        return f"{name}.{_FUNCTION} does not take {', '.join(missing)}" if missing else function
    return "is not installed"


def flash_problem(
    *, capability: tuple[int, int] | None, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> str | None:
    """Return why FlashAttention 3 cannot serve such layers, or None. ``capability`` is None for GPUs of AMD."""
    if capability is None or capability[0] != _CAPABILITY[0]:
        return "is for compute capability 9.0"
    if dtype not in _DTYPES:
        return "computes in 16 bits"
    if cache_dtype != dtype:
        return "reads float8 caches with float8 queries only"
    if head_dim > _LARGEST_HEAD_DIM or head_dim % _HEAD_DIM_UNIT:
        return f"has head dims up to {_LARGEST_HEAD_DIM} that are multiples of {_HEAD_DIM_UNIT}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttention:
    """The attention of steps with a prompt and at least ``from_tokens`` tokens."""

    function: Callable[..., Any]
    from_tokens: int

    def attends(self, plan: DevicePlan, *, plain: bool) -> bool:
        """Return whether it computes this step of a layer.

        Steps that only decode or verify drafts, and layers that are not ``plain``, which have soft caps or sinks, stay
        with our kernels: the library knows no sinks, and may be built without soft caps.
        """
        return plain and plan.num_tokens >= self.from_tokens and plan.max_query_len > MAX_SHORT_QUERIES

    def __call__(self, q: Tensor, cache: KVCache, plan: DevicePlan, scale: float, out: Tensor | None) -> Tensor:
        """Return the attention of ``q`` [T, HQ, D], 0 for rows of padding; see ``paged_attention``."""
        # Ours counts the query itself, the library the tokens on its left.
        window = (-1, -1) if plan.window is None else (plan.window - 1, 0)
        result = self.function(
            q=q,
            k_cache=cache.keys.transpose(1, 2),  # [N, S, HK, D], a view
            v_cache=cache.values.transpose(1, 2),
            cache_seqlens=plan.context_lens,  # [B] int32
            page_table=plan.block_tables,  # [B, M] int32
            cu_seqlens_q=plan.query_starts,  # [B + 1] int32
            max_seqlen_q=plan.max_query_len,
            softmax_scale=scale,
            causal=True,
            window_size=window,
        )
        attended: Tensor = result[0] if isinstance(result, tuple) else result
        # The library leaves rows after the last sequence as they were allocated.
        rows = torch.arange(plan.num_tokens, device=q.device)
        is_query = (rows < plan.query_starts[-1])[:, None, None]
        return torch.where(is_query, attended, attended.new_zeros(()), out=out)
