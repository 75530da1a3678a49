"""The start of the runner: from a model in memory to a warm runner.

It sizes the KV cache, on a GPU by profiling the largest step, warms up, and captures steps. With Triton's interpreter
on CPU tensors, memory is sized as for a CPU.
"""

import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from quire_common.errors import FlagsError
from quire_engine.config import EngineConfig
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.core.options import MAX_PROMPT_LOGPROBS_POSITIONS
from quire_engine.core.ports import Runner
from quire_engine.model.candidate import BuiltModel
from quire_engine.model.kv_scales import set_kv_scales
from quire_engine.model.layers import MOST_RECORDED_TOKENS
from quire_engine.model.shape import ModelShape
from quire_engine.runner.accelerator import Accelerator, CpuAccelerator, make_accelerator
from quire_engine.runner.adapter_store import RunnerAdapters
from quire_engine.runner.arithmetic import Arithmetic
from quire_engine.runner.cache_size import CacheDemand, CacheSize, CacheTooSmall, size_cache
from quire_engine.runner.captured import GraphSizes, default_decode_sizes, default_mixed_sizes
from quire_engine.runner.device_budget import DeviceUse, graphs_bytes, size_device_cache
from quire_engine.runner.draft_model import draft_graph_sizes
from quire_engine.runner.draft_start import Draft, with_draft_layers
from quire_engine.runner.faults import device_faults
from quire_engine.runner.kv_cache import allocate, make_layout
from quire_engine.runner.memory import AvailableMemory, available_memory
from quire_engine.runner.model_runner import DraftParts, ModelRunner, RunnerParts, StageRunner
from quire_engine.runner.parallel.topology import topology_of
from quire_engine.runner.pooling_runner import PoolingRunner
from quire_engine.runner.profiling import DeviceMemory, largest_step, profile
from quire_engine.runner.sharing import shared_from
from quire_engine.runner.start_report import MemoryUse
from quire_engine.runner.threads import ALWAYS_SHARED, SharedFrom, ThreadChooser, sharing_begins
from quire_engine.runner.waiting import Waits
from quire_engine.runner.warm_up import SHORT_CHUNKS, Measured, warm_up
from quire_kernels.dispatch import runs_triton

if TYPE_CHECKING:
    from quire_engine.runner.parallel.group import RankGroup

