"""What the Triton kernels of ``paged_attention`` read of a batch, and the memory they leave partial results in.

Everything that changes from step to step lies in device tensors, so that a captured CUDA graph sees it; host numbers
only bound the launches. A plan serves all layers of a step that have its window. Its workspace serves every layer and
step of a stream, one after another.

Legend: T query tokens, B sequences, HQ query heads, D head dim, S block size, M blocks per sequence.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_kernels.checks import check_dense, refuse

MAX_SHORT_QUERIES = 16
"""Sequences of up to so many queries have their context split; of them, not of the batch, it depends who does."""

MAX_SEGMENTS = 32
"""Splits of one sequence's context at most, where their size is not fixed."""

_LARGEST_HEAD_DIM = 256
_LARGEST_GROUP = 128
# With 16 rows a split, its partial results are 3 % of what it reads when it has this many tokens.
_MIN_FIXED_SPLIT = 512
_FIXED_SEGMENTS = 16
# Of a plan that is given no workspace: enough for 32 sequences of 32 heads of 128 in 16 splits.
_OWN_WORKSPACE_FLOATS = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Partial results of sequences with few queries, whose context several programs share out among them."""

    buffer: Tensor  # float32, flat: layers may differ in heads and head dim
    split_tokens: int | None
    """Tokens of a split. Fixed, a token's result depends neither on the size of the batch nor on how its sequence was
    cut into steps; ``None`` lets small batches have smaller splits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """An ``AttentionPlan`` on a device."""

    block_tables: Tensor  # [B, M] int32
    query_starts: Tensor  # [B + 1] int32: sequence b's queries are query_starts[b] .. query_starts[b + 1] - 1
    context_lens: Tensor  # [B] int32, 0 for a padded row, which has no queries
    num_tokens: int  # rows of q, padding included
    max_query_len: int  # bounds the launches
    window: int | None
    workspace: Workspace
    min_query_len: int = 1  # of sequences that are not padding: a launch that would find nothing is left out
    max_short_len: int = MAX_SHORT_QUERIES  # the longest of up to MAX_SHORT_QUERIES; fewer, and the tiles are smaller


def unsupported_shape(head_dim: int, group: int) -> str | None:
    """Why the kernels have no tiles for such heads, if they have none. group: query heads for each KV head."""
    if not 1 <= head_dim <= _LARGEST_HEAD_DIM:
        return f"head dim {head_dim}: up to {_LARGEST_HEAD_DIM} is needed"
    if not 1 <= group <= _LARGEST_GROUP:
        return f"{group} query heads for each KV head: up to {_LARGEST_GROUP} are needed"
    return None


