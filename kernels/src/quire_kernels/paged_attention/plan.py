"""The facts about a batch that the Triton kernels of ``paged_attention`` read, and the memory for partial results.

All values that change from step to step are in device tensors, so that a captured CUDA graph sees them; host numbers
only bound the launches. A plan serves all layers of a step that have its window. Its workspace serves every layer and
step of a stream, one after another.

Legend: T query tokens, B sequences, HQ query heads, D head dim, S block size, M blocks per sequence.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire_kernels.checks import refuse
from quire_kernels.paged_attention.schedule import ITEM_FIELDS, JOIN_FIELDS, LISTS_AT, MAX_SHORT_QUERIES, RULES_AT, Rule

_LARGEST_HEAD_DIM = 256
_LARGEST_GROUP = 128
_OWN_RESULTS = 256
"""The results of one head that the programs of a multiprocessor keep for themselves, at most."""
# The workspace of a plan that gets none.
_UNSHARED_FLOATS = 1 << 23
_WORKSPACE_BYTES = 64 << 20
_FEWEST_PARTIALS, _MOST_PARTIALS = 512, 8192
_FIXED_SPLIT = 512
_LONG_FIXED_SPLIT = 1024
_LONG_CONTEXT = 65_536


class Workspace:
    """The memory that all layers and steps of a stream share: partial results, and a schedule for each kind of layer.

    ``buffer`` is float32 and flat, because layers may differ in heads and head dim. If ``split_tokens`` is set, every
    split has this size, and a token's result depends neither on the batch nor on how its sequence was divided into
    steps. ``None`` gives short contexts smaller splits.
    """

    def __init__(
        self,
        *,
        buffer: Tensor,
        partials: int,
        split_tokens: int | None,
        max_tokens: int,
    ) -> None:
        self.buffer = buffer
        self.partials = partials
        self.split_tokens = split_tokens
        self.max_tokens = max_tokens
        self._schedules: dict[ScheduleKey, Tensor] = {}

    def num_results(self, head_dim: int) -> int:
        """Return the number of results of one head that the buffer contains."""
        return self.buffer.numel() // (head_dim + 2)

    def room(self, heads: int, head_dim: int, own_results: int) -> int:
        """Return the number of partial results for which there is room, in addition to ``own_results``.

        Raise ArgumentError if the programs alone need more.
        """
        free = self.num_results(head_dim) - own_results
        if free < 0:
            refuse(
                "paged_attention", "plan", f"has a workspace of {own_results + free} results; {own_results} are needed"
            )
        return min(self.partials, free // heads)

    def schedule_for(self, key: "ScheduleKey") -> Tensor:
        """Return the memory of a schedule: the same in all steps, because captured graphs contain its address."""
        found = self._schedules.get(key)
        if found is None:
            found = self._schedules[key] = self._allocate_schedule(key)
        return found

    def capacity(self, key: "ScheduleKey") -> int:
        """Return the most items of a list: each has a token, or a partial result, of its own."""
        return self.max_tokens + key.room

    def _allocate_schedule(self, key: "ScheduleKey") -> Tensor:
        fields = LISTS_AT + 3 * self.capacity(key) * ITEM_FIELDS + self.max_tokens * JOIN_FIELDS
        schedule = torch.zeros(fields, dtype=torch.int32, device=self.buffer.device)
        rules = [[rule.tile, rule.queries, rule.fill, rule.least, rule.most, 0, 0, 0] for rule in key.rules]
        schedule[RULES_AT:LISTS_AT] = torch.tensor(rules, dtype=torch.int32).view(-1)
        return schedule


@dataclass(frozen=True, slots=True)
class ScheduleKey:
    """The properties of a layer on which a step's schedule depends; layers that have the same share it."""

    window: int | None
    room: int
    rules: tuple[Rule, Rule, Rule]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    block_tables: Tensor  # [B, M] int32
    query_starts: Tensor  # [B + 1] int32: the queries of sequence b are query_starts[b] .. query_starts[b + 1] - 1
    context_lens: Tensor  # [B] int32, 0 for a padded row, which has no queries
    num_tokens: int  # rows of q, padding included
    max_query_len: int  # a launch without work is skipped
    window: int | None
    workspace: Workspace
    min_query_len: int = 1  # without padding
    max_short_len: int = MAX_SHORT_QUERIES  # longest up to MAX_SHORT_QUERIES
    scheduled: set[ScheduleKey] = field(default_factory=set)
    """The schedules that were computed from the current lengths."""

    def restart(self) -> None:
        """Compute schedules again: call this first in each step whose lengths are new, also when it is captured."""
        self.scheduled.clear()


