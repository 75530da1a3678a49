"""How many blocks of KV cache fit, and their allocation: the numbers here are pure, ``allocate`` touches memory.

The core sees only the layout; where a block's bytes lie is the attention kernel's choice.
"""

from dataclasses import dataclass

import torch

from quire_engine.config import CacheOptions
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout, kv_bytes_per_token
from quire_engine.model.config import ModelConfig
from quire_engine.runner.memory import AvailableMemory
from quire_kernels.kv_cache import VECTOR, KVCache, allocate_kv_cache

# Of the memory that is free once the weights are loaded, where the machine is shared with others.
_SHARE_OF_A_MACHINE = 0.25
# What is kept back for activations where the memory is this process's own.
_ACTIVATION_BYTES = 512 << 20
# What is taken when the system does not say how much memory there is.
_WITHOUT_KNOWING_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDemand:
    """What a model wants of its cache."""

    block_bytes: int
    block_size: int
    model_limit: int
    """Tokens: the model's own longest sequence, or the option's."""
    must_hold_limit: bool
    """Whether a person asked for that length, so that a smaller cache is an error rather than a smaller limit."""
    max_num_seqs: int
    window: int | None
    """Tokens: the largest sliding window of any layer; None where all attention is full."""

    @property
    def fewest_blocks(self) -> int:
        """With which one sequence runs at all, whatever its length: a window, a block's tokens in each step."""
        return 1 if self.window is None else -(-self.window // self.block_size) + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    num_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTooSmall:
    message: str


def option_problems(options: CacheOptions) -> list[str]:
    if options.block_size % VECTOR:
        return [f"--block-size {options.block_size}: a multiple of {VECTOR} is needed on a CPU"]
    return []


def block_bytes(config: ModelConfig, dtype: torch.dtype, block_size: int) -> int:
    # Values are held in whole vectors.
    value_dim = -(-config.head_dim // VECTOR) * VECTOR
    pair = kv_bytes_per_token(
        layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=1, dtype_bytes=dtype.itemsize
    )
    return block_size * pair // 2 * (config.head_dim + value_dim)


def size_cache(
    demand: CacheDemand, options: CacheOptions, available: AvailableMemory | None
) -> CacheSize | CacheTooSmall:
    """The number of blocks, and the longest sequence that they and the model allow."""
    per_sequence = -(-demand.model_limit // demand.block_size)
    if options.kv_cache_memory_bytes is not None:
        budget, source = options.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
        num_blocks = budget // demand.block_bytes
    else:
        budget, source = _share(options, available), "what was free to take"
        # More than every sequence at full length could never be used.
        num_blocks = min(budget // demand.block_bytes, max(demand.fewest_blocks, demand.max_num_seqs * per_sequence))
    fewest = max(demand.fewest_blocks, per_sequence if demand.must_hold_limit else 1)
    if num_blocks < fewest:
        return CacheTooSmall(message=_too_small(demand, budget, source, num_blocks, max(fewest, per_sequence)))
    return CacheSize(num_blocks=num_blocks, max_model_len=min(demand.model_limit, num_blocks * demand.block_size))


def _share(options: CacheOptions, available: AvailableMemory | None) -> int:
    if available is None:
        return _WITHOUT_KNOWING_BYTES
    if available.is_own:
        return max(0, int(available.size * options.gpu_memory_utilization) - _ACTIVATION_BYTES)
    return int(available.size * _SHARE_OF_A_MACHINE)


def _too_small(demand: CacheDemand, budget: int, source: str, num_blocks: int, wanted: int) -> str:
    needed = wanted * demand.block_bytes
    message = (
        f"a KV cache of {budget:,} bytes ({source}) is too small for one sequence of {demand.model_limit:,} tokens:"
        f" use --kv-cache-memory-bytes {needed}"
    )
    if num_blocks >= demand.fewest_blocks:
        message += f", or --max-model-len {num_blocks * demand.block_size}"
    return message


def make_layout(config: ModelConfig, block_size: int, num_blocks: int) -> KVCacheLayout:
    """A group for each window that occurs, and one for full attention; as many blocks in each."""
    groups = tuple(
        KVCacheGroup(
            layers=tuple(layer for layer, own in enumerate(config.windows) if own == window),
            num_blocks=num_blocks,
            window=window,
        )
        for window in config.kv_groups
    )
    return KVCacheLayout(block_size=block_size, groups=groups)


def allocate(layout: KVCacheLayout, config: ModelConfig, dtype: torch.dtype) -> tuple[KVCache, ...]:
    """A cache per layer, of its group's number of blocks."""
    blocks = {layer: group.num_blocks for group in layout.groups for layer in group.layers}
    return tuple(
        allocate_kv_cache(
            num_blocks=blocks[layer],
            block_size=layout.block_size,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        for layer in range(config.num_layers)
    )