def fixed_split_tokens(max_context: int) -> int:
    """Tokens of a split for results that do not depend on the batch: ``max_context`` tokens make 16 splits at most."""
    share = -(-max_context // _FIXED_SEGMENTS)
    return -(-share // _MIN_FIXED_SPLIT) * _MIN_FIXED_SPLIT


def workspace_segments(max_decode_tokens: int, *, max_context: int, split_tokens: int | None = None) -> int:
    """Splits per query token to have room for.

    max_decode_tokens  query tokens of the largest batch of decoding sequences, drafts to verify included
    max_context        tokens of the longest sequence
    """
    if split_tokens is not None:
        return -(-max_context // split_tokens)
    # Large batches fill the device by their number: there splits only keep long sequences from finishing last.
    return min(MAX_SEGMENTS, max(8, 2048 // max_decode_tokens))


def workspace_bytes(*, max_decode_tokens: int, heads: int, head_dim: int, segments: int) -> int:
    """Size of the workspace that ``allocate_workspace`` makes."""
    return 4 * workspace_floats(max_decode_tokens * segments, heads, head_dim)


def workspace_floats(partials: int, heads: int, head_dim: int) -> int:
    """A partial result of a query token has for each head the weighted values, the largest score, the weights' sum."""
    return partials * heads * (head_dim + 2)


def allocate_workspace(
    *,
    max_decode_tokens: int,
    heads: int,
    head_dim: int,
    segments: int,
    device: torch.device,
    split_tokens: int | None = None,
) -> Workspace:
    """One for all layers and steps. ``heads`` and ``head_dim`` are those of the widest layer.

    split_tokens  fixes the size of splits (``fixed_split_tokens``); needs segments for the longest context
    """
    op = "allocate_workspace"
    for name, value in (("max_decode_tokens", max_decode_tokens), ("segments", segments)):
        if value < 1:
            refuse(op, name, f"is {value}; at least 1 is needed")
    if split_tokens is not None and (split_tokens < 1 or split_tokens % 128):
        refuse(op, "split_tokens", f"is {split_tokens}; a positive multiple of 128 is needed")
    floats = workspace_floats(max_decode_tokens * segments, heads, head_dim)
    return Workspace(buffer=torch.empty(floats, dtype=torch.float32, device=device), split_tokens=split_tokens)


def plan_host_lengths(
    block_tables: Tensor,
    query: np.ndarray,
    context: np.ndarray,
    window: int | None,
    workspace: Workspace | None,
    deterministic: bool,
) -> DevicePlan:
    """The plan of one eager step, from checked lengths: int64 [B] each, none of them 0."""
    if deterministic and (workspace is None or workspace.split_tokens is None):
        refuse("plan_attention", "workspace", "fixes no split_tokens, without which nothing is deterministic")
    starts = np.zeros(len(query) + 1, dtype=np.int32)
    np.cumsum(query, out=starts[1:])
    device = block_tables.device
    if workspace is None:
        buffer = torch.empty(_OWN_WORKSPACE_FLOATS, dtype=torch.float32, device=device)
        workspace = Workspace(buffer=buffer, split_tokens=None)
    return DevicePlan(
        block_tables=block_tables,
        query_starts=torch.from_numpy(starts).to(device),
        context_lens=torch.from_numpy(context.astype(np.int32)).to(device),
        num_tokens=int(starts[-1]),
        max_query_len=int(query.max()),
        window=window,
        workspace=workspace,
        min_query_len=int(query.min()),
        max_short_len=longest_short(query),
    )


def longest_short(query_lens: np.ndarray) -> int:
    """``DevicePlan.max_short_len`` of a batch."""
    return int(query_lens[query_lens <= MAX_SHORT_QUERIES].max(initial=1))


def plan_over_buffers(
    *,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    num_tokens: int,
    max_query_len: int,
    window: int | None,
    workspace: Workspace,
) -> DevicePlan:
    """A plan over tensors that the caller rewrites between steps, as a captured graph replays it.

    Until the next launch they must hold what ``DevicePlan`` says of them: a padded row has context 0 and no queries.
    Rows of q from query_starts[B] on are padding, and their results 0.

    max_query_len  no sequence brings more queries, in any replay
    """
    op = "plan_over_buffers"
    sequences = len(context_lens)
    if block_tables.dim() != 2 or len(block_tables) != sequences:
        refuse(op, "block_tables", f"has shape {tuple(block_tables.shape)}; [{sequences}, blocks] is needed")
    check_dense(op, "block_tables", block_tables, torch.int32, tuple(block_tables.shape))
    check_dense(op, "query_starts", query_starts, torch.int32, (sequences + 1,))
    check_dense(op, "context_lens", context_lens, torch.int32, (sequences,))
    for name, tensor in (
        ("query_starts", query_starts),
        ("context_lens", context_lens),
        ("workspace", workspace.buffer),
    ):
        if tensor.device != block_tables.device:
            refuse(op, name, f"is on {tensor.device}; block_tables are on {block_tables.device}")
    if not 1 <= max_query_len <= num_tokens:
        refuse(op, "max_query_len", f"is {max_query_len}; 1 to the {num_tokens} tokens is needed")
    if window is not None and window < 1:
        refuse(op, "window", f"is {window}; at least 1 token is needed")
    return DevicePlan(
        block_tables=block_tables,
        query_starts=query_starts,
        context_lens=context_lens,
        num_tokens=num_tokens,
        max_query_len=max_query_len,
        window=window,
        workspace=workspace,
    )
