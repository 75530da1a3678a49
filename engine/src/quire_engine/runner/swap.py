"""The runner's side of preemption by swap: copies of the blocks that a batch names between KV cache and host memory.

The scheduler decides which blocks are copied; both sides have the same layout, so the bytes are copied unchanged. On a
CPU, ``Swapper`` copies them. On a GPU, ``StagedSwapper`` moves them through a staging area in device memory. Between
cache and staging area they are copied on the main stream, in step order and at the speed of device memory; between
staging area and pinned host memory on the side stream, in parallel with the model. Blocks that are swapped out may
therefore be overwritten by the same step, and those that return are fetched while the previous step still runs. Copies
that exceed the staging area are made in parts, which wait for one another.

The copy engines copy to and from host memory. A kernel would take registers from the model's kernels, which wait for it
or run fewer at once as long as it copies. Blocks lie in the staging area in the order of their host blocks, so that
adjacent host blocks are one copy per layer; only if there are too many pieces, one launch of a kernel copies them.

Legend: L layers of a KV cache group, C blocks to copy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Batch, BlockCopies
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.runner.accelerator import Accelerator, Mark
from quire_engine.runner.kv_cache import allocate_swap_space
from quire_engine.runner.staging import HostToDeviceBatch
from quire_kernels.kv_cache import KVCache, allocate_kv_cache
from quire_kernels.swap_blocks import swap_blocks

STAGING_BYTES = 128 << 20
"""The size of the staging area, unless the swap space is smaller: the largest step copies this without waiting."""
_MOST_COPIES = 512
"""The maximum number of copies by engines at once. The host issues each in a few microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Blocks that are adjacent both in the staging area and in host memory."""

    staged: int
    host: int
    count: int


def runs_of(hosts: Sequence[int]) -> list[Run]:
    """Return the runs of host blocks that are staged in this order."""
    begins = [place for place, host in enumerate(hosts) if not place or host != hosts[place - 1] + 1]
    ends = [*begins, len(hosts)][1:]
    return [Run(staged=begin, host=hosts[begin], count=end - begin) for begin, end in zip(begins, ends, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCopy:
    """A copy between host and device, with its time on the side stream."""

    began: Mark
    ended: Mark

    def wait(self) -> float:
        """Wait for the end of the copy, and return its seconds."""
        self.ended.wait()
        return self.ended.seconds_since(self.began)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """One KV cache group's layers: L caches each."""

    caches: list[KVCache]
    space: list[KVCache]
    staging: list[KVCache]
    shapes: list[list[int]]
    """The layers whose blocks have the same shape: a draft model's may have other heads than the target's."""

    @property
    def staged_blocks(self) -> int:
        return self.staging[0].num_blocks

    def swap(
        self, sources: list[KVCache], targets: list[KVCache], source_blocks: Tensor, target_blocks: Tensor
    ) -> None:
        """Copy blocks [C] of all layers, in one launch for each shape of them."""
        for layers in self.shapes:
            own, others = ([caches[layer] for layer in layers] for caches in (sources, targets))
            swap_blocks(own, others, source_blocks, target_blocks)


def _buffers(caches: Sequence[KVCache]) -> list[Tensor]:
    return [part for cache in caches for part in (cache.keys, cache.values)]


def make_swapper(
    accelerator: Accelerator, layout: KVCacheLayout, caches: tuple[KVCache, ...]
) -> "Swapper | StagedSwapper":
    """Return the copies of blocks between ``caches`` and new host memory."""
    kind = StagedSwapper if accelerator.is_device else Swapper
    return kind(accelerator, layout, caches, allocate_swap_space(layout, caches))


class Swapper:
    """The copies of blocks on a CPU.

    ``caches`` and ``space`` have an entry per layer; ``space`` is empty without a swap space.
    """

    def __init__(
        self, accelerator: Accelerator, layout: KVCacheLayout, caches: Sequence[KVCache], space: Sequence[KVCache]
    ) -> None:
        self._accelerator = accelerator
        self._layers = [layers_by_shape(group.layers, caches) for group in layout.groups]
        self._caches, self._space = caches, space

    def apply(self, batch: Batch) -> list[TimedCopy]:
        """Copy out before in: a block of the cache may be swapped out and reused in one step."""
        if not batch.swap_out and not batch.swap_in:
            return []
        began = self._accelerator.mark()
        self._copy(batch.swap_out, self._caches, self._space)
        self._copy(batch.swap_in, self._space, self._caches)
        return [TimedCopy(began=began, ended=self._accelerator.mark())]

    def _copy(self, copies: tuple[BlockCopies, ...], sources: Sequence[KVCache], targets: Sequence[KVCache]) -> None:
        for shapes, blocks in zip(self._layers, copies, strict=True) if copies else ():
            for layers in shapes if blocks.sources else ():
                own, others = ([caches[layer] for layer in layers] for caches in (sources, targets))
                swap_blocks(own, others, torch.tensor(blocks.sources), torch.tensor(blocks.targets))


