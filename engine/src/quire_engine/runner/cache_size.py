"""How many blocks of KV cache and of swap space fit: arithmetic on numbers, which touches no memory.

``size_cache`` is for a CPU, whose one memory is for everything; what a GPU leaves, ``device_budget`` works out.
``startup`` measures what is available and asks; ``kv_cache`` allocates what comes out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire_common.kv_size import CacheGroup, CacheLimits, demands, sequence_bytes, share_blocks
from quire_engine.config import CacheOptions
from quire_engine.runner.memory import AvailableMemory

# Of the memory that is free once the weights are loaded, where the machine is shared with others.
_SHARE_OF_A_MACHINE = 0.25
# What is kept back for activations where the memory is this process's own.
_ACTIVATION_BYTES = 512 << 20
# What is taken when the system does not say how much memory there is.
_WITHOUT_KNOWING_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDemand(CacheLimits):
    """What a model's cache must hold; ``sequence_tokens`` is the model's own longest sequence, or the option's."""

    groups: tuple[CacheGroup, ...]
    must_hold_limit: bool
    """True if a person set that length, so that a smaller cache is an error rather than a smaller limit."""


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
    # A size that a person set is used up.
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
        sequences=_sequences(replace(demand, sequence_tokens=longest), num_blocks),
    )


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
    """Windows hold a sequence of any length."""
    full = [blocks for blocks, group in zip(num_blocks, demand.groups, strict=True) if group.window is None]
    return min([demand.sequence_tokens, *(blocks * demand.block_size for blocks in full)])


def _sequences(demand: CacheDemand, num_blocks: tuple[int, ...]) -> int:
    held = [blocks // demand.longest_blocks(group) for blocks, group in zip(num_blocks, demand.groups, strict=True)]
    return min(demand.max_sequences, *held)


def _too_small(demand: CacheDemand, budget: Budget, num_blocks: tuple[int, ...]) -> str:
    advice = budget.remedies(sequence_bytes(demand.groups, demand))
    if all(blocks >= demand.fewest_blocks(group) for blocks, group in zip(num_blocks, demand.groups, strict=True)):
        advice.append(f"--max-model-len {_longest(demand, num_blocks)}")
    return (
        f"a KV cache of {budget.size:,} bytes ({budget.source}) is too small for one sequence of"
        f" {demand.sequence_tokens:,} tokens: use {', or '.join(advice)}"
    )
