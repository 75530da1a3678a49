"""What the engine was told to be: parsed once from flags and environment, validated with every reason, never changed.

What is learnt later (how many blocks fit) lives in ``core.kv_layout.KVCacheLayout``. Each part goes only to the room
that needs it; nobody but ``__main__`` and the process entry holds the root.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from quire_common.tls import TlsFiles
from quire_engine.cpu.limits import CpuLevel, CpuLimits

DType = Literal["auto", "float32", "float16", "bfloat16"]
KVCacheDType = Literal["auto", "fp8"]
Quantization = Literal["none", "int8"]
DeviceName = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model, and in which arithmetic."""

    path: Path
    dtype: DType = "auto"
    quantization: Quantization = "none"
    """What the weights of linear layers are rounded to as they are loaded."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """``dummy`` fills the weights at random, for benchmarks of a shape."""
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    """Who runs the layers; ``auto`` takes a family of our own where there is one, transformers otherwise."""
    trust_remote_code: bool = False
    """Whether code that lies in the model folder may run, in the engine process."""
    max_model_len: int | None = None
    """None takes the model's own limit, or what the KV cache holds if that is less."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    """None takes a share of the memory this process may use."""
    kv_cache_dtype: KVCacheDType = "auto"
    """``auto`` holds keys and values in the arithmetic's own type."""
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    swap_space_bytes: int = 0
    """Host memory for the blocks of preempted sequences, beside the KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    """``priority`` runs the request with the smallest number first, and those of one number in order of arrival;
    ``fair`` the tenant that has been served least."""
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    """How a sequence gives up its blocks when there are none left; ``auto`` takes what costs less time."""
    max_generation_stall_seconds: float = 0.25
    """What a step with prompts in it may take while others generate; 0 is no bound."""
    check_integrity: bool = False
    """Count blocks, rows and queues after every step, and end the engine process where they do not add up: slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Where the model runs, and how its kernels are launched there."""

    device: DeviceName = "auto"
    enforce_eager: bool = False
    """No CUDA graphs."""
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """Numbers of decoding sequences, in any order; None takes ``runner.graph_sizes``' own."""
    cpu_level: CpuLevel | Literal["auto"] = "auto"
    """The highest level of instructions that may be used; ``auto`` is the highest that works."""
    deterministic: bool = False
    """A row's result depends on nothing but the row: not on its batch, nor on how its prompt was cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How text becomes tokens, beyond what the model folder says."""

    chat_template: Path | None = None
    """A file with a Jinja template in place of the model's own."""
    generation_config: Literal["auto", "none"] = "auto"
    """``auto`` takes sampling defaults from the folder's generation_config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionOptions:
    """How much may wait before new requests are told to come back later."""

    max_queued_requests: int = 1024
    max_queued_tokens: int | None = None
    """Prompt tokens that wait for their first step; None takes eight times what the KV cache holds."""
    max_queue_seconds: float | None = None
    """A request that has not run by then is given up with 503; None waits for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessOptions:
    """Files of keys, one a line, read again when they change.

    Without its file a group of routes is open to all; the admin routes then answer to this host only.
    """

    api_key_file: Path | None = None
    admin_key_file: Path | None = None
    metrics_key_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcessOptions:
    """When the engine process counts as lost."""

    hang_timeout_seconds: float = 60.0
    """Without a step while requests are under way, or without an answer while it is idle."""
    start_timeout_seconds: float = 900.0
    """From start to ready; also what a replacement may take in all, with every attempt at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    requests: bool = False
    """One line a request: never the prompt, never the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    host: str = "0.0.0.0"
    port: int = 8000
    uds: Path | None = None
    """A Unix socket, instead of host and port."""
    allowed_origins: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    """The first is the name in answers; empty takes the folder's name."""
    drain_timeout_seconds: float = 120.0
    lenient: bool = False
    max_body_bytes: int = 8 * 2**20
    max_logprobs: int = 20
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)
    access: AccessOptions = field(default_factory=AccessOptions)
    tls: TlsFiles | None = None
    otlp_traces_endpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The root: what the two processes of an engine are made from."""

    model: ModelOptions
    cache: CacheOptions
    scheduler: SchedulerOptions
    server: ServerOptions
    threads: int
    """Compute threads of the engine process; the CPU quota of the cgroup unless a flag says otherwise."""
    device: DeviceOptions = field(default_factory=DeviceOptions)
    text: TextOptions = field(default_factory=TextOptions)
    log: LogOptions = field(default_factory=LogOptions)
    engine_process: EngineProcessOptions = field(default_factory=EngineProcessOptions)
    cpu: CpuLimits | None = None
    """What the engine process may use of the CPU, as it was found by trials; None where there are none."""
