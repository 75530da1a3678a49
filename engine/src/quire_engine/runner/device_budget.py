"""The memory of a GPU that is left for the KV cache: arithmetic on the measurements of ``profiling``.

``--gpu-memory-utilization`` is the share of the GPU's memory that this process may use, as in vLLM; another process on
the same GPU has its own share. Memory that others already use is not available, so the KV cache gets the smaller of the
remaining share and the free memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from quire_engine.config import CacheOptions
from quire_engine.runner.cache_size import Budget, CacheDemand, CacheSize, CacheTooSmall, divide_budget
from quire_engine.runner.memory import AvailableMemory

_KEPT_FREE = 256 << 20
"""The reserve if all free memory may be used: for later allocations of the driver and libraries, and for rounding.
torch allocates memory in steps of 2 MiB, so each layer's keys and values may take that much more: 160 MiB with 80
layers."""
_LEAST_BYTES_PER_FURTHER_GRAPH = 2 << 20
"""The launch parameters of a captured graph after the first, whose working memory serves all. A measurement of a few
graphs shows less if they fitted into memory that the driver had in reserve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """The bytes of a GPU's memory with everything except the KV cache and the graphs."""

    total: int
    free: int
    before: int
    """The bytes used before this process loaded anything: CUDA's own part, and other processes'."""
    weights: int
    activations: int
    """The bytes of the largest step in addition to the weights, and of the runner's buffers."""
    graphs: int
    """The expected bytes of CUDA graphs."""

    @property
    def own(self) -> int:
        return self.weights + self.activations + self.graphs


def graphs_bytes(measured: Sequence[int], count: int) -> int:
    """Return the bytes of ``count`` graphs if capturing the largest ones took ``measured``, in order."""
    if not count or not measured:
        return 0
    first, further = measured[0], measured[1:]
    mean = sum(further) / len(further) if further else 0.0
    return first + (count - 1) * max(_LEAST_BYTES_PER_FURTHER_GRAPH, ceil(mean))


def size_device_cache(
    demand: CacheDemand, options: CacheOptions, use: DeviceUse, host: AvailableMemory | None
) -> CacheSize | CacheTooSmall:
    """Return the number of blocks on the device and in host memory, and the longest sequence."""
    if host is not None and options.swap_space_bytes > host.size:
        return CacheTooSmall(
            message=f"--swap-space-bytes {options.swap_space_bytes} must fit into the {host.size:,} bytes of host"
            f" memory that are available: at most {host.size} would fit"
        )
    budget = _budget(demand, options, use)
    if isinstance(budget, CacheTooSmall):
        return budget
    return divide_budget(demand, budget, options.swap_space_bytes)


def _budget(demand: CacheDemand, options: CacheOptions, use: DeviceUse) -> Budget | CacheTooSmall:
    # One block of each group is for padding, see ``kv_cache.allocate``.
    spare = sum(group.block_bytes for group in demand.groups)
    takeable = use.free - use.graphs - spare - _KEPT_FREE
    if options.kv_cache_memory_bytes is not None:
        if options.kv_cache_memory_bytes > takeable:
            return CacheTooSmall(message=_does_not_fit(options.kv_cache_memory_bytes, takeable, use))
        return Budget(size=options.kv_cache_memory_bytes, source="--kv-cache-memory-bytes", is_given=True)
    share = int(use.total * options.gpu_memory_utilization) - use.own - spare
    source = f"--gpu-memory-utilization {options.gpu_memory_utilization:g} of {_parts(use)}"
    if takeable < share:
        source = f"the free part of {_parts(use)}"
    budget = Budget(size=max(0, min(share, takeable)), source=source, is_given=False)
    more = ["--max-num-batched-tokens of less", "a GPU with more memory"]
    if options.kv_cache_dtype == "auto":
        more.insert(0, "--kv-cache-dtype fp8")

    def remedies(needed: int) -> list[str]:
        """Return flags: a larger share, if that memory is free, and remedies that free any memory."""
        percent = ceil(100 * (use.own + spare + needed) / use.total)
        larger = [f"--gpu-memory-utilization {percent / 100:g}"] if needed <= takeable and percent <= 100 else []
        return larger + more

    return replace(budget, remedies=remedies)


def _does_not_fit(asked: int, takeable: int, use: DeviceUse) -> str:
    advice = f"at most {takeable} would fit" if takeable > 0 else "use a GPU with more memory, or one that is free"
    return f"--kv-cache-memory-bytes {asked} does not fit into the free part of {_parts(use)}: {advice}"


def _parts(use: DeviceUse) -> str:
    return (
        f"{use.total:,} bytes, of which weights take {use.weights:,}, the largest step {use.activations:,}, CUDA graphs"
        f" {use.graphs:,}, and CUDA itself and other processes took {use.before:,} before"
    )