class StagedSwapper:
    """The copies of blocks on a GPU, with the arguments of ``Swapper``."""

    def __init__(
        self,
        accelerator: Accelerator,
        layout: KVCacheLayout,
        caches: Sequence[KVCache],
        space: Sequence[KVCache],
        *,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._accelerator = accelerator
        self._groups = _make_groups(layout, caches, space, staging_bytes) if space else []
        largest = max((group.staged_blocks for group in self._groups), default=0)
        self._staged = torch.arange(largest, dtype=torch.int64, device=accelerator.device)
        # The marks until which the main stream, and the side stream, use the staging area.
        self._main_use: Mark | None = None
        self._side_use: Mark | None = None

    def apply(self, batch: Batch) -> list[TimedCopy]:
        """Copy out before in: a block of the cache may be swapped out and reused in one step."""
        timed = []
        for group, blocks in self._portions(batch.swap_out, to_host=True):
            timed.append(self._copy_out(group, blocks))
        for group, blocks in self._portions(batch.swap_in, to_host=False):
            timed.append(self._copy_in(group, blocks))
        return timed

    def _portions(self, copies: tuple[BlockCopies, ...], *, to_host: bool) -> Iterator[tuple[_Group, BlockCopies]]:
        """Yield the copies in portions that fit into the staging area, in the order of their host blocks."""
        for group, blocks in zip(self._groups, copies, strict=True) if copies else ():
            hosts = blocks.targets if to_host else blocks.sources
            order = sorted(range(len(hosts)), key=hosts.__getitem__)
            for begin in range(0, len(order), group.staged_blocks):
                part = order[begin : begin + group.staged_blocks]
                yield (
                    group,
                    BlockCopies(
                        sources=[blocks.sources[place] for place in part],
                        targets=[blocks.targets[place] for place in part],
                    ),
                )

    def _copy_out(self, group: _Group, blocks: BlockCopies) -> TimedCopy:
        accelerator, staged = self._accelerator, self._staged[: len(blocks.sources)]
        self._main_waits_for_staging()
        group.swap(group.caches, group.staging, self._on_device(blocks.sources), staged)
        gathered = self._main_use = accelerator.mark()
        with accelerator.on_side():
            pieces = self._pieces(group, blocks.targets)
            accelerator.follow(gathered)
            began = accelerator.mark()
            if isinstance(pieces, Tensor):
                group.swap(group.staging, group.space, staged, pieces)
            else:
                self._copy_runs(pieces, group, to_host=True)
            self._side_use = accelerator.mark()
        return TimedCopy(began=began, ended=self._side_use)

    def _copy_in(self, group: _Group, blocks: BlockCopies) -> TimedCopy:
        accelerator, staged = self._accelerator, self._staged[: len(blocks.sources)]
        with accelerator.on_side():
            pieces = self._pieces(group, blocks.sources)
            if self._main_use is not None:
                accelerator.follow(self._main_use)
            began = accelerator.mark()
            if isinstance(pieces, Tensor):
                group.swap(group.space, group.staging, pieces, staged)
            else:
                self._copy_runs(pieces, group, to_host=False)
            fetched = self._side_use = accelerator.mark()
        targets = self._on_device(blocks.targets)
        accelerator.follow(fetched)
        group.swap(group.staging, group.caches, staged, targets)
        self._main_use = accelerator.mark()
        return TimedCopy(began=began, ended=fetched)

    def _pieces(self, group: _Group, hosts: list[int]) -> list[Run] | Tensor:
        """Return the runs of host blocks to copy, or if they are too many, the blocks on the device for a kernel."""
        runs = runs_of(hosts)
        return runs if len(runs) * 2 * len(group.caches) <= _MOST_COPIES else self._on_device(hosts)

    def _copy_runs(self, runs: list[Run], group: _Group, *, to_host: bool) -> None:
        for staged, host in zip(_buffers(group.staging), _buffers(group.space), strict=True):
            for run in runs:
                here = staged[run.staged : run.staged + run.count]
                there = host[run.host : run.host + run.count]
                self._accelerator.copy_bytes(*((here, there) if to_host else (there, here)))

    def _main_waits_for_staging(self) -> None:
        if self._side_use is not None:
            self._accelerator.follow(self._side_use)

    def _on_device(self, blocks: list[int]) -> Tensor:
        """Return the block ids on the device, uploaded on the current stream."""
        transfer = HostToDeviceBatch(self._accelerator)
        item = transfer.add(np.asarray(blocks, dtype=np.int64))
        transfer.send()
        return item.on_device


def _make_groups(
    layout: KVCacheLayout, caches: Sequence[KVCache], space: Sequence[KVCache], staging_bytes: int
) -> list[_Group]:
    groups = []
    for group in layout.groups:
        own = [caches[layer] for layer in group.layers]
        block_bytes = sum(_block_bytes(cache) for cache in own)
        share = staging_bytes // len(layout.groups)
        blocks = max(1, min(share // block_bytes, space[group.layers[0]].num_blocks))
        groups.append(
            _Group(
                caches=own,
                shapes=layers_by_shape(range(len(own)), own),
                space=[space[layer] for layer in group.layers],
                staging=[_like(cache, blocks) for cache in own],
            )
        )
    return groups


def _block_bytes(cache: KVCache) -> int:
    return sum(part[0].numel() * part.element_size() for part in (cache.keys, cache.values))


def _like(cache: KVCache, num_blocks: int) -> KVCache:
    return allocate_kv_cache(
        num_blocks=num_blocks,
        block_size=cache.block_size,
        kv_heads=cache.kv_heads,
        head_dim=cache.head_dim,
        dtype=cache.keys.dtype,
        device=cache.keys.device,
    )


def layers_by_shape(layers: Sequence[int], caches: Sequence[KVCache]) -> list[list[int]]:
    """Return the layers of a group, those with blocks of the same shape together.

    A draft model's layers may have other heads than the target's, and one copy is of blocks of one shape.
    """
    found: dict[object, list[int]] = {}
    for layer in layers:
        found.setdefault((caches[layer].keys.shape, caches[layer].values.shape), []).append(layer)
    return list(found.values())
