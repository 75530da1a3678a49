"""From a command line and an environment to an ``EngineConfig``, or to ``FlagsError`` with every problem.

The flags themselves are in ``flag_table``. This module reads no file except the cgroup's CPU quota.
"""

from collections.abc import Iterator, Mapping, Sequence

from quire_common.flags.table import FlagValues
from quire_common.tls import TlsFiles
from quire_engine.config import (
    GPU_DEVICES,
    SECRET_VARIABLE,
    AccessOptions,
    AdapterOptions,
    AdmissionOptions,
    CacheOptions,
    DeviceOptions,
    EngineConfig,
    EngineProcessOptions,
    LogOptions,
    ModelOptions,
    ParallelOptions,
    SchedulerOptions,
    ServerOptions,
    TextOptions,
)
from quire_engine.cpu_quota import usable_cpus
from quire_engine.flag_table import FLAGS
from quire_engine.model_folder import ConfigOverrides
from quire_engine.pooling_setup import pooler_options, pooler_problems
from quire_engine.speculation_flags import speculation_options, speculation_problems

MOST_RANKS = 64
"""The most processes that run a model together."""
_OF_ADAPTERS = ("lora-modules", "adapters-file", "adapter-roots")
"""The flags that imply --enable-lora."""
_IN_MEMORY_PER_SLOT = 4
"""The adapters in host memory for each slot, unless a flag sets them."""


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> EngineConfig:
    """Return the configuration, or raise ``FlagsError`` with every problem."""
    values = FLAGS.read(argv, environ)
    values.problems.extend(_contradictions(values))
    if (values["nnodes"] or 1) > 1 and not values.is_set("group-secret-file") and not environ.get(SECRET_VARIABLE):
        values.problems.append(
            f"--nnodes {values['nnodes']} needs a secret that all nodes share: set --group-secret-file, or the variable"
            f" {SECRET_VARIABLE}"
        )
    values.check()
    return _configuration(values)


def _contradictions(values: FlagValues) -> Iterator[str]:
    """Yield what is wrong with flags in combination."""
    if (values["data-parallel-size"] or 1) > 1:
        yield (
            f"--data-parallel-size {values['data-parallel-size']}: an engine serves one copy of its model, so 1 is the"
            " only value; start several engines, and let quire-gateway balance requests between them (spec.replicas)"
        )
    if values.is_set("api-key") and values.is_set("api-key-file"):
        yield "--api-key and --api-key-file contradict each other: put all keys into the file"
    for name in ("ssl-keyfile", "ssl-keyfile-password-file", "ssl-ca-certs"):
        if values.is_set(name) and not values.is_set("ssl-certfile"):
            yield f"--{name} requires --ssl-certfile: there is no TLS without the server's certificate"
    tokens, sequences = values["max-num-batched-tokens"], values["max-num-seqs"]
    if tokens is not None and sequences is not None and tokens < sequences:
        yield (
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {sequences}: "
            "a step must have room for one token of each sequence"
        )
    if values["preemption-mode"] == "swap" and values["swap-space-bytes"] == 0:
        yield (
            "--preemption-mode swap has no swap space: set it, for example --swap-space-bytes 1GiB, or use "
            "--preemption-mode auto"
        )
    yield from speculation_problems(values)
    yield from pooler_problems(values)
    yield from _adapter_contradictions(values)
    yield from _parallel_contradictions(values)
    yield from _device_contradictions(values)


def _adapter_contradictions(values: FlagValues) -> Iterator[str]:
    """Yield what is wrong with flags of adapters."""
    if values["enable-lora"] is False and values.is_set("enable-lora"):
        for name in _OF_ADAPTERS:
            if values.is_set(name):
                yield f"--{name} and --no-enable-lora contradict each other: remove one of them"
    slots, in_memory = values["max-loras"], values["max-cpu-loras"]
    if slots is not None and in_memory is not None and in_memory < slots:
        yield f"--max-cpu-loras {in_memory} is less than --max-loras {slots}: what is in a slot is in host memory too"
    names = [name for name, _ in values["lora-modules"] or ()]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"--lora-modules {name}: the name is given twice"
    for name in names:
        if name in (values["served-model-name"] or ()):
            yield f"--lora-modules {name}: --served-model-name gives this name to the base model"


