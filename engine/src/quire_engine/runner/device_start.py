"""The start on a GPU: from a model in its memory to a warm runner.

It profiles, sizes the KV cache, and captures graphs.

With Triton's interpreter on CPU tensors the same runner is created, with memory sized as for a CPU.
"""

import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quire_common.errors import FlagsError
from quire_engine.config import EngineConfig
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.core.options import MAX_PROMPT_LOGPROBS_POSITIONS
from quire_engine.core.ports import Runner
from quire_engine.model.kv_scales import set_kv_scales
from quire_engine.runner.cache_size import CacheSize, CacheTooSmall, size_cache
from quire_engine.runner.device.draft_model import draft_graph_sizes
from quire_engine.runner.device.faults import device_faults
from quire_engine.runner.device.graphs import GraphSizes, default_decode_sizes, default_mixed_sizes
from quire_engine.runner.device_budget import DeviceUse, graphs_bytes, size_device_cache
from quire_engine.runner.device_runner import DeviceDraft, DeviceRunner
from quire_engine.runner.device_stage import DeviceStage
from quire_engine.runner.device_steps import DeviceParts
from quire_engine.runner.kv_cache import allocate, make_layout
from quire_engine.runner.memory import available_memory
from quire_engine.runner.parallel.topology import topology_of
from quire_engine.runner.profiling import DeviceMemory, largest_step, profile
from quire_engine.runner.start_parts import ModelInMemory, WarmRunner
from quire_engine.runner.start_report import MemoryUse
from quire_engine.runner.warm_up import SHORT_CHUNKS, Measured, warm_up

if TYPE_CHECKING:
    from quire_engine.runner.parallel.group import RankGroup

_log = logging.getLogger(__name__)
_PROFILED_BLOCKS = 4
_PROFILED_GRAPHS = 4
"""The largest graph has the memory that all share; the others show what each further one needs for its launches."""
_MOST_CAPTURED_SEQUENCES = 512
"""The maximum size of captured batches. A larger step keeps the GPU busy for longer than its launches take."""


def graph_sizes(config: EngineConfig, *, is_native: bool) -> GraphSizes:
    """Return the sizes of batches to capture; none if steps run launch by launch."""
    options, scheduler = config.device, config.scheduler
    if options.enforce_eager:
        return GraphSizes()
    if not is_native:
        _log.info("no CUDA graphs: transformers' layers may wait for the device, which a graph cannot contain")
        return GraphSizes()
    if config.parallel.ranks > 1:
        return GraphSizes()  # the report says so
    mixed = default_mixed_sizes(scheduler.max_num_batched_tokens, verifies=config.speculation is not None)
    if options.cudagraph_capture_sizes is not None:
        decode = tuple(sorted(set(options.cudagraph_capture_sizes)))
    else:
        decode = default_decode_sizes(min(scheduler.max_num_seqs, _MOST_CAPTURED_SEQUENCES))
    return GraphSizes(decode=decode, mixed=mixed).within(
        sequences=scheduler.max_num_seqs, tokens=scheduler.max_num_batched_tokens
    )


def start_on_device(
    config: EngineConfig,
    model: ModelInMemory,
    *,
    sizes: GraphSizes,
    memory: DeviceMemory | None,
    group: "RankGroup | None" = None,
) -> WarmRunner:
    """Return a warm runner, which with ``group`` runs the other ranks too.

    ``memory`` is the GPU's; None means Triton's interpreter.

    Raise FlagsError if the KV cache would be too small, DeviceError if the GPU fails.
    """
    began = time.perf_counter()
    if group is not None:
        group.connect()
    uses = [] if memory is None else _measure_devices(config, model, sizes, memory, group)
    size = _size_cache(config, model, uses)
    layout = make_layout(model.cached_shape, config.cache.block_size, size)
    if group is not None:
        group.allocate(size)
    own = make_rank_runner(config, model, layout, size.max_model_len, sizes)
    runner: Runner = own if group is None else _with_ranks(own, group, stages=config.parallel.pipeline)
    made = time.perf_counter()
    # The interpreter compiles nothing.
    measured = _warm_up(runner, model, layout, size, chunks=() if memory is None else SHORT_CHUNKS)
    if drafts := _most_drafts(config):
        _verify_once(config, runner, model, layout, size, drafts)
    _capture(own, model, sizes)
    free = None
    if memory is not None:
        # The first timing included the compilation of kernels, and decoding without graphs.
        measured = _warm_up(runner, model, layout, size)
        free = memory.meter.free()
    if group is not None:
        group.formed()
    return WarmRunner(
        runner=runner,
        # With several stages, steps in flight have different sequences, whose tokens are known.
        asynchronous=config.parallel.pipeline == 1,
        layout=layout,
        size=size,
        measured=measured,
        memory=_memory_use(uses[0] if uses else None, sizes, free),
        cache_seconds=made - began,
        warm_up_seconds=time.perf_counter() - made,
    )


