"""The flags of ``quire-engine``: one table gives the parser, the environment variables, ``--help`` and a JSON Schema.

Names are vLLM's where the meaning is the same.
"""

import json

from quire_common.contract.adapters_file import name_problem
from quire_common.contract.engine import ENVIRONMENT_PREFIX
from quire_common.flags.kinds import (
    Flag,
    Kind,
    choice,
    count,
    duration,
    integer,
    json_object,
    number,
    path,
    pattern,
    size,
    switch,
    text,
    url,
)
from quire_common.flags.table import FlagTable
from quire_common.names import is_http_url
from quire_engine.config import SpeculationOptions
from quire_engine.speculation_flags import MOST_TOKENS, REMOVED_METHODS
from quire_engine.text.answers.formats import REASONING_NAMES, TOOL_NAMES
from quire_engine.vllm_flags import ALIASES, ALWAYS, REFUSED


def _web_origin(text: str) -> str:
    origin = text.strip().removesuffix("/")
    if origin != "*" and (not is_http_url(origin) or origin.count("/") != 2):
        raise ValueError
    return origin


def _lora_module(text: str) -> tuple[str, str]:
    """Return an adapter's name in requests and its source, from name=path or vLLM's JSON object."""
    name, _, path = text.partition("=")
    if text.lstrip().startswith("{"):
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(str(error)) from None
        strange = sorted(given.keys() - {"name", "path", "base_model_name"})
        if strange:
            raise ValueError(f"unknown: {', '.join(strange)}")
        name, path = given.get("name"), given.get("path")
    if not isinstance(path, str) or not path:
        raise ValueError
    if problem := name_problem(name):
        raise ValueError(problem)
    return name, path


_WEB_ORIGIN = Kind(
    "ORIGIN",
    "an origin such as https://chat.example.com, or *",
    _web_origin,
    {"type": "string", "pattern": r"^\s*(\*|https?://[^/\s]+)/?\s*$", "examples": ["https://chat.example.com", "*"]},
)
_LORA_MODULE = Kind(
    "NAME=PATH",
    'NAME=PATH, or JSON such as {"name": "fr", "path": "./fr"}',
    _lora_module,
    {"type": "string", "pattern": r"^(\s*\{.*\}\s*|[A-Za-z0-9][^=]*=.+)$", "examples": ["fr=./adapters/fr"]},
)
_DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "float": "float32",
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
}
_IMPLEMENTATIONS = {"auto": "auto", "native": "native", "vllm": "native", "transformers": "transformers"}

