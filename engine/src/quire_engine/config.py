"""The configuration of the engine: parsed once from flags and environment, validated with all reasons, never changed.

What is known only later (how many blocks fit) is in ``core.kv_layout.KVCacheLayout``. Each part is passed only to the
package that needs it; only ``__main__`` and the process entry have the whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quire_common.tls import TlsFiles
from quire_engine.core.options import SchedulerOptions
from quire_engine.cpu.limits import CpuLevel, CpuLimits
from quire_engine.model_folder import NO_OVERRIDES, ConfigOverrides

DType = Literal["auto", "float32", "float16", "bfloat16"]
KVCacheDType = Literal["auto", "fp8"]
Quantization = Literal["none", "int8", "fp8"]
DeviceName = Literal["auto", "cpu", "cuda", "rocm"]
GPU_DEVICES = ("cuda", "rocm")
SpeculationMethod = Literal["ngram", "draft_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The model, and the data types in which it is computed."""

    path: Path
    """A folder, or the name of a model to download, such as org/name."""
    revision: str | None = None
    download_dir: Path | None = None
    """The folder of downloaded models; None means the cache of the user."""
    dtype: DType = "auto"
    quantization: Quantization = "none"
    """The type to which the weights of linear layers are rounded as they are loaded."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """``dummy`` uses random weights, for benchmarks of a shape."""
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    """The implementation of the layers; ``auto`` uses a native family if there is one, else transformers."""
    trust_remote_code: bool = False
    """True permits code from the model folder to run in the engine process."""
    overrides: ConfigOverrides = NO_OVERRIDES
    """Values that replace those of config.json and generation_config.json."""
    max_model_len: int | None = None
    """None means the model's own limit, or that of the KV cache if it is lower."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Options of the KV cache."""

    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    """None means a share of the memory that this process may use."""
    kv_cache_dtype: KVCacheDType = "auto"
    """``auto`` stores keys and values in the data type of the computation."""
    gpu_memory_utilization: float = 0.9
    swap_space_bytes: int = 0
    """Host memory for the blocks of preempted sequences, in addition to the KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Options of speculative decoding."""

    method: SpeculationMethod = "ngram"
    """``ngram`` is prompt lookup."""
    model: Path | None = None
    """The draft model: a folder, or the name of a model to download. None for prompt lookup."""
    required: bool = True
    """False lets the engine start without speculation if the draft model cannot be used."""
    max_tokens: int = 8
    """The most drafts of a sequence in a step, less than a block of the KV cache; the engine chooses how many."""
    shortest_match: int = 2
    longest_match: int = 4
    """The numbers of recent tokens that must have occurred before; the longest match is preferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerOptions:
    """The flags that decide whether an engine generates or pools, and how it pools."""

    runner: Literal["auto", "generate", "pooling"] = "auto"
    """``auto`` pools if the model's folder says that it is an embedding model or a reranker."""
    mean: bool | None = None
    """True pools the mean of all tokens, False the last token; None does what the folder says."""
    normalize: bool | None = None
    """True scales embeddings to length 1; None does what the folder says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSetup:
    """The task of an engine that pools, as found from its flags and the model's folder."""

    task: Literal["embed", "score"] = "embed"
    """``score`` is for rerankers, whose score is the logit of one token, or its difference to that of another."""
    mean: bool = False
    normalize: bool = True
    hidden_size: int
    """The dimensions of the embeddings."""
    dimensions: tuple[int, ...] = ()
    """The numbers of dimensions to which embeddings may be cut; empty allows all."""
    yes_token: int | str = ""
    """The token of a relevant document, as its id or its text; for rerankers only."""
    no_token: int | str | None = None
    """The token of an irrelevant document; None where only the other logit counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """The device of the model, and how kernels are launched there."""

    device: DeviceName = "auto"
    enforce_eager: bool = False
    """True disables CUDA graphs."""
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """The numbers of decoding sequences to capture, in any order; None uses those of ``runner.graph_sizes``."""
    cpu_level: CpuLevel | Literal["auto"] = "auto"
    """The highest level of instructions that may be used; ``auto`` is the highest that works."""
    deterministic: bool = False
    """True makes a row's result depend on the row only: not on its batch, nor on the chunks of its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """The division of the model among ranks: processes that each have a part of it."""

    tensor: int = 1
    """The number of ranks that share each layer."""
    pipeline: int = 1
    """The number of stages, which each have a part of the layers."""
    nodes: int = 1
    node_rank: int = 0
    """The number of this node; node 0 has rank 0, which schedules and serves the API."""
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    join_timeout_seconds: float = 600.0
    """The longest time at a start to wait for the other nodes."""
    secret_file: Path | None = None
    """The file of the group's secret; None means the variable ``SECRET_VARIABLE``."""

    @property
    def ranks(self) -> int:
        """The number of processes that run the model together."""
        return self.tensor * self.pipeline

    @property
    def local_ranks(self) -> int:
        """The number of ranks on each node."""
        return self.ranks // self.nodes

    @property
    def flags(self) -> str:
        """The sizes as flags, for messages."""
        sizes = {"--tensor-parallel-size": self.tensor, "--pipeline-parallel-size": self.pipeline}
        return " ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)