def _with_ranks(own: DeviceRunner | DeviceStage, group: "RankGroup", *, stages: int) -> Runner:
    """Return the runner of rank 0 that lets the other ranks run each batch too."""
    from quire_engine.runner.parallel.group import GroupRunner, PipelineRunner  # needs msgspec

    return GroupRunner(own, group) if stages == 1 else PipelineRunner(own, group)


def _measure_devices(
    config: EngineConfig, model: ModelInMemory, sizes: GraphSizes, memory: DeviceMemory, group: "RankGroup | None"
) -> list[DeviceUse]:
    """Return the use of each rank's GPU."""

    def measure_own() -> DeviceUse:
        return measure_device(config, model, sizes, memory)

    return [measure_own()] if group is None else group.measure_devices(measure_own)


def measure_device(
    config: EngineConfig, model: ModelInMemory, sizes: GraphSizes, memory: DeviceMemory, *, rank: int = 0
) -> DeviceUse:
    """Return the use of this rank's GPU. All ranks call this at the same time, because they run a step together."""
    demand, meter = model.demand, memory.meter
    few = CacheSize(
        num_blocks=(_PROFILED_BLOCKS,) * len(demand.groups),
        num_swap_blocks=(_PROFILED_BLOCKS if config.cache.swap_space_bytes else 0,) * len(demand.groups),
        max_model_len=demand.sequence_tokens,
        kv_cache_bytes=0,
        sequences=0,
    )
    layout = make_layout(model.cached_shape, config.cache.block_size, few)
    meter.settle()
    loaded = meter.free()
    step = functools.partial(
        largest_step,
        layout,
        sequences=demand.max_sequences,
        tokens=demand.max_batched_tokens,
        max_model_len=demand.sequence_tokens,
        vocab_size=model.shape.vocab_size,
        logprobs=config.server.max_logprobs,
        adapter_slots=0 if model.adapters is None else model.adapters.pool.num_slots,
    )
    drafts = _most_drafts(config)
    found = profile(
        functools.partial(
            make_rank_runner,
            config,
            model,
            layout,
            demand.sequence_tokens,
            sizes.largest(_PROFILED_GRAPHS),
            rank=rank,
        ),
        [step(), step(drafts=drafts)] if drafts else [step()],
        meter,
        captures=bool(sizes.in_order()),
    )
    meter.settle()
    return DeviceUse(
        total=memory.total,
        free=found.free,
        before=memory.total - memory.free_before,
        weights=memory.free_before - loaded,
        activations=found.activations,
        graphs=graphs_bytes(found.graphs, _num_graphs(model, sizes)),
    )


