"""The flags of ``quire-engine``: one table, from which parser, environment, ``--help`` and JSON Schema are made.

Names are vLLM's where the meaning is the same.
"""

from typing import Any

from quire_engine.flag_kinds import (
    Choice,
    Duration,
    Flag,
    Integer,
    Kind,
    Number,
    Origin,
    PathName,
    Size,
    Switch,
    Text,
    Url,
)

ENV_PREFIX = "QUIRE_ENGINE_"


def _flag(name: str, kind: Kind, help: str, default: str | None = None, *, unset: str | None = None) -> Flag:
    """A row; ``unset`` says what it comes to mean when nobody sets it and there is no default."""
    return Flag(name=name, kind=kind, help=help, default=default, shown_default=unset)


def _many(name: str, kind: Kind, help: str, *, unset: str) -> Flag:
    return Flag(name=name, kind=kind, help=help, shown_default=unset, many=True)


# fmt: off
GROUPS: dict[str, tuple[Flag, ...]] = {
    "Model": (
        Flag(name="model", kind=PathName(), required=True,
             help="the model's folder: Hugging Face layout, safetensors weights"),
        _many("served-model-name", Text(), "names that clients may use; answers carry the first",
              unset="the folder's name"),
        _flag("dtype", Choice("auto", "float32", "float16", "bfloat16"),
              "arithmetic; auto takes on a GPU the checkpoint's own 16 bits, bfloat16 where it has none, and on a CPU "
              "what that computes fastest", "auto"),
        _flag("quantization", Choice("none", "int8"), "what the weights of linear layers are rounded to as they are "
              "loaded, on a CPU. int8, with activations rounded row by row as they come, reads half the bytes of 16 "
              "bits and multiplies faster, and costs some accuracy", "none"),
        _flag("load-format", Choice("safetensors", "dummy"),
              "dummy fills the weights at random, to benchmark a shape", "safetensors"),
        _flag("model-impl", Choice("auto", "native", "transformers"),
              "who runs the layers; auto takes quire's own family where there is one, else transformers", "auto"),
        _flag("trust-remote-code", Switch(), "let Python code that lies in the model's folder run, for models that "
              "neither quire nor transformers knows"),
        _flag("max-model-len", Integer(1), "longest prompt and answer together, in tokens",
              unset="the model's own limit, or what the KV cache holds if that is less"),
        _flag("chat-template", PathName(), "a file with a Jinja chat template in place of the model's"),
        _flag("generation-config", Choice("auto", "none"),
              "auto takes sampling defaults from generation_config.json", "auto"),
        _flag("seed", Integer(0, 2**63 - 1), "from which --load-format dummy draws weights; a request without a seed "
              "of its own draws from a random one", "0"),
    ),
    "Scheduling": (
        _flag("max-num-seqs", Integer(1, 65536), "sequences that run at once at most", "256"),
        _flag("max-num-batched-tokens", Integer(1), "tokens a step computes at most; long prompts run in chunks",
              "2048"),
        _flag("scheduling-policy", Choice("fcfs", "priority", "fair"),
              "who goes first: fcfs the earliest request, priority the smallest priority number, fair the tenant that "
              "was served the fewest tokens (an output token counts as two of a prompt). A tenant is an API key, or "
              "all keys of one name in --api-key-file; without keys all requests are one tenant's, for what a request "
              "says of its user is not trusted", "fcfs"),
        _flag("max-generation-stall", Duration(), "how long a step may take prompts in while other sequences generate: "
              "it bounds their inter-token latency. Less makes long prompts wait for longer; 0 is no bound", "0.25s"),
        _flag("preemption-mode", Choice("auto", "recompute", "swap"),
              "what becomes of a sequence's blocks when there are none left for others: recompute drops them and "
              "computes them again, swap copies them to --swap-space-bytes and back, auto takes what costs less by "
              "the measured speed of both", "auto"),
        _flag("check-integrity", Switch(), "count blocks and queues after every step, and end the engine process where "
              "they do not add up: slow, for hunting faults"),
    ),
    "KV cache": (
        _flag("block-size", Choice("16", "32", "64", "128", integer=True), "tokens in a KV cache block", "16"),
        _flag("kv-cache-memory-bytes", Size(), "size of the KV cache, such as 4GiB, 512MiB or a number of bytes",
              unset="a share of the memory this process may use"),
        _flag("kv-cache-dtype", Choice("auto", "fp8"), "what keys and values are held in; auto is the arithmetic's "
              "own. fp8 (e4m3, on GPUs of compute capability 8.9 or more) is half of 16 bits, so that twice the tokens "
              "fit, and costs some accuracy", "auto"),
        _flag("gpu-memory-utilization", Number(0.0, 1.0, above_minimum=True),
              "the share of the GPU's memory, of a pod's limit without one, that this process may fill: weights, "
              "activations and CUDA graphs, and the KV cache with the rest", "0.9"),
        _flag("swap-space-bytes", Size(zero=True), "host memory for the blocks of preempted sequences, beside the KV "
              "cache. On a CPU both are the same memory, and a larger KV cache preempts less: swap space pays only "
              "where --kv-cache-memory-bytes must stay small and prompts are costly to compute again", "0"),
        _flag("enable-prefix-caching", Switch(negatable=True), "keep the KV cache of finished prompts for those that "
              "begin alike; --no-enable-prefix-caching turns it off", "true"),
    ),
    "Hardware": (
        _flag("device", Choice("auto", "cpu", "cuda"), "where the model runs; auto takes a GPU where there is one that "
              "can be used and else says why not, cuda starts on a GPU or not at all. CUDA_VISIBLE_DEVICES chooses "
              "among several", "auto"),
        _flag("enforce-eager", Switch(), "launch every kernel by itself on a GPU, without CUDA graphs: starts sooner "
              "and keeps their memory free, but small batches decode more slowly"),
        _many("cudagraph-capture-sizes", Integer(1, 65536), "numbers of decoding sequences that a CUDA graph is "
              "captured for; a step takes the next larger one, and above the largest none",
              unset="a ladder up to --max-num-seqs, 512 at most"),
        _flag("deterministic", Switch(), "the same request gets the same tokens and logprobs to the last bit, whatever "
              "else runs: no sum depends on the batch, on how a prompt was cut or found in the cache. Slower; for "
              "quire's own model families"),
        _flag("cpu-level", Choice("auto", "avx2", "avx512", "avx512-bf16", "amx"), "the highest level of CPU "
              "instructions that is used. auto tries what the CPU claims, at the first start on a machine, and takes "
              "the highest level that works; a level that the CPU does not have is taken for the next lower one",
              "auto"),
        _flag("tensor-parallel-size", Integer(1), "devices that share each layer; this version has 1 only", "1"),
        _flag("pipeline-parallel-size", Integer(1), "devices that share the layers; this version has 1 only", "1"),
        _flag("threads", Integer(1, 1024), "compute threads of the engine process",
              unset="the CPUs this process may use"),
    ),
    "Server": (
        _flag("host", Text(), "the address to listen on", "0.0.0.0"),
        _flag("port", Integer(0, 65535), "the port to listen on; 0 takes a free one and logs it", "8000"),
        _flag("uds", PathName(), "a Unix socket to listen on, instead of host and port"),
        _many("allowed-origins", Origin(), "origins of web pages that may call this server, or * for any (CORS)",
              unset="none"),
        _flag("drain-timeout", Duration(), "how long running requests may go on after SIGTERM, such as 120 or 2m",
              "120s"),
        _flag("engine-hang-timeout", Duration(above_zero=True), "an engine process that makes no step for so long, nor "
              "answers when idle, is replaced; longer than its longest step", "60s"),
        _flag("engine-start-timeout", Duration(above_zero=True), "how long the engine process may take from start to "
              "ready; /livez fails when a replacement takes longer", "15m"),
        _flag("lenient", Switch(), "warn of unknown request fields instead of answering 400"),
        _flag("max-body-bytes", Size(), "the largest request body", "8MiB"),
        _flag("max-logprobs", Integer(0, 1000), "the most logprobs a request may ask for per token", "20"),
    ),
    "Admission": (
        _flag("max-queued-requests", Integer(1), "sequences that may wait; above that new requests get 429", "1024"),
        _flag("max-queued-tokens", Integer(1), "prompt tokens that may wait; above that new requests get 429",
              unset="8 times what the KV cache holds"),
        _flag("max-queue-time", Duration(), "a request that has not run by then is given up with 503",
              unset="no limit"),
    ),
    "Access": (
        _flag("api-key-file", PathName(), "keys that clients must send, one a line: KEY or sha256:HEX, before it, if "
              "wanted, name=TENANT and the limits requests_per_minute=N tokens_per_minute=N max_concurrent=N; read "
              "again when it changes", unset="open to all"),
        _flag("admin-key-file", PathName(), "keys for /admin", unset="/admin answers this host only"),
        _flag("metrics-key-file", PathName(), "keys for /metrics", unset="open to all"),
    ),
    "TLS": (
        _flag("ssl-certfile", PathName(), "the server's certificate and what it is signed by, in PEM; these files are "
              "read again when they change", unset="plain HTTP"),
        _flag("ssl-keyfile", PathName(), "its private key, in PEM", unset="in the certificate's file"),
        _flag("ssl-keyfile-password-file", PathName(), "the password of an encrypted private key"),
        _flag("ssl-ca-certs", PathName(), "certificates of authorities, in PEM: clients must show a certificate signed "
              "by one, except at /livez and /readyz"),
    ),
    "Logs and traces": (
        _flag("log-level", Choice("debug", "info", "warning", "error"), "the least that is logged", "info"),
        _flag("log-format", Choice("text", "json"), "one line per event, for people or for machines", "text"),
        _flag("log-requests", Switch(), "log one line per request, without prompt or answer"),
        _flag("otlp-traces-endpoint", Url(), "where OpenTelemetry spans go by OTLP over HTTP, such as "
              "http://collector:4318/v1/traces", unset="nowhere"),
    ),
}
# fmt: on

FLAGS = {flag.name: flag for group in GROUPS.values() for flag in group}


def variable_of(flag: Flag) -> str:
    return ENV_PREFIX + flag.name.upper().replace("-", "_")


def schema() -> dict[str, Any]:
    """The flags as JSON Schema: what other programs check engine arguments against."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Flags of quire-engine",
        "description": "A property is a flag without its leading dashes.",
        "type": "object",
        "properties": {flag.name: {**flag.schema(), "x-env": variable_of(flag)} for flag in FLAGS.values()},
        "required": [flag.name for flag in FLAGS.values() if flag.required],
        "additionalProperties": False,
    }
