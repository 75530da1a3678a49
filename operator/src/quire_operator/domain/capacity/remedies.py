"""Changes of a spec that make a model fit, for ``quire plan``, ``quire up`` and the operator's capacity check."""

from dataclasses import replace

from quire_common.kv_size import CacheLimits
from quire_common.model_memory import ModelFacts
from quire_common.quantities import format_bytes
from quire_operator.domain.capacity.fit import Fits, Footprint, TooSmall, fit, measure
from quire_operator.domain.capacity.ranks import parallelism_problem
from quire_operator.domain.resource import Parallelism, Spec

_TENSOR_SIZES = (2, 4, 8)
"""The usual numbers of GPUs of one machine."""


def remedies(spec: Spec, needs: Footprint, limits: CacheLimits, small: TooSmall, *, shared: bool) -> list[str]:
    """Return changes, each of which is sufficient. ``shared`` is True if all replicas use the same memory."""
    advice: list[str] = []
    one_sequence = needs.sequence_bytes(limits)
    size = spec.engine.kv_cache.size_bytes
    if size is not None and small.kv_cache_bytes >= one_sequence:
        mebibytes = small.kv_cache_bytes // 2**20
        advice.append(f"lower spec.engine.kvCache.size to {mebibytes}Mi")
    elif size is not None and size < one_sequence:
        advice.append(f"raise spec.engine.kvCache.size to {-(-one_sequence // 2**20)}Mi")
    if 0 < small.longest_sequence_tokens < limits.sequence_tokens:
        advice.append(f"set spec.engine.maxModelLength to {small.longest_sequence_tokens} or less")
    if small.fits_without_draft:
        advice.append("remove spec.engine.speculation, whose draft model needs memory")
    if shared and spec.max_replicas > 1:
        field = "spec.autoscaling.maxReplicas" if spec.autoscaling else "spec.replicas"
        advice.append(f"lower {field}, because the replicas share the memory")
    return [*advice, f"give a replica {format_bytes(small.needed_bytes)}"]


def gpus_that_fit(spec: Spec, facts: ModelFacts, *, gpu_bytes: int) -> int | None:
    """Return how many GPUs of ``gpu_bytes`` each would run the model, if they are more than now and one machine's.

    Return None if none of the usual numbers does, if ranks exclude another field of the spec or its kind of GPU, or if
    the spec has stages or several pods, whose numbers a user has chosen.
    """
    if spec.parallelism.pipeline > 1 or spec.parallelism.is_group:
        return None
    if spec.engine.adapters is not None or spec.draft is not None or spec.resources.has_parts_of_gpus:
        return None
    for tensor in _TENSOR_SIZES:
        divided = replace(spec, parallelism=Parallelism(tensor=tensor))
        if tensor <= spec.parallelism.tensor or parallelism_problem(divided.parallelism, facts.config) is not None:
            continue
        needs, limits = measure(divided, facts, device="gpu", cpu_multiplies_bfloat16=True)
        if isinstance(fit(divided, needs, limits, memory_bytes=tensor * gpu_bytes), Fits):
            return tensor
    return None