def _size_cache(config: EngineConfig, model: ModelInMemory, uses: Sequence[DeviceUse]) -> CacheSize:
    """Return the size for the rank with the least memory; all have as many blocks, because they share block tables."""
    host = available_memory()
    if host is not None:
        host = replace(host, size=host.size // config.parallel.local_ranks)
    found = [size_device_cache(model.demand, config.cache, use, host) for use in uses]
    sizes: list[CacheSize] = []
    for size in found or [size_cache(model.demand, config.cache, host)]:
        if isinstance(size, CacheTooSmall):
            raise FlagsError([size.message])
        sizes.append(size)
    return min(sizes, key=lambda size: size.kv_cache_bytes)


def make_rank_runner(
    config: EngineConfig,
    model: ModelInMemory,
    layout: KVCacheLayout,
    max_model_len: int,
    sizes: GraphSizes,
    *,
    rank: int = 0,
) -> DeviceRunner | DeviceStage:
    """Return the runner of a rank, with its KV cache. Raise DeviceError if the GPU's memory does not suffice."""
    full = "lower --gpu-memory-utilization, or --kv-cache-memory-bytes where it is given"
    with device_faults("making the KV cache", when_full=full):
        caches = allocate(layout, model.cached_shape, model.cache_dtype, model.device)
        set_kv_scales(caches[: model.shape.num_layers], model.built.kv_scales)
        parts = DeviceParts(
            model=model.built.model,
            caches=caches,
            layout=layout,
            num_heads=max(heads.heads for heads in model.cached_shape.layer_heads),
            max_rows=config.scheduler.max_num_seqs,
            max_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=max_model_len,
            most_drafts=_most_drafts(config),
            # With several stages, one step for each is issued and not done.
            in_flight=max(2, config.parallel.pipeline),
            device=model.device,
            deterministic=config.device.deterministic,
        )
        if config.parallel.pipeline > 1 and rank != topology_of(config.parallel).sampler:
            return DeviceStage(parts)
        draft = None
        if model.draft is not None:
            draft = DeviceDraft(
                model=model.draft.model, layers=model.draft.shape.num_layers, max_tokens=model.draft.max_tokens
            )
        return DeviceRunner(
            parts, vocab_size=model.shape.vocab_size, graph_sizes=sizes, adapters=model.adapters, draft=draft
        )


def _most_drafts(config: EngineConfig) -> int:
    """Return the drafts that a step verifies at most: each has a row of logits, as reported prompt tokens have."""
    if config.speculation is None:
        return 0
    limit = config.scheduler.max_num_seqs * config.speculation.max_tokens
    return min(limit, MAX_PROMPT_LOGPROBS_POSITIONS)


def _warm_up(
    runner: Runner,
    model: ModelInMemory,
    layout: KVCacheLayout,
    size: CacheSize,
    *,
    chunks: tuple[int, ...] = (),
) -> Measured:
    return warm_up(
        runner,
        layout,
        max_model_len=size.max_model_len,
        max_tokens=model.demand.max_batched_tokens,
        block_bytes=tuple(group.block_bytes for group in model.demand.groups),
        chunks=chunks,
    )


def _verify_once(
    config: EngineConfig,
    runner: Runner,
    model: ModelInMemory,
    layout: KVCacheLayout,
    size: CacheSize,
    drafts: int,
) -> None:
    """Let a sequence have drafts, so that no request waits for the kernels that only such steps need."""
    assert config.speculation is not None
    tokens = min(config.speculation.max_tokens + 1, config.scheduler.max_num_batched_tokens, size.max_model_len - 1)
    if tokens < 2:
        return
    step = largest_step(
        layout,
        sequences=1,
        tokens=tokens,
        max_model_len=size.max_model_len,
        vocab_size=model.shape.vocab_size,
        logprobs=0,
        drafts=drafts,
    )
    runner.execute(step).sample().wait()


def _num_graphs(model: ModelInMemory, sizes: GraphSizes) -> int:
    """Return the number of graphs, those of a draft model included."""
    drafting = 0 if model.draft is None else len(draft_graph_sizes(sizes).in_order())
    return len(sizes.in_order()) + drafting


def _capture(runner: DeviceRunner | DeviceStage, model: ModelInMemory, sizes: GraphSizes) -> None:
    if count := _num_graphs(model, sizes):
        began = time.perf_counter()
        runner.capture_graphs()
        _log.info("captured %d CUDA graphs in %.2f s", count, time.perf_counter() - began)


def _memory_use(use: DeviceUse | None, sizes: GraphSizes, free: int | None) -> MemoryUse:
    if use is None:
        return MemoryUse()
    return MemoryUse(
        activations=use.activations,
        graphs=use.graphs,
        graph_sizes=sizes.decode,
        mixed_graph_sizes=sizes.mixed,
        before=use.before,
        free=free,
    )
