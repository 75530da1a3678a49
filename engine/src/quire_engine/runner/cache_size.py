"""How many blocks of KV cache and of swap space fit: arithmetic on numbers, which touches no memory.

``size_cache`` is for a CPU, whose one memory is for everything; what a GPU leaves, ``device_budget`` works out.
``startup`` measures what is available and asks; ``kv_cache`` allocates what comes out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire_engine.config import CacheOptions
from quire_engine.core.kv_layout import GroupDemand, most_window_blocks, share_blocks
from quire_engine.runner.memory import AvailableMemory

# Of the memory that is free once the weights are loaded, where the machine is shared with others.
_SHARE_OF_A_MACHINE = 0.25
# What is kept back for activations where the memory is this process's own.
_ACTIVATION_BYTES = 512 << 20
# What is taken when the system does not say how much memory there is.
_WITHOUT_KNOWING_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers with the same window, and what a block of all of them takes."""

    block_bytes: int
    window: int | None = None
    """Tokens; None is full attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDemand:
    """What a model wants of its cache."""

    groups: tuple[CacheGroup, ...]
    block_size: int
    model_limit: int
    """Tokens: the model's own longest sequence, or the option's."""
    must_hold_limit: bool
    """Whether a person asked for that length, so that a smaller cache is an error rather than a smaller limit."""
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def blocks_per_sequence(self) -> int:
        """In a group with full attention."""
        return -(-self.model_limit // self.block_size)

    def fewest_blocks(self, group: CacheGroup) -> int:
        """With which one sequence runs at all: a window, whatever the length, and a block's tokens in each step."""
        return 1 if group.window is None else -(-group.window // self.block_size) + 2

    def blocks_for_limit(self, group: CacheGroup) -> int:
        """With which one sequence runs to the model's limit."""
        return self.blocks_per_sequence if group.window is None else self.fewest_blocks(group)

    def most_blocks(self, group: CacheGroup) -> int:
        """More than every sequence at full length could never be used."""
        most = self.max_num_seqs * self.blocks_per_sequence
        if group.window is not None:
            windows = most_window_blocks(
                window=group.window,
                block_size=self.block_size,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
            )
            most = min(most, windows)
        return max(most, self.fewest_blocks(group))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    num_blocks: tuple[int, ...]
    """One entry per group, as in the next."""
    num_swap_blocks: tuple[int, ...]
    max_model_len: int
    kv_cache_bytes: int
    sequences: int
    """Of that length at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTooSmall:
    message: str


def _by_its_own_flag(needed: int) -> list[str]:
    return [f"--kv-cache-memory-bytes {needed}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes for the KV cache."""

    size: int
    source: str
    """Where the number comes from, for people."""
    is_given: bool
    """Whether a person named it: then it is used up."""
    remedies: Callable[[int], list[str]] = _by_its_own_flag
    """What makes so many bytes of it, as flags."""


def size_cache(
    demand: CacheDemand, options: CacheOptions, available: AvailableMemory | None
) -> CacheSize | CacheTooSmall:
    """The number of blocks, and the longest sequence that they and the model allow."""
    problem = _over_commitment(options, available)
    if problem is not None:
        return problem
    return divide_budget(demand, _budget(options, available), options.swap_space_bytes)


def divide_budget(demand: CacheDemand, budget: Budget, swap_space_bytes: int) -> CacheSize | CacheTooSmall:
    """Blocks for every group, and swap blocks in the same proportion."""
    num_blocks = share_blocks(budget.size, _shares(demand, is_given=budget.is_given))
    fewest = demand.blocks_for_limit if demand.must_hold_limit else demand.fewest_blocks
    if any(blocks < fewest(group) for group, blocks in zip(demand.groups, num_blocks, strict=True)):
        return CacheTooSmall(message=_too_small(demand, budget, num_blocks))
    kv_cache_bytes = _bytes_of(demand, num_blocks)
    num_swap_blocks = tuple(blocks * swap_space_bytes // kv_cache_bytes for blocks in num_blocks)
    if swap_space_bytes and not all(num_swap_blocks):
        fewest_bytes = max(-(-kv_cache_bytes // blocks) for blocks in num_blocks)
        return CacheTooSmall(
            message=f"--swap-space-bytes {swap_space_bytes} is not one block of each layer:"
            f" {fewest_bytes} is the least, 0 is none"
        )
    longest = _longest(demand, num_blocks)
    return CacheSize(
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        max_model_len=longest,
        kv_cache_bytes=kv_cache_bytes,
        sequences=_sequences(replace(demand, model_limit=longest), num_blocks),
    )


def _shares(demand: CacheDemand, *, is_given: bool) -> list[GroupDemand]:
    """A size that a person gave is used up, by the groups that can: those with full attention, where there are any."""
    has_full = any(group.window is None for group in demand.groups)
    return [
        GroupDemand(
            block_bytes=group.block_bytes,
            most_blocks=None if is_given and has_full is (group.window is None) else demand.most_blocks(group),
        )
        for group in demand.groups
    ]


def _over_commitment(options: CacheOptions, available: AvailableMemory | None) -> CacheTooSmall | None:
    """Swap space is filled when memory is short already: what was promised must be there."""
    if available is None or not options.swap_space_bytes:
        return None
    cache, swap = options.kv_cache_memory_bytes or 0, options.swap_space_bytes
    if cache + swap <= available.size:
        return None
    asked, room = f"--swap-space-bytes {swap}", available.size - cache
    if cache:
        asked = f"--kv-cache-memory-bytes {cache} and {asked} come to {cache + swap:,} bytes; they"
    else:  # half of what the KV cache would have had
        room = _share(replace(options, swap_space_bytes=0), available) // 2
    advice = f"--swap-space-bytes of at most {room} would fit" if room > 0 else "a smaller KV cache would fit"
    return CacheTooSmall(message=f"{asked} must fit into the {available.size:,} bytes that are available: {advice}")


def _budget(options: CacheOptions, available: AvailableMemory | None) -> Budget:
    if options.kv_cache_memory_bytes is not None:
        return Budget(size=options.kv_cache_memory_bytes, source="--kv-cache-memory-bytes", is_given=True)
    source = "what was free to take"
    if options.swap_space_bytes:
        source += f" beside --swap-space-bytes {options.swap_space_bytes}"
    return Budget(size=_share(options, available), source=source, is_given=False)


def _share(options: CacheOptions, available: AvailableMemory | None) -> int:
    if available is None:
        return _WITHOUT_KNOWING_BYTES
    if available.is_own:
        own = int(available.size * options.gpu_memory_utilization)
        return max(0, own - options.swap_space_bytes - _ACTIVATION_BYTES)
    return int((available.size - options.swap_space_bytes) * _SHARE_OF_A_MACHINE)


def _bytes_of(demand: CacheDemand, num_blocks: tuple[int, ...]) -> int:
    return sum(blocks * group.block_bytes for blocks, group in zip(num_blocks, demand.groups, strict=True))


def _longest(demand: CacheDemand, num_blocks: tuple[int, ...]) -> int:
    """Windows hold a sequence of any length."""
    full = [blocks for blocks, group in zip(num_blocks, demand.groups, strict=True) if group.window is None]
    return min([demand.model_limit, *(blocks * demand.block_size for blocks in full)])


def _sequences(demand: CacheDemand, num_blocks: tuple[int, ...]) -> int:
    held = [blocks // demand.blocks_for_limit(group) for blocks, group in zip(num_blocks, demand.groups, strict=True)]
    return min(demand.max_num_seqs, *held)


def _too_small(demand: CacheDemand, budget: Budget, num_blocks: tuple[int, ...]) -> str:
    advice = budget.remedies(_bytes_for_limit(demand))
    if all(blocks >= demand.fewest_blocks(group) for blocks, group in zip(num_blocks, demand.groups, strict=True)):
        advice.append(f"--max-model-len {_longest(demand, num_blocks)}")
    return (
        f"a KV cache of {budget.size:,} bytes ({budget.source}) is too small for one sequence of"
        f" {demand.model_limit:,} tokens: use {', or '.join(advice)}"
    )


def _bytes_for_limit(demand: CacheDemand) -> int:
    """Of which ``share_blocks`` makes enough blocks for one sequence at the model's limit."""
    each = max(map(demand.blocks_for_limit, demand.groups))
    return sum(
        share.block_bytes * (each if share.most_blocks is None else min(each, share.most_blocks))
        for share in _shares(demand, is_given=True)
    )
