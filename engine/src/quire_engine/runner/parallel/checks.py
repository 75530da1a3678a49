"""The reasons why a model or an option cannot be used with several ranks."""

from collections.abc import Callable, Iterator
from typing import cast

from quire_engine.config import EngineConfig, ParallelOptions
from quire_engine.model.candidate import Candidate
from quire_engine.model.config import ModelConfig
from quire_engine.model.model_part import part_problems
from quire_engine.runner.parallel.collectives import FoundCollectives, collectives_problem, find_collectives


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
    if device is not None:
        yield from device_problems(parallel, device, device_type, find)
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


def device_problems(
    parallel: ParallelOptions, device: str, device_type: str, find: Callable[[], FoundCollectives]
) -> Iterator[str]:
    """Yield why GPUs cannot run the ranks."""
    if problem := collectives_problem(device_type, find()):
        yield f"{parallel.flags} cannot be used on {device}: {problem}"