# fmt: off
_GROUPS: dict[str, tuple[Flag, ...]] = {
    "Model": (
        Flag("model", kind=path(), required=True,
             help="the model's folder, in Hugging Face layout with safetensors weights; or org/name on a hub or "
             "s3://bucket/path, which is downloaded first"),
        Flag("revision", text(), "the branch, tag or commit of a model on a hub", unset="main"),
        Flag("download-dir", path(), "the folder for downloaded models", unset="the user's cache"),
        Flag("served-model-name", text(), "the names that clients may use; answers contain the first",
             unset="the folder's name", many=True),
        Flag("dtype", choice(values=_DTYPES),
             "the type of weights and activations. auto on a GPU is the checkpoint's own 16-bit type, or bfloat16 "
             "where it has none; on a CPU it is the type that the CPU computes fastest", "auto"),
        Flag("quantization", choice("none", "int8", "fp8"), "the quantization of the linear layers, "
             "applied while loading: int8 on a CPU, fp8 (e4m3, with bfloat16 between layers) on a GPU of compute "
             "capability 8.9 or above. Both also quantize activations, per row and dynamically. They read half the "
             "bytes of 16 bits and multiply faster, with some loss of accuracy", "none"),
        Flag("load-format", choice(values={"auto": "safetensors", "safetensors": "safetensors", "dummy": "dummy"}),
             "dummy fills the weights with random values, to benchmark a shape; the others read safetensors", "auto"),
        Flag("model-impl", choice(values=_IMPLEMENTATIONS),
             "the implementation of the layers; auto uses quire's own model family if there is one, else "
             "transformers; native and vllm stand for quire's own", "auto"),
        Flag("runner", choice("auto", "generate", "pooling"),
             "generate serves text; pooling serves embeddings, or scores of a reranker, and no text. auto pools if "
             "the folder has modules.json of sentence-transformers, an architecture without an LM head, or "
             "classifier_from_token in config.json", "auto"),
        Flag("pooler-config", json_object(), "how embeddings are pooled, such as '{\"pooling_type\": \"MEAN\", "
             "\"normalize\": true}'; the types are LAST and MEAN",
             unset="as the folder says, else the last token, normalized"),
        Flag("trust-remote-code", switch(), "run Python code from the model's folder, for models that neither quire "
             "nor transformers supports"),
        Flag("max-model-len", count(1, "auto"), "the maximum length of prompt and output together, in tokens",
             unset="the model's own limit, or the KV cache's if that is less"),
        Flag("hf-overrides", json_object(), "values that replace those of config.json, such as '{\"rope_scaling\": "
             "{\"rope_type\": \"yarn\", \"factor\": 4.0, \"original_max_position_embeddings\": 32768}}'; objects are "
             "merged, and rotations may have the names of transformers 4 or 5. Names without an effect are logged",
             unset="none"),
        Flag("tokenizer", path(), "the folder of the tokenizer and its chat template", unset="the model's folder"),
        Flag("chat-template", path(), "a file with a Jinja chat template that replaces the model's, or the name "
             "of one of several templates of the model"),
        Flag("default-chat-template-kwargs", json_object(), "variables of the chat template for requests that do not "
             "set them, such as '{\"enable_thinking\": false}'", unset="none"),
        Flag("tool-call-parser", choice("auto", *TOOL_NAMES, "none", metavar="NAME"), "the form of the model's "
             "tool calls. auto finds it from the chat template, and with none requests with tools are refused; "
             "otherwise one of "
             + ", ".join(TOOL_NAMES), "auto"),
        Flag("reasoning-parser", choice("auto", *REASONING_NAMES, "none", metavar="NAME"), "the form of the model's "
             "reasoning, which answers then contain separately from their content. auto finds it from the chat "
             "template, and none leaves it in the content; otherwise one of " + ", ".join(REASONING_NAMES), "auto"),
        Flag("generation-config", choice(values={"auto": "auto", "none": "none", "vllm": "none"}),
             "auto reads sampling defaults from generation_config.json; none and vllm do not", "auto"),
        Flag("override-generation-config", json_object(), "values that replace those of generation_config.json, such "
             "as '{\"temperature\": 0.6, \"eos_token_id\": [1, 2]}'", unset="none"),
        Flag("seed", integer(0, 2**63 - 1), "the seed of the random weights of --load-format dummy. It does not "
             "affect sampling: a request without a seed of its own gets a random one", "0"),
    ),
    "Scheduling": (
        Flag("max-num-seqs", integer(1, 65536), "the maximum number of sequences that run at once", "256"),
        Flag("max-num-batched-tokens", integer(1), "the maximum number of tokens in a step; long prompts are chunked",
             "2048"),
        Flag("scheduling-policy", choice("fcfs", "priority", "fair"),
             "the order of requests: fcfs by arrival, priority by the smallest priority number, fair by the tenant "
             "that was served the fewest tokens (an output token counts as two prompt tokens). A tenant is an API "
             "key, or all keys of one name in --api-key-file. Without keys, a gateway with keys states the tenant; "
             "requests without either are one tenant, because their user field is not trusted", "fcfs"),
        Flag("max-generation-stall", duration(), "the maximum time that a step may spend on prompts while other "
             "sequences generate. It bounds their inter-token latency; lower values delay long prompts. While no "
             "sequence generates, and with 0, a step takes at most about 2 s",
             "0.25s"),
        Flag("preemption-mode", choice("auto", "recompute", "swap"),
             "the treatment of a preempted sequence's blocks: recompute drops them and computes them again, swap "
             "copies them to --swap-space-bytes and back, auto chooses by the measured speed of both", "auto"),
        Flag("check-integrity", switch(), "count blocks and queues after every step, and end the engine process if "
             "the counts are wrong; slow, for debugging"),
    ),
    "Speculative decoding": (
        Flag("spec-method", choice("none", "ngram", "draft_model", removed=REMOVED_METHODS), "propose tokens and "
             "verify several of them in one step. The answers are those without it. ngram proposes what followed the "
             "most recent tokens where they occurred before, in the prompt or the answer; draft_model asks a smaller "
             "model, which --spec-model names. The engine verifies as many as the measured cost of steps allows, also "
             "none",
             unset="draft_model with --spec-model, else none"),
        Flag("spec-model", path(), "for --spec-method draft_model, a smaller model with the same tokenizer, as a "
             "folder or on a hub"),
        Flag("spec-required", switch(negatable=True), "stop the start if the draft model cannot be used; "
             "--no-spec-required serves without speculation instead", "true"),
        Flag("spec-tokens", integer(1, MOST_TOKENS), "the maximum number of proposed tokens of a sequence that a "
             "step verifies, less than --block-size", unset=str(SpeculationOptions().max_tokens)),
        Flag("speculative-config", json_object(), "the same as a JSON object with vLLM's keys, such as "
             "'{\"method\": \"ngram\", \"num_speculative_tokens\": 8, \"prompt_lookup_max\": 4, "
             "\"prompt_lookup_min\": 2}'", unset="none"),
    ),
    "KV cache": (
        Flag("block-size", choice(values={str(size): size for size in (16, 32, 64, 128)}),
             "the number of tokens in a KV cache block", "16"),
        Flag("kv-cache-memory-bytes", size(), "the size of the KV cache, such as 4GiB, 512MiB or a number of bytes; "
             "with --tensor-parallel-size, that of each rank",
             unset="a share of the memory that this process may use"),
        Flag("kv-cache-dtype", choice(values={"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8"}),
             "the type of keys and values; auto is the type of the "
             "activations. fp8 (e4m3, on GPUs of compute capability 8.9 or more) has half the size of 16 bits, so "
             "twice the tokens fit, with some loss of accuracy", "auto"),
        Flag("gpu-memory-utilization", number(0.0, 1.0, above_minimum=True),
             "the share of the GPU's memory, or of a pod's limit without a GPU, that this process may use for "
             "weights, activations, CUDA graphs and the KV cache", "0.9"),
        Flag("swap-space-bytes", size(0), "host memory for the blocks of preempted sequences, in addition to the KV "
             "cache. On a CPU both use the same memory, and a larger KV cache preempts less. So swap space is useful "
             "only where --kv-cache-memory-bytes must be small and prompts are expensive to recompute", "0"),
        Flag("enable-prefix-caching", switch(negatable=True), "keep the KV cache of finished prompts for prompts with "
             "the same prefix; --no-enable-prefix-caching turns it off", "true"),
        Flag("share-prefixes", choice("tenant", "all"), "whose prefixes a request finds: tenant is its own API key, "
             "or the keys of its name in --api-key-file, and the tenant that a gateway with keys states; all is every "
             "key. With all, a client can learn from the "
             "cached tokens of its own requests which prompts others have sent, except for prompts with a cache_salt "
             "that it does not know", "tenant"),
    ),
    "Adapters": (
        Flag("enable-lora", switch(negatable=True), "serve low-rank adapters (LoRA) of the model in PEFT's layout, "
             "each under a model name of its own; for quire's own model families. --lora-modules, "
             "--adapters-file and --adapter-roots imply it", "false"),
        Flag("max-loras", integer(1, 4096), "the slots for adapters on the device: the number of different adapters "
             "that a step can use. Requests for others wait for a slot", "1"),
        Flag("max-lora-rank", integer(1, 512), "the highest rank of an adapter; every slot has room for it", "16"),
        Flag("max-cpu-loras", integer(1, 65536), "the number of adapters in host memory; others are read from disk "
             "when a request needs them", unset="4 times --max-loras"),
        Flag("lora-modules", _LORA_MODULE, "adapters to load at the start, as NAME=PATH; a path is a folder, "
             "org/name on a hub or s3://bucket/path", unset="none", many=True),
        Flag("adapters-file", path(), "a file that lists adapters, as the operator writes it; read again when it "
             "changes", unset="none"),
        Flag("adapter-roots", path(), "the folders below which POST /v1/load_lora_adapter may load adapters",
             unset="that route is closed", many=True),
    ),
    "Hardware": (
        Flag("device", choice("auto", "cpu", "cuda", "rocm"), "the device that runs the model. auto uses a GPU if "
             "a usable one exists, else it logs the reason and uses the CPU. cuda (NVIDIA) and rocm (AMD, with "
             "torch's build for ROCm; compiled, but not run on such a GPU yet) fail without a usable GPU. "
             "CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES selects among several", "auto"),
        Flag("enforce-eager", switch(), "launch every kernel separately on a GPU, without CUDA graphs: starts "
             "sooner and needs less memory, but small batches decode more slowly"),
        Flag("cudagraph-capture-sizes", integer(1, 65536), "the numbers of decoding sequences for which a CUDA "
             "graph is captured; a step uses the next larger one, and runs without a graph above the largest",
             unset="a ladder up to --max-num-seqs, at most 512", many=True),
        Flag("deterministic", switch(), "return the same tokens and logprobs for the same request, bit by bit, "
             "whatever other requests run: no sum depends on the batch, on prompt chunks or on cache hits. Slower; "
             "only for quire's own model families"),
        Flag("cpu-level", choice("auto", "avx2", "avx512", "avx512-bf16", "amx"), "the highest level of CPU "
             "instructions to use. At the first start on a machine, auto tests the levels that the CPU reports, and "
             "uses the best one that works. A level that the CPU lacks is replaced by the next lower one", "auto"),
        Flag("tensor-parallel-size", integer(1, 64), "the number of processes that share each layer of the model, for "
             "quire's own model families. On GPUs, each has one. Each has its share of the weights, of the KV cache "
             "and of --threads", "1"),
        Flag("pipeline-parallel-size", integer(1, 64), "the number of stages among which the layers are divided "
             "evenly, for quire's own model families. As many steps run at once as there are stages, each with other "
             "sequences. Each stage has --tensor-parallel-size processes", "1"),
        Flag("data-parallel-size", integer(1), "the number of engines behind one address; only 1 is supported", "1"),
        Flag("threads", integer(1, 1024), "the number of compute threads of the engine, which the ranks of "
             "--tensor-parallel-size divide among them",
             unset="the CPUs that this process may use"),
    ),
    "Several nodes": (
        Flag("nnodes", integer(1, 64), "the number of nodes that divide the processes of --tensor-parallel-size and "
             "--pipeline-parallel-size evenly among them. Each node runs this command with the same flags, except for "
             "--node-rank; its --model may be another path to the same files", "1"),
        Flag("node-rank", integer(0, 63), "this node's number. Node 0 serves the API. The others serve /livez, "
             "/readyz, /metrics and /version on --port; /readyz turns 200 when the node has joined its group", "0"),
        Flag("master-addr", text(), "the name or address of node 0, which listens there for the others", "127.0.0.1"),
        Flag("master-port", integer(1, 65535), "the TCP port on which node 0 listens. gloo and NCCL listen on "
             "further ports of every node, which the kernel chooses", "29501"),
        Flag("distributed-timeout-seconds", duration(), "how long to wait for the other nodes at a start",
             "600s"),
        Flag("group-secret-file", path(), "a file with the secret that all nodes of a group share, of at least 16 "
             "characters. It is never sent: a node and node 0 prove to each other that they know it (HMAC-SHA256). It "
             "keeps groups apart, and does not replace a network that only the nodes of the group can reach",
             unset="the variable QUIRE_GROUP_SECRET"),
    ),
    "Server": (
        Flag("host", text(), "the address to listen on", "0.0.0.0"),
        Flag("port", integer(0, 65535), "the port to listen on; 0 chooses a free port and logs it", "8000"),
        Flag("uds", path(), "a Unix socket to listen on, instead of host and port"),
        Flag("root-path", pattern(r"(/[A-Za-z0-9._~-]+)+", "a path such as /llm", "PATH"), "the prefix of paths that "
             "a proxy in front of the server leaves in place; requests work with and without it", unset="none"),
        Flag("allowed-origins", _WEB_ORIGIN, "the origins of web pages that may call this server, or * for any (CORS)",
             unset="none", many=True),
        Flag("drain-timeout", duration(), "how long running requests may continue after SIGTERM, such as 120 or 2m",
             "120s"),
        Flag("engine-hang-timeout", duration(above_minimum=True), "replace an engine process that completes no step "
             "for this time, or does not answer while idle. A step that is expected to take more than a tenth of it "
             "may take ten times its expected time", "60s"),
        Flag("engine-start-timeout", duration(above_minimum=True), "how long the engine process may take to become "
             "ready; /livez fails if a replacement takes longer", "15m"),
        Flag("lenient", switch(), "log unknown request fields instead of answering 400"),
        Flag("max-body-bytes", size(), "the maximum size of a request body", "8MiB"),
        Flag("body-memory", size(), "the maximum memory for all request bodies that are being received or prepared; "
             "above it requests get 503. It is at least twice --max-body-bytes", "256MiB"),
        Flag("sse-keepalive-seconds", duration(), "send a comment in a stream that has had no event for this time, "
             "also before its first token, for proxies that close idle connections. From then on a failure is an "
             "error event instead of a status. 0 sends none", "0"),
        Flag("max-logprobs", integer(0, 1000), "the maximum number of logprobs per token that a request may ask for",
             "20"),
        Flag("resumable-streams", switch(), "send gateways the tokens and the seed of streams, with which they "
             "continue a stream on another engine if this one dies or terminates"),
    ),
    "Admission": (
        Flag("max-queued-requests", integer(1), "the maximum number of waiting sequences; above it requests get 429",
             "1024"),
        Flag("max-queued-tokens", integer(1), "the maximum number of waiting prompt tokens; above it requests get "
             "429", unset="8 times the tokens that the KV cache holds"),
        Flag("max-queue-time", duration(), "answer a request with 503 if it has not started to run within this time",
             unset="no limit"),
    ),
    "Access": (
        Flag("api-key", pattern(r"[!-~]{1,512}", "a key without spaces", "KEY"), "keys that clients must send. A "
             "command line is visible in the process list; prefer --api-key-file", unset="open to all", many=True),
        Flag("api-key-file", path(), "a file with the API keys that clients must send, one per line: KEY or "
             "sha256:HEX, optionally preceded by name=TENANT and the limits requests_per_minute=N, "
             "tokens_per_minute=N and max_concurrent=N; reloaded when it changes", unset="open to all"),
        Flag("admin-key-file", path(), "a file with the keys for /admin and for loading adapters",
             unset="these routes answer this host only"),
        Flag("metrics-key-file", path(), "a file with the keys for /metrics and /quire/v1/adapters",
             unset="open to all"),
    ),
    "TLS": (
        Flag("ssl-certfile", path(), "the server's certificate and its chain, in PEM; all files of TLS are "
             "reloaded when they change", unset="plain HTTP"),
        Flag("ssl-keyfile", path(), "the private key, in PEM", unset="in the certificate's file"),
        Flag("ssl-keyfile-password-file", path(), "a file with the password of an encrypted private key"),
        Flag("ssl-ca-certs", path(), "certificates of authorities, in PEM; clients must show a certificate that "
             "one of them signed, except at /livez and /readyz"),
    ),
    "Logs and traces": (
        Flag("log-level", choice("debug", "info", "warning", "error"), "the least severe level to log", "info"),
        Flag("log-format", choice("text", "json"), "one line per event, as text or as JSON", "text"),
        Flag("log-requests", switch(negatable=True), "log one line per request, without prompt and answer"),
        Flag("otlp-traces-endpoint", url("http://collector:4318/v1/traces"), "the address for OpenTelemetry spans by "
             "OTLP over HTTP, such as http://collector:4318/v1/traces", unset="no traces"),
    ),
}
# fmt: on

_REMOVED = {
    "response-store-memory": "the engine stores no responses; remove the flag, and let clients of /v1/responses send "
    "the whole conversation in input",
}

FLAGS = FlagTable(
    program="quire-engine",
    env_prefix=ENVIRONMENT_PREFIX,
    positional="model",
    reject_unknown_variables=True,
    hints=REFUSED,
    removed=_REMOVED,
    aliases=ALIASES,
    always=ALWAYS,
    groups=_GROUPS,
    intro="""\
quire-engine serves one language model at an OpenAI-compatible address.

usage: quire-engine --model DIR [--port N] [flags]
""",
    outro="""\
Also: --help, --version, --flag-schema (the flags as JSON Schema), --cpu-report (usable CPU instructions, as JSON).

Each flag can be set by a variable: --max-num-seqs 64 is QUIRE_ENGINE_MAX_NUM_SEQS=64. A flag takes precedence.

SIGTERM or Ctrl-C drains: /readyz turns 503 at once, running requests finish within --drain-timeout; Ctrl-C again stops.

  quire-engine --model ./my-model --port 8000
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"model": "my-model", "messages": [{"role": "user", "content": "What is a list?"}]}'
""",
)