def _parallel_contradictions(values: FlagValues) -> Iterator[str]:
    """Yield what is wrong with the division of the model among ranks and nodes."""
    parallel = _parallel_options(values)
    yield from _node_contradictions(parallel)
    ranks, flags = parallel.ranks, parallel.flags
    if ranks == 1:
        return
    if ranks > MOST_RANKS:
        yield f"{flags} are {ranks} processes: at most {MOST_RANKS} can run a model together"
    if values["model-impl"] == "transformers":
        yield (
            f"{flags} is for quire's own model families, and --model-impl transformers selects other code: remove one"
            " of them"
        )
    threads = values["threads"]
    if threads is not None and threads < parallel.local_ranks:
        yield f"--threads {threads} is less than one for each of the {parallel.local_ranks} ranks of {flags}"


def _node_contradictions(parallel: ParallelOptions) -> Iterator[str]:
    nodes, ranks = parallel.nodes, parallel.ranks
    if parallel.node_rank >= nodes:
        yield f"--node-rank {parallel.node_rank}: with --nnodes {nodes}, nodes have the numbers 0 to {nodes - 1}"
    if ranks % nodes:
        yield (
            f"--nnodes {nodes} does not divide the {ranks} processes of --tensor-parallel-size {parallel.tensor} times"
            f" --pipeline-parallel-size {parallel.pipeline}: every node has as many"
        )
    if parallel.master_port + nodes - 1 > 65535:
        yield f"--master-port {parallel.master_port}: the {nodes} nodes use this port and those after it, up to 65535"


def _parallel_options(values: FlagValues) -> ParallelOptions:
    """Return the options; a value that could not be read counts as the default."""
    standard = ParallelOptions()
    return ParallelOptions(
        tensor=values["tensor-parallel-size"] or 1,
        pipeline=values["pipeline-parallel-size"] or 1,
        nodes=values["nnodes"] or 1,
        node_rank=values["node-rank"] or 0,
        master_addr=values["master-addr"] or standard.master_addr,
        master_port=values["master-port"] or standard.master_port,
        join_timeout_seconds=values["distributed-timeout-seconds"] or standard.join_timeout_seconds,
        secret_file=values["group-secret-file"],
        disable_custom_all_reduce=values["disable-custom-all-reduce"] or False,
    )


def _device_contradictions(values: FlagValues) -> Iterator[str]:
    """Yield what is wrong with flags of the device, on every machine."""
    device, sizes = values["device"], values["cudagraph-capture-sizes"]
    on_cpu, on_gpu = device == "cpu", device in GPU_DEVICES
    if on_cpu and values["kv-cache-dtype"] == "fp8":
        yield "--kv-cache-dtype fp8 needs a GPU, and --device is cpu: remove one of them"
    if values["quantization"] == "int8" and on_gpu:
        yield f"--quantization int8 is for CPUs, and --device is {device}: use fp8, or remove one of them"
    if values["quantization"] == "fp8":
        if on_cpu:
            yield "--quantization fp8 needs a GPU, and --device is cpu: use int8, or remove one of them"
        if device == "rocm":
            yield "--quantization fp8 is for GPUs of NVIDIA in this version, and --device is rocm: remove one of them"
        if values["deterministic"]:
            yield (
                "--quantization fp8 and --deterministic exclude each other, because fp8 products are the libraries': "
                "remove one of them"
            )
    if sizes and on_cpu:
        yield "--cudagraph-capture-sizes is for a GPU, and --device is cpu: remove one of them"
    if sizes and values["enforce-eager"]:
        yield "--cudagraph-capture-sizes and --enforce-eager contradict each other: remove one of them"
    most = values["max-num-seqs"]
    if sizes and most is not None and max(sizes) > most:
        yield f"--cudagraph-capture-sizes {max(sizes)}: no step has more sequences than --max-num-seqs {most}"
    if values["deterministic"] and values["model-impl"] == "transformers":
        yield (
            "--deterministic is for quire's own model families, and --model-impl transformers selects other code: "
            "remove one of them"
        )


