"""The checks of a start that need the model's configuration and the device. ``config`` checks the options alone."""

import torch

from quire_engine.config import EngineConfig
from quire_engine.model.candidate import Candidate
from quire_engine.model.loader import NativeCandidate
from quire_engine.model.shape import ModelShape
from quire_engine.runner.adapter_start import adapter_problem
from quire_engine.runner.device_choice import fp8_weights_problem, kv_dtype_problem
from quire_engine.runner.device_search import Place
from quire_engine.runner.kv_cache import option_problems
from quire_engine.runner.parallel.checks import parallel_problems
from quire_kernels.dispatch import runs_triton
from quire_kernels.paged_attention import unsupported


def start_problems(config: EngineConfig, candidate: Candidate, place: Place) -> list[str]:
    """Return the reasons why this model cannot be served with these options on this device."""
    problems = option_problems(config.cache)
    model, asked = candidate.shape, config.model.max_model_len
    if asked is not None and asked > model.max_position_embeddings:
        problems.append(
            f"--max-model-len {asked} is more than the model's {model.max_position_embeddings} positions"
            " (max_position_embeddings in config.json); --hf-overrides can give it YaRN, or more positions than it was"
            " trained with"
        )
    if config.device.deterministic and not candidate.is_native:
        problems.append(
            f"--deterministic is for quire's own model families, and this is {candidate.served_by}, whose layers may"
            " compute a row otherwise in another batch"
        )
    gpu = (
        None if not runs_triton(place.device.type) else place.name if place.gpu is not None else "Triton's interpreter"
    )
    problems += parallel_problems(config, candidate, device=gpu, device_type=place.device.type)
    if problem := adapter_problem(config.adapters, candidate):
        problems.append(problem)
    if config.pooling is not None:
        problems += _pooling_problems(config, candidate, place)
    if config.model.quantization == "int8" and place.gpu is not None:
        problems.append(
            f"--quantization int8 is for CPUs, and the model would run on {place.name}: use fp8, leave it out, or take"
            " --device cpu"
        )
    if config.model.quantization == "fp8":
        problems += _fp8_problems(config, candidate, place)
    if config.cache.kv_cache_dtype == "fp8" and not place.is_interpreted:
        problems += [problem] if (problem := kv_dtype_problem(place.gpu)) is not None else []
    return problems


def _fp8_problems(config: EngineConfig, candidate: Candidate, place: Place) -> list[str]:
    problems = []
    if not place.is_interpreted and (problem := fp8_weights_problem(place.gpu, config.model.dtype)) is not None:
        problems.append(problem)
    if isinstance(candidate, NativeCandidate) and (experts := candidate.shape.experts) is not None:
        problems.append(
            f"--quantization fp8 does not quantize mixtures of experts, and {candidate.shape.architecture} has"
            f" {experts.num_experts} experts: leave it out"
        )
    return problems


def _pooling_problems(config: EngineConfig, candidate: Candidate, place: Place) -> list[str]:
    problems = []
    if config.speculation is not None:
        problems.append(
            "--spec-method and --speculative-config are for engines that generate text, and this model serves"
            " embeddings or scores: leave the flag out, or add --runner generate to serve its text"
        )
    if not candidate.is_native:
        problems.append(
            f"embeddings and scores are for quire's own model families, and this is {candidate.served_by};"
            " --runner generate serves its text"
        )
    if runs_triton(place.device.type):
        problems.append(
            f"embeddings and scores are for CPUs in this version, and the model would run on {place.name}: use"
            " --device cpu, or --runner generate to serve its text"
        )
    return problems


def attention_problem(
    config: EngineConfig, shape: ModelShape, place: Place, dtype: torch.dtype, cache_dtype: torch.dtype
) -> str | None:
    """Return why a layer of the model has no attention kernel; None if all have one."""
    for heads in dict.fromkeys(shape.layer_heads):
        problem = unsupported(
            device_type=place.device.type,
            head_dim=heads.head_dim,
            group=heads.heads // heads.kv_heads,
            block_size=config.cache.block_size,
            dtype=dtype,
            cache_dtype=cache_dtype,
            chunked=shape.chunked and shape.kv_groups != (None,),
        )
        if problem is not None:
            return f"{shape.architecture} cannot be served on {place.name}: {problem}"
    return None
