"""The order of start-up, from options to a model that has produced a token, and the time of each phase.

This module is imported only in a process that loads a model, because it imports torch.
"""

import contextlib
import functools
import logging
import time
from typing import TYPE_CHECKING

import torch

from quire_common.errors import FlagsError
from quire_engine.config import EngineConfig
from quire_engine.core.options import ModelTraits
from quire_engine.core.ports import LoadedModel
from quire_engine.core.stall_bound import StepCosts
from quire_engine.model.candidate import BuildOptions, BuiltModel, Candidate
from quire_engine.model.config import stored_dtype
from quire_engine.model.divided import Links
from quire_engine.model.kv_scales import scales_in_words
from quire_engine.model.linear import LinearBackend
from quire_engine.model.loader import NativeCandidate, find_candidate
from quire_engine.model.model_part import ModelPart
from quire_engine.model.shape import ModelShape
from quire_engine.runner.adapter_start import StartedAdapters, start_adapters
from quire_engine.runner.arithmetic import (
    Arithmetic,
    choose_arithmetic,
    dtype_name,
    likely_dtype,
    multiplies_bfloat16,
    resolve_gpu_dtype,
    untimed_backend,
)
from quire_engine.runner.cache_size import CacheDemand
from quire_engine.runner.device_search import Place, find_place
from quire_engine.runner.draft_start import Draft, build_draft, find_draft, with_draft_layers
from quire_engine.runner.faults import device_faults
from quire_engine.runner.kv_cache import cache_groups, largest_groups
from quire_engine.runner.memory import available_memory
from quire_engine.runner.profiling import device_memory
from quire_engine.runner.start_checks import attention_problem, start_problems
from quire_engine.runner.start_report import StartReport, report_lines
from quire_engine.runner.start_runner import ModelInMemory, WarmRunner, graph_sizes, start_runner
from quire_engine.runner.threads import use_threads
from quire_engine.special_tokens import tokenizer_eos_token_id
from quire_kernels.kv_cache import FP8

if TYPE_CHECKING:
    from quire_engine.runner.parallel.group import RankGroup

_log = logging.getLogger(__name__)
FULL_OF_WEIGHTS = "the model needs a larger GPU, one that no other process uses, or --dtype of 16 bits"
"""The remedies if the weights do not fit."""


def load(config: EngineConfig, *, import_seconds: float) -> LoadedModel:
    """See ``runner.load_model``."""
    with contextlib.ExitStack() as on_failure:
        loaded = _load(config, import_seconds, on_failure)
        on_failure.pop_all()
        return loaded


def _load(config: EngineConfig, import_seconds: float, on_failure: contextlib.ExitStack) -> LoadedModel:
    """Load the model; ``on_failure`` gets what must be ended if that fails."""
    ask_for_tiles()
    threads = use_threads(config.threads)
    started = time.perf_counter()
    place = find_place(config)
    candidate, draft = _find_models(config, place)
    arithmetic = _choose_arithmetic(config, candidate.shape, place, threads)
    dtype, backend = arithmetic.dtype, arithmetic.backend
    cache_dtype = FP8 if config.cache.kv_cache_dtype == "fp8" else dtype
    for shape in [candidate.shape, *([] if draft is None else [draft.shape])]:
        if problem := attention_problem(config, shape, place, dtype, cache_dtype):
            raise FlagsError([problem])
    group = _start_ranks(config, arithmetic, place, on_failure)
    found = time.perf_counter()
    memory = None if place.gpu is None else device_memory(place.device)
    built = _build(config, candidate, place, dtype, backend, group)
    if cache_dtype == FP8:
        _log.info("keys and values are stored in fp8 (e4m3) with %s", scales_in_words(built.kv_scales))
    other_bytes = 0 if group is None else group.await_loaded()
    started_adapters = start_adapters(config.adapters, candidate, built, dtype, place.device)
    drafting = build_draft(config, draft, build_options(config, place.device, dtype, backend))
    model = in_memory(config, candidate, place.device, dtype, cache_dtype, started_adapters, drafting)
    start = functools.partial(
        start_runner,
        config,
        sizes=graph_sizes(config, place.device.type, is_native=candidate.is_native),
        memory=memory,
        threads=threads,
        arithmetic=arithmetic,
        group=group,
    )
    warmed: WarmRunner | None = None
    try:
        warmed = start(model)
    except FlagsError as error:
        if drafting is None or config.speculation is None or config.speculation.required:
            raise
        _log.warning("serves without speculation, because with the draft model, %s", "; ".join(error.problems))
        drafting = None  # the next assignment frees its weights
        model = in_memory(config, candidate, place.device, dtype, cache_dtype, started_adapters, None)
    warm = warmed or start(model)
    for line in report_lines(_report(config, place, model, warm, arithmetic, other_bytes)):
        _log.info("%s", line)
    phases = {
        "import": import_seconds,
        "config": found - started,
        "weights": built.seconds - built.packing_seconds,
        "pack": built.packing_seconds,
        "kv_cache": warm.cache_seconds,
        "warm_up": warm.warm_up_seconds,
    }
    return _loaded(config, model, warm, arithmetic, other_bytes, phases)


