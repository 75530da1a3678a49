"""What the engine was told to be: parsed once from flags and environment, validated with every reason, never changed.

What is learnt later (how many blocks fit) lives in ``core.kv_layout.KVCacheLayout``. Each part goes only to the room
that needs it; nobody but ``__main__`` and the process entry holds the root.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DType = Literal["auto", "float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model, and in which arithmetic."""

    path: Path
    dtype: DType = "auto"
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """``dummy`` fills the weights at random, for benchmarks of a shape."""
    max_model_len: int | None = None
    """None takes the model's own limit, or what the KV cache holds if that is less."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    """None takes a share of the memory this process may use."""
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: Literal["fcfs", "priority"] = "fcfs"
    """``priority`` runs the request with the smallest number first, and those of one number in order of arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    host: str = "0.0.0.0"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    """The first is the name in answers; empty takes the folder's name."""
    drain_timeout_seconds: float = 120.0
    lenient: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The root: what the two processes of an engine are made from."""

    model: ModelOptions
    cache: CacheOptions
    scheduler: SchedulerOptions
    parallel: ParallelOptions
    server: ServerOptions
    threads: int
    """Compute threads of the engine process; the CPU quota of the cgroup unless a flag says otherwise."""
