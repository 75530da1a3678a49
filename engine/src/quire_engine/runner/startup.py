"""From options to a model that has produced a token: the order of start-up, and how long each phase took.

Imported only where a model is loaded: this is where torch comes in.
"""

import logging
import time

import torch

from quire_engine.config import CacheOptions, EngineConfig, ModelOptions
from quire_engine.core.ports import LoadedModel
from quire_engine.errors import FlagsError
from quire_engine.model.candidate import BuildOptions, find_candidate
from quire_engine.model.linear import choose_linear_backend
from quire_engine.model.shape import ModelShape
from quire_engine.runner.arithmetic import cpu_features, dtype_name, resolve_dtype
from quire_engine.runner.cache_size import CacheDemand, CacheGroup, CacheSize, CacheTooSmall, size_cache
from quire_engine.runner.kv_cache import allocate, allocate_swap_space, cache_groups, make_layout, option_problems
from quire_engine.runner.memory import available_memory
from quire_engine.runner.model_runner import ModelRunner
from quire_engine.runner.threads import ThreadChooser, sharing_begins, use_threads
from quire_engine.runner.warm_up import warm_up

_log = logging.getLogger(__name__)


def load(config: EngineConfig, *, import_seconds: float) -> LoadedModel:
    """See ``runner.load_model``."""
    options = config.model
    threads = use_threads(config.threads)
    started = time.perf_counter()
    candidate = find_candidate(options.path, impl=options.model_impl, trust_remote_code=options.trust_remote_code)
    if problems := _option_problems(config, candidate.shape):
        raise FlagsError(problems)
    candidate = candidate.limited_to(_model_limit(options, candidate.shape))
    shape = candidate.shape
    _log.info("%s is served by %s", options.path.name, candidate.served_by)
    dtype = resolve_dtype(options.dtype, cpu_features())
    backend = choose_linear_backend(dtype)
    found = time.perf_counter()
    with torch.inference_mode():
        built = candidate.build(
            BuildOptions(load_format=options.load_format, seed=options.seed, dtype=dtype, backend=backend)
        )
    began = time.perf_counter()
    groups = cache_groups(shape, dtype, config.cache.block_size)
    size = _size_cache(config, shape, groups)
    layout = make_layout(shape, config.cache.block_size, size)
    linears = 4 * shape.num_layers + 1
    linear_bytes = (built.weight_bytes - built.looked_up_bytes) / linears
    shared_from = sharing_begins(mean_linear_bytes=linear_bytes, mean_linear_weights=linear_bytes / dtype.itemsize)
    runner = ModelRunner(
        model=built.model,
        caches=allocate(layout, shape, dtype),
        swap_space=allocate_swap_space(layout, shape, dtype),
        layout=layout,
        vocab_size=shape.vocab_size,
        max_rows=config.scheduler.max_num_seqs,
        max_model_len=size.max_model_len,
        threads=ThreadChooser(threads, shared_from_tokens=shared_from),
    )
    cached = time.perf_counter()
    block_bytes = tuple(group.block_bytes for group in groups)
    measured = warm_up(
        runner,
        layout,
        max_model_len=size.max_model_len,
        max_tokens=config.scheduler.max_num_batched_tokens,
        block_bytes=block_bytes,
    )
    phases = {
        "import": import_seconds + found - started,
        "weights": built.seconds,
        "kv_cache": cached - began,
        "warm_up": time.perf_counter() - cached,
    }
    _log.info("ready: %s", ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases.items()))
    return LoadedModel(
        runner=runner,
        layout=layout,
        max_model_len=size.max_model_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=shape.eos_token_ids,
        model_bytes=built.weight_bytes,
        kv_cache_bytes=size.kv_cache_bytes,
        dtype=dtype_name(dtype),
        weights=backend.weights,
        phase_seconds=phases,
        prefill_tokens_per_second=1.0 / measured.step_costs.per_token,
        step_costs=measured.step_costs,
        swap_bytes_per_second=measured.swap_bytes_per_second,
        block_bytes=block_bytes,
    )


def _option_problems(config: EngineConfig, model: ModelShape) -> list[str]:
    problems = option_problems(config.cache)
    asked = config.model.max_model_len
    if asked is not None and asked > model.max_position_embeddings:
        problems.append(
            f"--max-model-len {asked} is more than the model's {model.max_position_embeddings} positions"
            " (max_position_embeddings in config.json)"
        )
    for flag, size in (
        ("--tensor-parallel-size", config.parallel.tensor_parallel_size),
        ("--pipeline-parallel-size", config.parallel.pipeline_parallel_size),
    ):
        if size != 1:
            problems.append(f"{flag} {size}: this version runs a model on one device; use 1")
    return problems


def _model_limit(options: ModelOptions, model: ModelShape) -> int:
    return model.max_position_embeddings if options.max_model_len is None else options.max_model_len


def _size_cache(config: EngineConfig, model: ModelShape, groups: tuple[CacheGroup, ...]) -> CacheSize:
    options: CacheOptions = config.cache
    demand = CacheDemand(
        groups=groups,
        block_size=options.block_size,
        model_limit=_model_limit(config.model, model),
        must_hold_limit=config.model.max_model_len is not None,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
    )
    match size_cache(demand, options, available_memory()):
        case CacheTooSmall(message=message):
            raise FlagsError([message])
        case CacheSize() as size:
            return size