SECRET_VARIABLE = "QUIRE_GROUP_SECRET"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTextOptions:
    """Options of the text side that replace files of the model folder."""

    tokenizer: Path | None = None
    """The folder of the tokenizer; None means the model's."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template for requests that do not set them."""
    chat_template: Path | None = None
    """A file with a Jinja template that replaces the model's own, or the name of one of the model's templates."""
    tool_call_parser: str = "auto"
    """The format of tool calls, one of ``text.answers.formats``; ``auto`` finds it from the chat template."""
    reasoning_parser: str = "auto"
    """The format of reasoning, likewise."""
    generation_config: Literal["auto", "none"] = "auto"
    """``auto`` reads sampling defaults from the folder's generation_config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionOptions:
    """The bounds of the queue, above which new requests get 429 with Retry-After."""

    max_queued_requests: int = 1024
    max_queued_tokens: int | None = None
    """Prompt tokens of queued requests; None means eight times the tokens of the KV cache."""
    max_queue_seconds: float | None = None
    """A request that is still queued after this time fails with 503; None means that there is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessOptions:
    """Files of API keys, one per line, which are reloaded when they change.

    A group of routes without its file is open to all clients, except the admin routes: these are open to this host.
    """

    api_keys: tuple[str, ...] = ()
    """Keys from the command line, without names and limits, instead of a file."""
    api_key_file: Path | None = None
    admin_key_file: Path | None = None
    metrics_key_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcessOptions:
    """The timeouts after which the engine process counts as lost, and its restarts."""

    hang_timeout_seconds: float = 60.0
    """The longest silence: without a step while requests run, without an answer to a ping otherwise. A step that is
    expected to be long may take longer."""
    start_timeout_seconds: float = 900.0
    """The longest time from start to ready; for a replacement, of all attempts together."""
    restart_delays_seconds: tuple[float, ...] = (0.0, 1.0, 5.0, 15.0, 30.0)
    """The delays before the first, second, … restart within ``restart_window_seconds``; more restarts are not made."""
    restart_window_seconds: float = 600.0
    close_timeout_seconds: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Options of the log of both processes."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    requests: bool = False
    """True logs one line per request, without prompt and answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP server."""

    host: str = "0.0.0.0"
    port: int = 8000
    uds: Path | None = None
    """The path of a Unix socket, which replaces host and port."""
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    """The prefix of paths that a proxy in front of the server adds."""
    served_model_names: tuple[str, ...] = ()
    """The names of the model for clients; answers contain the first. Empty means the folder's name."""
    drain_timeout_seconds: float = 120.0
    lenient: bool = False
    max_body_bytes: int = 8 * 2**20
    body_memory_bytes: int = 256 * 2**20
    """The bytes of all bodies that are being read or prepared."""
    sse_keepalive_seconds: float | None = None
    """The time after which a stream without events gets a comment, also before its first token; None sends none."""
    max_logprobs: int = 20
    resumable_streams: bool = False
    """True where gateways get what they need to continue streams on another engine."""
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)
    access: AccessOptions = field(default_factory=AccessOptions)
    tls: TlsFiles | None = None
    otlp_traces_endpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """Options of low-rank adapters (LoRA)."""

    enabled: bool = False
    max_loras: int = 1
    """The slots on the device: the adapters that a step can use."""
    max_lora_rank: int = 16
    max_cpu_loras: int = 4
    """The adapters in host memory."""
    modules: tuple[tuple[str, str], ...] = ()
    """The names and sources of adapters that are loaded at the start."""
    file: Path | None = None
    """The file of ``quire_common.contract.adapters_file``, which is read again when it changes."""
    roots: tuple[Path, ...] = ()
    """The folders below which requests may load adapters; empty refuses such requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The whole configuration of the two processes of an engine."""

    model: ModelOptions
    cache: CacheOptions
    scheduler: SchedulerOptions
    server: ServerOptions
    threads: int
    """Compute threads of the engine process, or of each rank; the CPU quota of the cgroup unless a flag sets them."""
    device: DeviceOptions = field(default_factory=DeviceOptions)
    speculation: SpeculationOptions | None = None
    pooler: PoolerOptions = field(default_factory=PoolerOptions)
    pooling: PoolingSetup | None = None
    """The task of an engine that pools; None if it generates. ``pooling_setup`` finds it."""
    adapters: AdapterOptions = field(default_factory=AdapterOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    text: ModelTextOptions = field(default_factory=ModelTextOptions)
    log: LogOptions = field(default_factory=LogOptions)
    engine_process: EngineProcessOptions = field(default_factory=EngineProcessOptions)
    cpu: CpuLimits | None = None
    """The CPU instructions that the engine process may use, as found by trials; None without trials."""
