"""The facts about a batch that the Triton kernels of ``paged_attention`` read, and the memory for partial results.

All values that change from step to step are in device tensors, so that a captured CUDA graph sees them; host numbers
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
"""The maximum number of queries of a sequence whose context is split. It depends on the sequence, not on the batch."""

MAX_SEGMENTS = 32
"""The maximum number of splits of one sequence's context, unless their size is fixed."""

_LARGEST_HEAD_DIM = 256
_LARGEST_GROUP = 128
# With 16 rows, the partial results of a split of this many tokens are 3 % of the data that it reads.
_MIN_FIXED_SPLIT = 512
_FIXED_SEGMENTS = 16
# The workspace of a plan that gets none: enough for 32 sequences of 32 heads of 128 in 16 splits.
_OWN_WORKSPACE_FLOATS = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Memory for the partial results of sequences with few queries, whose context several programs share."""

    buffer: Tensor  # float32, flat: layers may differ in heads and head dim
    split_tokens: int | None
    """The tokens per split. If this is fixed, a token's result depends neither on the size of the batch nor on how its
    sequence was divided into steps; ``None`` gives small batches smaller splits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """An ``AttentionPlan`` on a device."""

    block_tables: Tensor  # [B, M] int32
    query_starts: Tensor  # [B + 1] int32: the queries of sequence b are query_starts[b] .. query_starts[b + 1] - 1
    context_lens: Tensor  # [B] int32, 0 for a padded row, which has no queries
    num_tokens: int  # rows of q, padding included
    max_query_len: int  # bounds the launches
    window: int | None
    workspace: Workspace
    min_query_len: int = 1  # without padding; a launch without work is skipped
    max_short_len: int = MAX_SHORT_QUERIES  # longest up to MAX_SHORT_QUERIES; shorter: smaller tiles


def unsupported_shape(head_dim: int, group: int) -> str | None:
    """Return why the kernels have no tiles for such heads, or None. group: query heads per KV head."""
    if not 1 <= head_dim <= _LARGEST_HEAD_DIM:
        return f"head dim {head_dim}: up to {_LARGEST_HEAD_DIM} is needed"
    if not 1 <= group <= _LARGEST_GROUP:
        return f"{group} query heads for each KV head: up to {_LARGEST_GROUP} are needed"
    return None


def fixed_split_tokens(max_context: int) -> int:
    """Return the tokens per split for results that do not depend on the batch: at most 16 splits of ``max_context``."""
    share = -(-max_context // _FIXED_SEGMENTS)
    return -(-share // _MIN_FIXED_SPLIT) * _MIN_FIXED_SPLIT


def workspace_segments(max_decode_tokens: int, *, max_context: int, split_tokens: int | None = None) -> int:
    """Return the number of splits per query token for which the workspace has room.

    max_decode_tokens  query tokens of the largest batch of decoding sequences, including drafts to verify
    max_context        tokens of the longest sequence
    """
    if split_tokens is not None:
        return -(-max_context // split_tokens)
    # Large batches fill the device by their size. There, splits only keep long sequences from finishing last.
    return min(MAX_SEGMENTS, max(8, 2048 // max_decode_tokens))


def workspace_bytes(*, max_decode_tokens: int, heads: int, head_dim: int, segments: int) -> int:
    """Return the size in bytes of the workspace that ``allocate_workspace`` creates."""
    return 4 * workspace_floats(max_decode_tokens * segments, heads, head_dim)


def workspace_floats(partials: int, heads: int, head_dim: int) -> int:
    """Return the number of floats in ``partials`` partial results.

    Each has the weighted values, the largest score and the sum of weights of each head.
    """
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
    """Return a workspace for all layers and steps. ``heads`` and ``head_dim`` are those of the widest layer.

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
    """Return the plan of one eager step, from checked lengths: int64 [B] each, all positive."""
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
    """Return ``DevicePlan.max_short_len`` of a batch."""
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
    """Return a plan over tensors that the caller rewrites between steps, as for the replay of a captured graph.

    Until the next launch they must be as ``DevicePlan`` describes: a padded row has context 0 and no queries. Rows of q
    from query_starts[B] on are padding, and their results are 0.

    max_query_len  the maximum number of queries of a sequence in any replay
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