def _find_models(config: EngineConfig, place: Place) -> tuple[Candidate, Candidate | None]:
    """Return the model, as this rank's part of it, and the draft model. Raise FlagsError or StartError."""
    options, parallel = config.model, config.parallel
    candidate = find_candidate(
        options.path,
        impl=options.model_impl,
        trust_remote_code=options.trust_remote_code,
        overrides=options.overrides,
    )
    if problems := start_problems(config, candidate, place):
        raise FlagsError(problems)
    candidate = candidate.limited_to(model_limit(config, candidate.shape))
    if config.pooling is not None and config.pooling.task == "embed" and isinstance(candidate, NativeCandidate):
        candidate = candidate.without_lm_head()
    draft = find_draft(config, candidate, longest=model_limit(config, candidate.shape))
    _log.info("%s is served by %s, on %s", options.path.name, candidate.served_by, place.name)
    if parallel.ranks > 1:
        assert isinstance(candidate, NativeCandidate), "parallel_problems refuses others"
        candidate = candidate.divided(ModelPart(tensor_size=parallel.tensor, stages=parallel.pipeline))
    return candidate, draft


def _loaded(
    config: EngineConfig,
    model: ModelInMemory,
    warm: WarmRunner,
    arithmetic: Arithmetic,
    other_bytes: int,
    phases: dict[str, float],
) -> LoadedModel:
    """Return what the engine needs to know of a model; ``other_bytes`` are the weights of the other ranks."""
    return LoadedModel(
        runner=warm.runner,
        layout=warm.layout,
        traits=ModelTraits(
            max_model_len=warm.size.max_model_len,
            eos_token_ids=_end_tokens(config, model.shape),
            pools=config.pooling is not None,
            adapter_slots=config.adapters.max_loras if model.adapters is not None else 0,
            stages=config.parallel.pipeline,
        ),
        vocab_size=model.shape.vocab_size,
        model_bytes=model.weight_bytes + other_bytes,
        kv_cache_bytes=warm.size.kv_cache_bytes,
        dtype=dtype_name(arithmetic.dtype),
        weights=arithmetic.backend.weights,
        phase_seconds=phases,
        asynchronous=warm.asynchronous,
        step_costs=warm.measured.step_costs,
        seconds_per_draft=_seconds_per_draft(model, warm.measured.step_costs),
        swap_bytes_per_second=warm.measured.swap_bytes_per_second,
        block_bytes=tuple(group.block_bytes for group in model.demand.groups),
        adapters=None if model.adapters is None else model.adapters.store,
    )


def ask_for_tiles() -> None:
    """Request AMX from Linux before threads start, if kernels use it."""
    with contextlib.suppress(ImportError):  # a machine with a GPU may have no numba
        from quire_kernels.cpu_runtime.amx import may_use_tiles

        may_use_tiles()


def _start_ranks(
    config: EngineConfig, arithmetic: Arithmetic, place: Place, on_failure: contextlib.ExitStack
) -> "RankGroup | None":
    """Start the other ranks, if there are any; ``on_failure`` ends them."""
    if config.parallel.ranks == 1:
        return None
    from quire_engine.runner.parallel.group import RankGroup  # needs msgspec

    group = RankGroup(config, place.device, gpu=None if place.gpu is None else place.gpu.name)
    on_failure.callback(group.close)
    group.begin(arithmetic)
    return group


def _end_tokens(config: EngineConfig, shape: ModelShape) -> tuple[int, ...]:
    """Return the tokens that end an answer: those of the configuration files, and the tokenizer's own."""
    own = tokenizer_eos_token_id(config.text.tokenizer or config.model.path)
    if own is None or own in shape.eos_token_ids or own >= shape.vocab_size:
        return shape.eos_token_ids
    _log.info("token %d ends answers too: it is the tokenizer's eos_token", own)
    return (*shape.eos_token_ids, own)


