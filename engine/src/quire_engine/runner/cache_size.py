"""The number of blocks of KV cache and swap space that fit: arithmetic only, without allocation.

``size_cache`` is for a CPU with its single memory; ``device_budget`` computes the budget of a GPU. ``startup`` measures
the available memory; ``kv_cache`` allocates the result.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire_common.kv_size import CacheGroup, CacheLimits, demands, sequence_bytes, share_blocks
from quire_engine.config import CacheOptions
from quire_engine.runner.memory import AvailableMemory

# The share of free memory after loading the weights, if the machine is shared with others.
_SHARE_OF_A_MACHINE = 0.25
# The reserve for activations if the memory belongs to this process.
_ACTIVATION_BYTES = 512 << 20
# The size if the system does not report its memory.
_WITHOUT_KNOWING_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDemand(CacheLimits):
    """The required content of a model's cache; ``sequence_tokens`` is the model's longest sequence, or the option's."""

    groups: tuple[CacheGroup, ...]
    must_hold_limit: bool
    """True if a user set that length, so that a smaller cache is an error instead of a smaller limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    num_blocks: tuple[int, ...]
    """One entry per group, as in the next field."""
    num_swap_blocks: tuple[int, ...]
    max_model_len: int
    kv_cache_bytes: int
    sequences: int
    """The number of sequences of that length that fit at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTooSmall:
    message: str


def _by_its_own_flag(needed: int) -> list[str]:
    return [f"--kv-cache-memory-bytes {needed}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The bytes for the KV cache."""

    size: int
    source: str
    """The origin of the number, for messages."""
    is_given: bool
    """True if a user named the size: then all of it is used."""
    remedies: Callable[[int], list[str]] = _by_its_own_flag
    """A function that returns the flags for a given number of bytes."""


def size_cache(
    demand: CacheDemand, options: CacheOptions, available: AvailableMemory | None
) -> CacheSize | CacheTooSmall:
    """Return the number of blocks, and the longest sequence that they and the model allow."""
    problem = _over_commitment(options, available)
    if problem is not None:
        return problem
    return divide_budget(demand, _budget(options, available), options.swap_space_bytes)


def divide_budget(demand: CacheDemand, budget: Budget, swap_space_bytes: int) -> CacheSize | CacheTooSmall:
    """Return blocks for every group, and swap blocks in the same proportion."""
    # A size that a user set is fully used.
    num_blocks = share_blocks(budget.size, demands(demand.groups, demand, use_all=budget.is_given))
    fewest = demand.longest_blocks if demand.must_hold_limit else demand.fewest_blocks
    if any(blocks < fewest(group) for group, blocks in zip(demand.groups, num_blocks, strict=True)):
        return CacheTooSmall(message=_too_small(demand, budget, num_blocks))
    kv_cache_bytes = _bytes_of(demand, num_blocks)
    num_swap_blocks = tuple(blocks * swap_space_bytes // kv_cache_bytes for blocks in num_blocks)
    if swap_space_bytes and not all(num_swap_blocks):
        fewest_bytes = max(-(-kv_cache_bytes // blocks) for blocks in num_blocks)
        return CacheTooSmall(
            message=f"--swap-space-bytes {swap_space_bytes} is less than one block of each layer:"
            f" {fewest_bytes} is the minimum, 0 disables it"
        )
    longest = _longest(demand, num_blocks)
    return CacheSize(
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        max_model_len=longest,
        kv_cache_bytes=kv_cache_bytes,
        sequences=replace(demand, sequence_tokens=longest).sequences(num_blocks, demand.groups),
    )


def _over_commitment(options: CacheOptions, available: AvailableMemory | None) -> CacheTooSmall | None:
    """Return an error if the swap space exceeds the memory: it is used when memory is already short."""
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
    source = "the available memory"
    if options.swap_space_bytes:
        source += f" without --swap-space-bytes {options.swap_space_bytes}"
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
    """Return the length of the longest sequence; windows fit a sequence of any length."""
    full = [blocks for blocks, group in zip(num_blocks, demand.groups, strict=True) if group.window is None]
    return min([demand.sequence_tokens, *(blocks * demand.block_size for blocks in full)])


def _too_small(demand: CacheDemand, budget: Budget, num_blocks: tuple[int, ...]) -> str:
    advice = budget.remedies(sequence_bytes(demand.groups, demand))
    if all(blocks >= demand.fewest_blocks(group) for blocks, group in zip(num_blocks, demand.groups, strict=True)):
        advice.append(f"--max-model-len {_longest(demand, num_blocks)}")
    return (
        f"a KV cache of {budget.size:,} bytes ({budget.source}) is too small for one sequence of"
        f" {demand.sequence_tokens:,} tokens: use {', or '.join(advice)}"
    )