def unsupported_shape(head_dim: int, group: int) -> str | None:
    """Return why the kernels have no tiles for such heads, or None. group: query heads per KV head."""
    if not 1 <= head_dim <= _LARGEST_HEAD_DIM:
        return f"head dim {head_dim}: up to {_LARGEST_HEAD_DIM} is needed"
    if not 1 <= group <= _LARGEST_GROUP:
        return f"{group} query heads for each KV head: up to {_LARGEST_GROUP} are needed"
    return None


def fixed_split_tokens(max_context: int) -> int:
    """Return the tokens per split for results that do not depend on the batch, for contexts of up to ``max_context``.

    Small splits let few sequences fill the device; large ones limit the partial results that a token has to join.
    """
    return _FIXED_SPLIT if max_context <= _LONG_CONTEXT else _LONG_FIXED_SPLIT


def workspace_partials(heads: int, head_dim: int) -> int:
    """Return the number of partial results for which a workspace has room: what 64 MiB contain, within limits.

    For 32 heads of 128 these are 4,032: as many as splits of 256 tokens in 1 million tokens of context.
    """
    return max(_FEWEST_PARTIALS, min(_MOST_PARTIALS, _WORKSPACE_BYTES // (4 * heads * (head_dim + 2))))


def allocate_workspace(
    *,
    max_tokens: int,
    heads: int,
    head_dim: int,
    device: torch.device,
    partials: int | None = None,
    split_tokens: int | None = None,
) -> Workspace:
    """Return a workspace for all layers and steps. ``heads`` and ``head_dim`` are those of the widest layer.

    max_tokens    the query tokens of the largest step, padding included
    partials      the partial results of a token (all heads) to have room for; None: ``workspace_partials``
    split_tokens  fixes the size of splits (``fixed_split_tokens``)
    """
    op = "allocate_workspace"
    partials = workspace_partials(heads, head_dim) if partials is None else partials
    for name, value in (("max_tokens", max_tokens), ("partials", partials)):
        if value < 1:
            refuse(op, name, f"is {value}; at least 1 is needed")
    if split_tokens is not None and (split_tokens < 1 or split_tokens % 128):
        refuse(op, "split_tokens", f"is {split_tokens}; a positive multiple of 128 is needed")
    floats = (partials * heads + _OWN_RESULTS * _multiprocessors(device)) * (head_dim + 2)
    return Workspace(
        buffer=torch.empty(floats, dtype=torch.float32, device=device),
        partials=partials,
        split_tokens=split_tokens,
        max_tokens=max_tokens,
    )


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


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
    num_tokens = int(starts[-1])
    device = block_tables.device
    if workspace is None:
        buffer = torch.empty(_UNSHARED_FLOATS, dtype=torch.float32, device=device)
        workspace = Workspace(buffer=buffer, partials=_MOST_PARTIALS, split_tokens=None, max_tokens=num_tokens)
    if num_tokens > workspace.max_tokens:
        reason = f"is for steps of {workspace.max_tokens} tokens; the batch has {num_tokens}"
        refuse("plan_attention", "workspace", reason)
    return DevicePlan(
        block_tables=block_tables,
        query_starts=torch.from_numpy(starts).to(device),
        context_lens=torch.from_numpy(context.astype(np.int32)).to(device),
        num_tokens=num_tokens,
        max_query_len=int(query.max()),
        window=window,
        workspace=workspace,
        min_query_len=int(query.min()),
        max_short_len=longest_short(query),
    )


def longest_short(query_lens: np.ndarray) -> int:
    """Return ``DevicePlan.max_short_len`` of a batch."""
    return int(query_lens[query_lens <= MAX_SHORT_QUERIES].max(initial=1))