def model_limit(config: EngineConfig, model: ModelShape) -> int:
    asked = config.model.max_model_len
    return model.max_position_embeddings if asked is None else asked


def _choose_arithmetic(config: EngineConfig, shape: ModelShape, place: Place, threads: int) -> Arithmetic:
    if place.gpu is None and not place.is_interpreted:
        available = available_memory()
        return choose_arithmetic(
            config, shape, threads=threads, available_bytes=None if available is None else available.size
        )
    if place.gpu is None:
        dtype = likely_dtype(config.model.dtype, fast_bfloat16=multiplies_bfloat16(config))
    else:
        stored = stored_dtype(config.model.path, config.model.overrides)
        dtype = resolve_gpu_dtype(config.model.dtype, stored, config.model.quantization)
    return Arithmetic(dtype=dtype, backend=untimed_backend(config, dtype, place.device.type))


def _seconds_per_draft(model: ModelInMemory, costs: StepCosts) -> float | None:
    """Return an estimate until steps were measured: a pass of the draft model costs by the weights that it reads."""
    if model.draft is None:
        return None
    return costs.fixed * min(1.0, max(0.1, model.draft.weight_bytes / model.built.weight_bytes))


def build_options(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, backend: LinearBackend, links: Links | None = None
) -> BuildOptions:
    return BuildOptions(
        load_format=config.model.load_format,
        seed=config.model.seed,
        dtype=dtype,
        backend=backend,
        device=device,
        links=links,
    )


@torch.inference_mode()
def _build(
    config: EngineConfig,
    candidate: Candidate,
    place: Place,
    dtype: torch.dtype,
    backend: LinearBackend,
    group: "RankGroup | None",
) -> BuiltModel:
    links = None if group is None else group.links.links
    options = build_options(config, place.device, dtype, backend, links)
    if place.gpu is None:
        return candidate.build(options)
    with device_faults(f"reading the weights onto {place.name}", when_full=FULL_OF_WEIGHTS):
        return candidate.build(options)


def in_memory(
    config: EngineConfig,
    candidate: Candidate,
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    started: StartedAdapters,
    draft: Draft | None,
) -> ModelInMemory:
    """Return the model of this rank with what its KV cache must hold."""
    shape = candidate.shape
    cached = shape if draft is None else with_draft_layers(shape, draft.shape)
    groups = cache_groups(cached, cache_dtype, config.cache.block_size, device)
    if config.parallel.pipeline > 1:
        assert isinstance(candidate, NativeCandidate), "parallel_problems refuses others"
        groups = largest_groups(candidate.stages(), cache_dtype, config.cache.block_size, device)
    return ModelInMemory(
        built=started.built,
        draft=draft,
        shape=shape,
        dtype=dtype,
        cache_dtype=cache_dtype,
        device=device,
        demand=CacheDemand(
            groups=groups,
            block_size=config.cache.block_size,
            sequence_tokens=model_limit(config, shape),
            must_hold_limit=config.model.max_model_len is not None,
            max_sequences=config.scheduler.max_num_seqs,
            max_batched_tokens=config.scheduler.max_num_batched_tokens,
        ),
        adapters=started.adapters,
        reserved_bytes=started.host_bytes,
    )


def _no_graphs(config: EngineConfig) -> str | None:
    """Return why ranks on GPUs have no CUDA graphs; None with one rank, or if a flag excludes graphs."""
    if config.parallel.ranks == 1 or config.device.enforce_eager:
        return None
    return "steps of several ranks run launch by launch: NCCL's operations in graphs have not been tried yet"


def _report(
    config: EngineConfig,
    place: Place,
    model: ModelInMemory,
    warm: WarmRunner,
    arithmetic: Arithmetic,
    other_bytes: int,
) -> StartReport:
    return StartReport(
        device=place.name,
        weights=model.weight_bytes,
        weights_held_as=arithmetic.backend.weights,
        ranks=config.parallel.ranks,
        all_weights=model.weight_bytes + other_bytes,
        cache=warm.size,
        cache_dtype=dtype_name(model.cache_dtype),
        block_size=config.cache.block_size,
        swap_space=config.cache.swap_space_bytes,
        memory=warm.memory,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        no_graphs=_no_graphs(config) if warm.memory.graphs is not None else None,
        arithmetic=tuple(arithmetic.lines),
        cpu=None if place.gpu is not None or config.cpu is None else config.cpu.sentence,
        threads=warm.sharing,
    )
