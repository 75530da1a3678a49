"""swap_blocks in Triton: a few programs copy all blocks of all layers, keys and values, piece by piece.

If one side is host memory, the bus is the bottleneck: a few multiprocessors keep it busy, and the others are left to
the step that runs on another stream meanwhile. Pinned host memory is read and written in place, by its addresses in the
device's own address space. One launch is therefore enough, while copies by the driver would need two calls per block
and layer.

Legend: L layers, C blocks to copy, B buffers: keys and values of each layer.
"""

import functools
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from quire_kernels.checks import refuse
from quire_kernels.kv_cache import KVCache
from quire_kernels.triton_runtime.config import config_for
from quire_kernels.triton_runtime.debug import kernel
from quire_kernels.triton_runtime.device import require_device, target_of
from quire_kernels.triton_runtime.launch import Launch, launches
from quire_kernels.triton_runtime.target import Target

_WORD_BYTES = 8
_ALIGNMENT = 16


# Only the debug build reads the numbers of blocks.
@kernel(varying=["copies", "buffers", "fewest_source_blocks", "fewest_target_blocks"])
def _swap_blocks_kernel(
    addresses,  # [B, 2] int64: source and target of each buffer
    source_blocks,  # [C]
    target_blocks,  # [C]
    copies,
    buffers,
    block_words,  # of 8 bytes, a multiple of 2
    fewest_source_blocks,
    fewest_target_blocks,
    BLOCK: tl.constexpr,
):
    pieces = tl.cdiv(block_words, BLOCK)
    within = tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), copies * buffers * pieces, tl.num_programs(0)):
        copy, buffer = item // pieces // buffers, item // pieces % buffers
        word = item % pieces * BLOCK + within
        source_block, target_block = tl.load(source_blocks + copy), tl.load(target_blocks + copy)
        tl.device_assert(
            (source_block >= 0) & (source_block < fewest_source_blocks), "swap_blocks: source_blocks leave a cache"
        )
        tl.device_assert(
            (target_block >= 0) & (target_block < fewest_target_blocks), "swap_blocks: target_blocks leave a cache"
        )
        source = tl.load(addresses + buffer * 2) + source_block * block_words * 8
        target = tl.load(addresses + buffer * 2 + 1) + target_block * block_words * 8
        # Blocks have a multiple of 16 bytes and are aligned to 16, which the compiler cannot derive from a table.
        source_words = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
        target_words = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
        moved = tl.load(source_words + word, mask=word < block_words)
        tl.store(target_words + word, moved, mask=word < block_words)


def swap_blocks(
    sources: Sequence[KVCache], targets: Sequence[KVCache], source_blocks: Tensor, target_blocks: Tensor
) -> None:
    device = source_blocks.device
    require_device("swap_blocks", device)
    launch, programs = _launch(_key(sources[0], targets[0]), target_of(device))
    addresses = tuple(
        address
        for source, target in zip(sources, targets, strict=True)
        for address in (
            source.keys.data_ptr(),
            target.keys.data_ptr(),
            source.values.data_ptr(),
            target.values.data_ptr(),
        )
    )
    keys = sources[0].keys
    launch(
        (programs,),
        _on_device(addresses, device),
        source_blocks,
        target_blocks,
        source_blocks.numel(),
        2 * len(sources),
        keys[0].numel() * keys.itemsize // _WORD_BYTES,
        min(cache.num_blocks for cache in sources),
        min(cache.num_blocks for cache in targets),
    )


@launches
def _launch(key: str, target: Target) -> tuple[Launch, int]:
    """Return the launch and its number of programs."""
    options = config_for("swap_blocks.swap", target, key).options
    programs = options.pop("PROGRAMS")
    return Launch(_swap_blocks_kernel, **options), programs


@functools.lru_cache(maxsize=256)
def _on_device(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the table [B, 2]; caches do not move, so it is created once per set of layers and direction."""
    if any(address % _ALIGNMENT for address in addresses):
        refuse("swap_blocks", "sources, targets", f"hold tensors that do not begin at a multiple of {_ALIGNMENT} bytes")
    return torch.tensor(addresses, device=device)


def _key(source: KVCache, target: KVCache) -> str:
    return "device" if source.keys.device == target.keys.device else "host"
