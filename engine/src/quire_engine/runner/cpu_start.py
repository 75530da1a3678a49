"""The start on a CPU: from a model in memory to a warm runner."""

import time
from dataclasses import replace

from quire_common.errors import FlagsError
from quire_engine.config import EngineConfig
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.core.ports import Runner
from quire_engine.runner.arithmetic import Arithmetic
from quire_engine.runner.cache_size import CacheSize, CacheTooSmall, size_cache
from quire_engine.runner.cpu_runner import CpuParts, StageRunner
from quire_engine.runner.draft_model import DraftModel
from quire_engine.runner.kv_cache import allocate, make_layout
from quire_engine.runner.memory import AvailableMemory, available_memory
from quire_engine.runner.model_runner import ModelRunner
from quire_engine.runner.parallel.group import GroupRunner, PipelineRunner, RankGroup
from quire_engine.runner.pooling_runner import PoolingRunner
from quire_engine.runner.sharing import shared_from
from quire_engine.runner.start_parts import ModelInMemory, WarmRunner
from quire_engine.runner.start_report import MemoryUse
from quire_engine.runner.threads import ALWAYS_SHARED, SharedFrom, ThreadChooser, sharing_begins
from quire_engine.runner.waiting import Waits
from quire_engine.runner.warm_up import warm_up
from quire_kernels.cpu_runtime.spin_switch import SpinSwitch
from quire_kernels.kv_cache import KVCache


def start_on_cpu(
    config: EngineConfig,
    model: ModelInMemory,
    *,
    threads: int,
    arithmetic: Arithmetic,
    group: RankGroup | None = None,
) -> WarmRunner:
    """Return a warm runner, which with ``group`` runs the other ranks too.

    Raise FlagsError if the KV cache would be too small.
    """
    began = time.perf_counter()
    demand = model.demand
    # Libraries also split a product by the number of threads, which must therefore be the same in every step.
    sharing = ALWAYS_SHARED if config.device.deterministic else _sharing(model, arithmetic)
    available = _left_to_cache(available_memory(), model.reserved_bytes, ranks=config.parallel.local_ranks)
    if group is not None:
        available = _least(available, group.memory_elsewhere(), ranks=config.parallel.local_ranks)
    size = size_cache(demand, config.cache, available)
    if isinstance(size, CacheTooSmall):
        raise FlagsError([size.message])
    layout = make_layout(model.cached_shape, config.cache.block_size, size)
    if group is not None:
        group.allocate(size, sharing)
    caches = allocate(layout, model.cached_shape, model.cache_dtype)
    chooser = make_threads(threads, sharing)
    runner = _make_runner(config, model, caches, layout, size, chooser, group)
    made = time.perf_counter()
    measured = warm_up(
        runner,
        layout,
        max_model_len=size.max_model_len,
        max_tokens=demand.max_batched_tokens,
        block_bytes=tuple(group.block_bytes for group in demand.groups),
    )
    if config.speculation is not None and isinstance(runner, ModelRunner):
        runner.record(most_drafts=config.speculation.max_tokens)
    if group is not None:
        group.formed()
    available = available_memory()
    return WarmRunner(
        runner=runner,
        asynchronous=False,
        layout=layout,
        size=size,
        measured=measured,
        memory=MemoryUse(free=None if available is None else available.size),
        sharing=f"{threads}; " + sharing.words if threads > 1 else "1",
        cache_seconds=made - began,
        warm_up_seconds=time.perf_counter() - made,
    )


def _make_runner(
    config: EngineConfig,
    model: ModelInMemory,
    caches: tuple[KVCache, ...],
    layout: KVCacheLayout,
    size: CacheSize,
    threads: ThreadChooser,
    group: RankGroup | None,
) -> Runner:
    """Return the runner of rank 0, which lets the other ranks of ``group`` run each batch too."""
    parts = CpuParts(
        model=model.built.model,
        caches=caches,
        layout=layout,
        max_rows=model.demand.max_sequences,
        max_model_len=size.max_model_len,
        threads=threads,
        deterministic=config.device.deterministic,
        adapters=model.adapters,
    )
    if config.pooling is not None:
        return PoolingRunner(parts)
    if config.parallel.pipeline > 1:
        assert group is not None, "stages run in other processes"
        return PipelineRunner(StageRunner(parts), group)
    runner = ModelRunner(
        parts,
        vocab_size=model.shape.vocab_size,
        drafter=_make_drafter(model, caches, layout, size),
        draft_layers=0 if model.draft is None else model.draft.shape.num_layers,
    )
    return runner if group is None else GroupRunner(runner, group)


def _make_drafter(
    model: ModelInMemory, caches: tuple[KVCache, ...], layout: KVCacheLayout, size: CacheSize
) -> DraftModel | None:
    if model.draft is None:
        return None
    return DraftModel(
        model.draft.model,
        caches[model.shape.num_layers :],
        layout,
        max_rows=model.demand.max_sequences,
        max_model_len=size.max_model_len,
    )


def make_threads(threads: int, shared_from: SharedFrom) -> ThreadChooser:
    """Return the chooser of the number of threads for this process."""
    waits = Waits(SpinSwitch(threads), threads=threads) if threads > 1 else None
    return ThreadChooser(threads, shared_from=shared_from, waits=waits)


def _left_to_cache(available: AvailableMemory | None, reserved_bytes: int, *, ranks: int) -> AvailableMemory | None:
    """Return the memory for this rank's KV cache, after all ``ranks`` of this machine have their weights."""
    if available is None:
        return None
    return replace(available, size=max(0, (available.size - reserved_bytes) // ranks))


def _least(here: AvailableMemory | None, elsewhere: AvailableMemory | None, *, ranks: int) -> AvailableMemory | None:
    """Return the memory for the KV cache of the rank that has the least, of this node and the others."""
    if elsewhere is None:
        return here
    there = replace(elsewhere, size=elsewhere.size // ranks)
    return there if here is None or there.size < here.size else here


def _sharing(model: ModelInMemory, arithmetic: Arithmetic) -> SharedFrom:
    """Return the number of tokens from which steps are shared among threads: as timed, or by a rule of thumb."""
    timed = None if arithmetic.timings is None else shared_from(arithmetic.timings.sharing)
    if timed is not None:
        return timed
    linears = 4 * model.shape.num_layers + 1
    linear_bytes = (model.built.weight_bytes - model.built.looked_up_bytes) / linears
    weights = linear_bytes / model.built.bytes_per_weight
    return sharing_begins(mean_linear_bytes=linear_bytes, mean_linear_weights=weights)