_log = logging.getLogger(__name__)
_PROFILED_BLOCKS = 4
_PROFILED_GRAPHS = 4
"""The largest graph has the memory that all share; the others show what each further one needs for its launches."""
_MOST_CAPTURED_SEQUENCES = 512
"""The maximum size of captured batches. A larger step keeps the GPU busy for longer than its launches take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInMemory:
    """A model with its weights."""

    built: BuiltModel
    shape: ModelShape
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    demand: CacheDemand
    adapters: RunnerAdapters | None = None
    reserved_bytes: int = 0
    """Host memory that is left to adapters which are not loaded yet."""
    draft: Draft | None = None

    @property
    def cached_shape(self) -> ModelShape:
        """The shape of the KV cache, which includes the draft model's layers."""
        return self.shape if self.draft is None else with_draft_layers(self.shape, self.draft.shape)

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weights of all models."""
        return self.built.weight_bytes + (0 if self.draft is None else self.draft.weight_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmRunner:
    """A runner that has produced a token, and the facts measured meanwhile."""

    runner: Runner
    asynchronous: bool
    layout: KVCacheLayout
    size: CacheSize
    measured: Measured
    memory: MemoryUse
    sharing: str = ""
    """The numbers of tokens from which steps are shared among threads, as text; empty if that does not apply."""
    cache_seconds: float
    """The seconds to size and allocate the KV cache."""
    warm_up_seconds: float


RankRunner = ModelRunner | StageRunner | PoolingRunner
"""The runner of one rank."""


def graph_sizes(config: EngineConfig, device_type: str, *, is_native: bool) -> GraphSizes:
    """Return the sizes of batches to capture ahead; none if steps run launch by launch."""
    options, scheduler = config.device, config.scheduler
    if not runs_triton(device_type):
        # Others are recorded when they first occur. Drafts let sizes vary, and the first trial of each would take its
        # recording for the cost of drafts.
        every = tuple(range(1, MOST_RECORDED_TOKENS + 1))
        return GraphSizes() if config.speculation is None else GraphSizes(decode=every, mixed=every)
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


def start_runner(
    config: EngineConfig,
    model: ModelInMemory,
    *,
    sizes: GraphSizes,
    memory: DeviceMemory | None = None,
    threads: int = 1,
    arithmetic: Arithmetic | None = None,
    group: "RankGroup | None" = None,
) -> WarmRunner:
    """Return a warm runner, which with ``group`` runs the other ranks too.

    ``memory`` is the GPU's; None means a CPU, or Triton's interpreter. ``threads`` and ``arithmetic`` are a CPU's.

    Raise FlagsError if the KV cache would be too small, DeviceError if the GPU fails.
    """
    began = time.perf_counter()
    on_triton = runs_triton(model.device.type)
    if on_triton and group is not None:
        group.connect()
    uses = [] if memory is None else _measure_devices(config, model, sizes, memory, group)
    size = _size_cache(config, model, uses, None if on_triton else group)
    layout = make_layout(model.cached_shape, config.cache.block_size, size)
    # Libraries also split a product by the number of threads, which must therefore be the same in every step.
    sharing = ALWAYS_SHARED
    if arithmetic is not None and not on_triton and not config.device.deterministic:
        sharing = _sharing(model, arithmetic)
    if group is not None:
        group.allocate(size, sharing)
    accelerator = make_accelerator(model.device) if on_triton else cpu_accelerator(threads, sharing)
    own = make_rank_runner(config, model, layout, size.max_model_len, accelerator, sizes)
    runner: Runner = own if group is None else _with_ranks(own, group)
    made = time.perf_counter()
    # The interpreter compiles nothing.
    measured = _warm_up(runner, model, layout, size, chunks=() if memory is None else SHORT_CHUNKS)
    if on_triton and config.speculation is not None:
        _verify_once(config, runner, model, layout, size)
    _capture(own, model, sizes, on_triton=on_triton)
    if memory is not None:
        # The first timing included the compilation of kernels, and decoding without graphs.
        measured = _warm_up(runner, model, layout, size)
    if group is not None:
        group.formed()
    return WarmRunner(
        runner=runner,
        # With several stages, steps in flight have different sequences, whose tokens are known.
        asynchronous=on_triton and config.parallel.pipeline == 1,
        layout=layout,
        size=size,
        measured=measured,
        memory=_memory_use(uses[0] if uses else None, sizes, memory, on_triton=on_triton),
        sharing="" if on_triton else f"{threads}; " + sharing.words if threads > 1 else "1",
        cache_seconds=made - began,
        warm_up_seconds=time.perf_counter() - made,
    )


def _with_ranks(own: RankRunner, group: "RankGroup") -> Runner:
    """Return the runner of rank 0 that lets the other ranks run each batch too."""
    from quire_engine.runner.parallel.group import GroupRunner, PipelineRunner  # needs msgspec

    return PipelineRunner(own, group) if isinstance(own, StageRunner) else GroupRunner(own, group)


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
        lambda: make_rank_runner(
            config,
            model,
            layout,
            demand.sequence_tokens,
            make_accelerator(model.device),
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


def _size_cache(
    config: EngineConfig, model: ModelInMemory, uses: Sequence[DeviceUse], group: "RankGroup | None"
) -> CacheSize:
    """Return the size for the rank with the least memory; all have as many blocks, because they share block tables.

    group  the ranks on CPUs, of which some may be on other nodes
    """
    host = _left_to_cache(available_memory(), model.reserved_bytes, ranks=config.parallel.local_ranks)
    if group is not None:
        host = _least(host, group.memory_elsewhere(), ranks=config.parallel.local_ranks)
    found = [size_device_cache(model.demand, config.cache, use, host) for use in uses]
    sizes: list[CacheSize] = []
    for size in found or [size_cache(model.demand, config.cache, host)]:
        if isinstance(size, CacheTooSmall):
            raise FlagsError([size.message])
        sizes.append(size)
    return min(sizes, key=lambda size: size.kv_cache_bytes)


def _left_to_cache(available: AvailableMemory | None, reserved_bytes: int, *, ranks: int) -> AvailableMemory | None:
    """Return the host memory for this rank's blocks, after all ``ranks`` of this machine have their weights."""
    if available is None:
        return None
    return replace(available, size=max(0, (available.size - reserved_bytes) // ranks))


def _least(here: AvailableMemory | None, elsewhere: AvailableMemory | None, *, ranks: int) -> AvailableMemory | None:
    """Return the memory for the KV cache of the rank that has the least, of this node and the others."""
    if elsewhere is None:
        return here
    there = replace(elsewhere, size=elsewhere.size // ranks)
    return there if here is None or there.size < here.size else here


def cpu_accelerator(threads: int, shared_from: SharedFrom) -> CpuAccelerator:
    """Return the accelerator of this process on a CPU, which chooses the number of threads of each step."""
    from quire_kernels.cpu_runtime.spin_switch import SpinSwitch  # needs numba, which a machine with a GPU may lack

    waits = Waits(SpinSwitch(threads), threads=threads) if threads > 1 else None
    return CpuAccelerator(threads=ThreadChooser(threads, shared_from=shared_from, waits=waits))


def _sharing(model: ModelInMemory, arithmetic: Arithmetic) -> SharedFrom:
    """Return the number of tokens from which steps are shared among threads: as timed, or by a rule of thumb."""
    timed = None if arithmetic.timings is None else shared_from(arithmetic.timings.sharing)
    if timed is not None:
        return timed
    linears = 4 * model.shape.num_layers + 1
    linear_bytes = (model.built.weight_bytes - model.built.looked_up_bytes) / linears
    weights = linear_bytes / model.built.bytes_per_weight
    return sharing_begins(mean_linear_bytes=linear_bytes, mean_linear_weights=weights)


def make_rank_runner(
    config: EngineConfig,
    model: ModelInMemory,
    layout: KVCacheLayout,
    max_model_len: int,
    accelerator: Accelerator,
    sizes: GraphSizes = GraphSizes(),  # noqa: B008  (frozen)
    *,
    rank: int = 0,
) -> RankRunner:
    """Return the runner of a rank, with its KV cache. Raise DeviceError if the GPU's memory does not suffice."""
    full = "lower --gpu-memory-utilization, or --kv-cache-memory-bytes where it is given"
    with device_faults("making the KV cache", when_full=full):
        caches = allocate(layout, model.cached_shape, model.cache_dtype, model.device)
        set_kv_scales(caches[: model.shape.num_layers], model.built.kv_scales)
        parts = RunnerParts(
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
            accelerator=accelerator,
            graph_sizes=sizes,
            deterministic=config.device.deterministic,
            adapters=model.adapters,
        )
        if config.pooling is not None:
            return PoolingRunner(parts)
        # On GPUs all ranks of a single stage sample: see ``parallel.group.GroupRunner``.
        alike = config.parallel.pipeline == 1 and runs_triton(model.device.type)
        if not alike and rank != topology_of(config.parallel).sampler:
            return StageRunner(parts)
        draft = None
        if model.draft is not None:
            draft = DraftParts(
                model=model.draft.model, layers=model.draft.shape.num_layers, max_tokens=model.draft.max_tokens
            )
        return ModelRunner(parts, vocab_size=model.shape.vocab_size, draft=draft)


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
    config: EngineConfig, runner: Runner, model: ModelInMemory, layout: KVCacheLayout, size: CacheSize
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
        drafts=_most_drafts(config),
    )
    runner.execute(step).sample().wait()


def _num_graphs(model: ModelInMemory, sizes: GraphSizes) -> int:
    """Return the number of graphs, those of a draft model included."""
    drafting = 0 if model.draft is None else len(draft_graph_sizes(sizes).in_order())
    return len(sizes.in_order()) + drafting


def _capture(runner: RankRunner, model: ModelInMemory, sizes: GraphSizes, *, on_triton: bool) -> None:
    if count := _num_graphs(model, sizes):
        began = time.perf_counter()
        runner.capture_graphs()
        if on_triton:
            _log.info("captured %d CUDA graphs in %.2f s", count, time.perf_counter() - began)


def _memory_use(use: DeviceUse | None, sizes: GraphSizes, memory: DeviceMemory | None, *, on_triton: bool) -> MemoryUse:
    if use is None or memory is None:
        host = None if on_triton else available_memory()
        return MemoryUse(free=None if host is None else host.size)
    return MemoryUse(
        activations=use.activations,
        graphs=use.graphs,
        graph_sizes=sizes.decode,
        mixed_graph_sizes=sizes.mixed,
        before=use.before,
        free=memory.meter.free(),
    )
