"""The reasons why a model, an option or a build of torch cannot be used with several ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch

from quire_engine.config import EngineConfig, ParallelOptions
from quire_engine.model.candidate import Candidate
from quire_engine.model.config import ModelConfig
from quire_engine.model.model_part import part_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCollectives:
    """The libraries of torch.distributed that this torch has, over which ranks exchange data."""

    torch_version: str
    nccl: bool
    gloo: bool


def find_collectives() -> FoundCollectives:
    distributed = torch.distributed
    built = distributed.is_available()
    return FoundCollectives(
        torch_version=str(torch.__version__),
        nccl=built and distributed.is_nccl_available(),
        gloo=built and distributed.is_gloo_available(),
    )


def parallel_problems(
    config: EngineConfig,
    candidate: Candidate,
    *,
    device: str | None,
    device_type: str = "cpu",
    find: Callable[[], FoundCollectives] = find_collectives,
) -> Iterator[str]:
    """Yield why the ranks cannot be started; nothing for one rank.

    device  the name of the GPU that would be used; None for the CPU
    find    returns the parts of torch.distributed that this torch has
    """
    parallel = config.parallel
    if parallel.ranks == 1:
        return
    flag = parallel.flags
    if problem := collectives_problem(parallel, device_type, find()):
        yield f"{flag} cannot be used on {device or 'this CPU'}: {problem}"
    if not candidate.is_native:
        yield f"{flag} is for quire's own model families, and this is {candidate.served_by}: leave it out"
        return
    yield from part_problems(cast("ModelConfig", candidate.shape), tensor=parallel.tensor, pipeline=parallel.pipeline)
    if config.pooling is not None:
        yield f"{flag} is for models that generate text, and this one pools (embeddings, scores): leave it out"
    if config.adapters.enabled:
        yield f"{flag} and --enable-lora exclude each other: slots for adapters are not divided among ranks yet"
    if config.speculation is not None and config.speculation.method != "ngram":
        yield (
            f"{flag} and --spec-model exclude each other: the drafts of a model are known only inside a step of rank 0;"
            " --spec-method ngram works"
        )


def collectives_problem(parallel: ParallelOptions, device_type: str, found: FoundCollectives) -> str | None:
    """Return why ranks on such devices cannot exchange data with this torch, or None."""
    if device_type == "cuda" and not found.nccl:
        return (
            f"torch {found.torch_version} is built without NCCL (RCCL for GPUs of AMD), by which GPUs exchange data:"
            " install a build with it"
        )
    if not found.gloo and (parallel.nodes > 1 or device_type != "cuda"):
        return f"torch {found.torch_version} is built without gloo, by which processes exchange data"
    return None