def _configuration(values: FlagValues) -> EngineConfig:
    parallel = _parallel_options(values)
    return EngineConfig(
        model=ModelOptions(
            path=values["model"],
            revision=values["revision"],
            download_dir=values["download-dir"],
            dtype=values["dtype"],
            quantization=values["quantization"],
            load_format=values["load-format"],
            model_impl=values["model-impl"],
            trust_remote_code=values["trust-remote-code"] or False,
            overrides=ConfigOverrides(
                config=values["hf-overrides"] or {}, generation=values["override-generation-config"] or {}
            ),
            max_model_len=values["max-model-len"],
            seed=values["seed"],
        ),
        cache=CacheOptions(
            block_size=values["block-size"],
            kv_cache_memory_bytes=values["kv-cache-memory-bytes"],
            kv_cache_dtype=values["kv-cache-dtype"],
            gpu_memory_utilization=values["gpu-memory-utilization"],
            enable_prefix_caching=values["enable-prefix-caching"],
            share_prefixes=values["share-prefixes"],
            swap_space_bytes=values["swap-space-bytes"],
        ),
        scheduler=SchedulerOptions(
            max_num_seqs=values["max-num-seqs"],
            max_num_batched_tokens=values["max-num-batched-tokens"],
            policy=values["scheduling-policy"],
            preemption_mode=values["preemption-mode"],
            max_generation_stall_seconds=values["max-generation-stall"],
            check_integrity=values["check-integrity"] or False,
        ),
        server=_server_options(values),
        adapters=_adapter_options(values),
        threads=max(1, (values["threads"] or usable_cpus()) // parallel.local_ranks),
        parallel=parallel,
        device=DeviceOptions(
            device=values["device"],
            enforce_eager=values["enforce-eager"] or False,
            cudagraph_capture_sizes=values["cudagraph-capture-sizes"],
            cpu_level=values["cpu-level"],
            deterministic=values["deterministic"] or False,
        ),
        speculation=speculation_options(values),
        pooler=pooler_options(values),
        text=TextOptions(
            tokenizer=values["tokenizer"],
            chat_template_kwargs=values["default-chat-template-kwargs"] or {},
            chat_template=values["chat-template"],
            tool_call_parser=values["tool-call-parser"],
            reasoning_parser=values["reasoning-parser"],
            generation_config=values["generation-config"],
        ),
        log=LogOptions(
            level=values["log-level"], format=values["log-format"], requests=values["log-requests"] or False
        ),
        engine_process=EngineProcessOptions(
            hang_timeout_seconds=values["engine-hang-timeout"], start_timeout_seconds=values["engine-start-timeout"]
        ),
    )


def _server_options(values: FlagValues) -> ServerOptions:
    return ServerOptions(
        host=values["host"],
        port=values["port"],
        uds=values["uds"],
        allowed_origins=values["allowed-origins"] or (),
        root_path=values["root-path"] or "",
        served_model_names=values["served-model-name"] or (),
        drain_timeout_seconds=values["drain-timeout"],
        lenient=values["lenient"] or False,
        max_body_bytes=values["max-body-bytes"],
        body_memory_bytes=max(values["body-memory"], 2 * values["max-body-bytes"]),
        response_store_bytes=values["response-store-memory"],
        sse_keepalive_seconds=values["sse-keepalive-seconds"] or None,
        max_logprobs=values["max-logprobs"],
        resumable_streams=values["resumable-streams"] or False,
        admission=AdmissionOptions(
            max_queued_requests=values["max-queued-requests"],
            max_queued_tokens=values["max-queued-tokens"],
            max_queue_seconds=values["max-queue-time"],
        ),
        access=AccessOptions(
            api_keys=values["api-key"] or (),
            api_key_file=values["api-key-file"],
            admin_key_file=values["admin-key-file"],
            metrics_key_file=values["metrics-key-file"],
        ),
        tls=_tls_files(values),
        otlp_traces_endpoint=values["otlp-traces-endpoint"],
    )


def _adapter_options(values: FlagValues) -> AdapterOptions:
    slots = values["max-loras"]
    in_memory = values["max-cpu-loras"]
    return AdapterOptions(
        enabled=values["enable-lora"] or any(values.is_set(name) for name in _OF_ADAPTERS),
        max_loras=slots,
        max_lora_rank=values["max-lora-rank"],
        max_cpu_loras=_IN_MEMORY_PER_SLOT * slots if in_memory is None else in_memory,
        modules=values["lora-modules"] or (),
        file=values["adapters-file"],
        roots=values["adapter-roots"] or (),
    )


def _tls_files(values: FlagValues) -> TlsFiles | None:
    if values["ssl-certfile"] is None:
        return None
    return TlsFiles(
        certfile=values["ssl-certfile"],
        keyfile=values["ssl-keyfile"],
        keyfile_password_file=values["ssl-keyfile-password-file"],
        ca_certs=values["ssl-ca-certs"],
    )
