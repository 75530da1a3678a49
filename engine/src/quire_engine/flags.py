"""From a command line and an environment to an ``EngineConfig``, or to ``FlagsError`` with every problem.

The flags themselves are in ``flag_table``. This module reads no file except the cgroup's CPU quota.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, TypeVar

from quire_common.contract.engine import ENVIRONMENT_PREFIX, FLAGS_ONLY_VARIABLE
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
    ModelTextOptions,
    ParallelOptions,
    ServerOptions,
)
from quire_engine.core.options import SchedulerOptions
from quire_engine.cpu_quota import usable_cpus
from quire_engine.flag_table import FLAGS
from quire_engine.model_folder import ConfigOverrides
from quire_engine.pooling_setup import pooler_options, pooler_problems
from quire_engine.speculation_flags import speculation_options, speculation_problems

Options = TypeVar("Options", bound=Any)
_NAMES = {flag.name for group in FLAGS.groups.values() for flag in group}
MOST_RANKS = 64
"""The most processes that run a model together."""
_OF_ADAPTERS = ("lora-modules", "adapters-file", "adapter-roots")
"""The flags that imply --enable-lora."""
_IN_MEMORY_PER_SLOT = 4
"""The adapters in host memory for each slot, unless a flag sets them."""


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> EngineConfig:
    """Return the configuration, or raise ``FlagsError`` with every problem."""
    values = FLAGS.read(argv, environ)
    if environ.get(FLAGS_ONLY_VARIABLE):
        values.problems.extend(
            f"the variable {name} is set, but in pods of the operator only the LLMDeployment sets flags: use "
            "spec.engine, and remove the variable from the image and from what envFrom of podTemplate names"
            for name in sorted(environ)
            if name.startswith(ENVIRONMENT_PREFIX)
        )
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


def _parallel_options(values: FlagValues) -> ParallelOptions:
    """Return the options; a value that could not be read counts as the default, as a timeout of 0 does."""
    options = _options(
        ParallelOptions,
        values,
        {
            "tensor": "tensor-parallel-size",
            "pipeline": "pipeline-parallel-size",
            "nodes": "nnodes",
            "secret_file": "group-secret-file",
        },
    )
    timeout = values["distributed-timeout-seconds"] or options.join_timeout_seconds
    return replace(options, join_timeout_seconds=timeout)


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
    overrides = ConfigOverrides(
        config=values["hf-overrides"] or {}, generation=values["override-generation-config"] or {}
    )
    return EngineConfig(
        model=replace(_options(ModelOptions, values, {"path": "model"}), overrides=overrides),
        cache=_options(CacheOptions, values),
        scheduler=_options(
            SchedulerOptions,
            values,
            {"policy": "scheduling-policy", "max_generation_stall_seconds": "max-generation-stall"},
        ),
        server=_server_options(values),
        adapters=_adapter_options(values),
        threads=max(1, (values["threads"] or usable_cpus()) // parallel.local_ranks),
        parallel=parallel,
        device=_options(DeviceOptions, values),
        speculation=speculation_options(values),
        pooler=pooler_options(values),
        text=_options(ModelTextOptions, values, {"chat_template_kwargs": "default-chat-template-kwargs"}),
        log=_options(LogOptions, values, {"level": "log-level", "format": "log-format", "requests": "log-requests"}),
        engine_process=_options(
            EngineProcessOptions,
            values,
            {"hang_timeout_seconds": "engine-hang-timeout", "start_timeout_seconds": "engine-start-timeout"},
        ),
    )


def _options(kind: type[Options], values: FlagValues, flags: Mapping[str, str] = MappingProxyType({})) -> Options:
    """Return options whose fields have the values of flags; a field whose flag is not set keeps its default.

    flags  the flags of fields with other names; fields without a flag keep their defaults
    """
    names = {field.name: flags.get(field.name, field.name.replace("_", "-")) for field in fields(kind)}
    found = {name: values[flag] for name, flag in names.items() if flag in _NAMES}
    options: Options = kind(**{name: value for name, value in found.items() if value is not None})
    return options


def _server_options(values: FlagValues) -> ServerOptions:
    options = _options(
        ServerOptions,
        values,
        {
            "served_model_names": "served-model-name",
            "drain_timeout_seconds": "drain-timeout",
            "body_memory_bytes": "body-memory",
        },
    )
    return replace(
        options,
        body_memory_bytes=max(options.body_memory_bytes, 2 * options.max_body_bytes),
        sse_keepalive_seconds=options.sse_keepalive_seconds or None,
        admission=_options(AdmissionOptions, values, {"max_queue_seconds": "max-queue-time"}),
        access=_options(AccessOptions, values, {"api_keys": "api-key"}),
        tls=_tls_files(values),
    )


def _adapter_options(values: FlagValues) -> AdapterOptions:
    options = _options(
        AdapterOptions, values, {"modules": "lora-modules", "file": "adapters-file", "roots": "adapter-roots"}
    )
    slots, in_memory = values["max-loras"], values["max-cpu-loras"]
    return replace(
        options,
        enabled=values["enable-lora"] or any(values.is_set(name) for name in _OF_ADAPTERS),
        max_cpu_loras=_IN_MEMORY_PER_SLOT * slots if in_memory is None else in_memory,
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
