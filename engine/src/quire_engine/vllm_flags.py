"""The flags of ``vllm serve``: which mean the same here, which change nothing, and what to use instead of the others.

``flag_table`` gives them to the parser, so that a command line written for vLLM works or says why it does not.
``docs/vllm-flags.md`` lists all of them (``make vllm-flags``).
"""

VERSION = "0.32.0"
"""The version of vLLM whose flags are all here; some of earlier versions are too."""

_SAME = (
    "allowed-origins api-key block-size chat-template cudagraph-capture-sizes data-parallel-size "
    "default-chat-template-kwargs distributed-timeout-seconds download-dir dtype enable-lora "
    "enable-prefix-caching enforce-eager generation-config gpu-memory-utilization hf-overrides host "
    "kv-cache-dtype kv-cache-memory-bytes load-format log-level lora-modules master-addr master-port "
    "max-cpu-loras max-logprobs max-lora-rank max-loras max-model-len max-num-batched-tokens max-num-seqs model "
    "model-impl nnodes node-rank otlp-traces-endpoint override-generation-config pipeline-parallel-size "
    "pooler-config port quantization reasoning-parser revision root-path runner scheduling-policy seed "
    "served-model-name spec-method spec-model spec-tokens speculative-config ssl-ca-certs ssl-certfile "
    "ssl-keyfile tensor-parallel-size tokenizer tool-call-parser trust-remote-code uds"
)
SAME = frozenset(_SAME.split())
"""Flags that quire-engine has under the same name."""

ALIASES = {
    "-q": "quantization",
    "-sc": "speculative-config",
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-n": "nnodes",
    "-r": "node-rank",
    "--device-memory-utilization": "gpu-memory-utilization",
    "--enable-log-requests": "log-requests",
    "--max-num-queued-reqs": "max-queued-requests",
    "--max-num-queued-tokens": "max-queued-tokens",
    "--shutdown-timeout": "drain-timeout",
    "--sse-keep-alive-interval": "sse-keepalive-seconds",
    "--uvicorn-log-level": "log-level",
}
"""vLLM's names and short forms of flags that mean the same here."""

_ALWAYS = (
    "disable-custom-all-reduce disable-log-requests disable-uvicorn-access-log enable-auto-tool-choice "
    "enable-chunked-prefill enable-offline-docs enable-prompt-tokens-details enable-request-id-headers "
    "enable-ssl-refresh language-model-only no-enable-expert-parallel no-enable-log-outputs no-use-tqdm-on-load"
)
ALWAYS = frozenset(_ALWAYS.split())
"""Switches that ask for what quire always does."""

_REFUSED = {
    "use --tensor-parallel-size or --pipeline-parallel-size, or several engines behind quire-gateway": (
        "api-server-count -asc decode-context-parallel-size -dcp dcp-comm-backend dcp-q-replicate "
        "dcp-kv-cache-interleave-size cp-kv-cache-interleave-size prefill-context-parallel-size -pcp "
        "data-parallel-rank -dpn data-parallel-start-rank -dpr data-parallel-size-local -dpl data-parallel-address "
        "-dpa data-parallel-rpc-port -dpp data-parallel-backend -dpb data-parallel-hybrid-lb -dph "
        "data-parallel-external-lb -dpe data-parallel-multi-port-external-lb -dpm data-parallel-supervisor-port "
        "dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s dp-supervisor-probe-failure-threshold "
        "enable-hc-sp enable-expert-parallel -ep enable-batch-sharded-sampling enable-ep-weight-filter "
        "all2all-backend enable-dbo ubatch-size enable-elastic-ep elastic-ep-max-dp-size dbo-decode-token-threshold "
        "dbo-prefill-token-threshold dp-sync-interval disable-nccl-for-dp-synchronization enable-eplb eplb-config "
        "expert-placement-strategy max-parallel-loading-workers ray-workers-use-nsight enable-nccl-comm-suspend "
        "enable-scale-out"
    ),
    "set CUDA_VISIBLE_DEVICES; an engine uses as many of its GPUs as it has ranks on the node": "device-ids",
    "only node 0 serves the API; see --node-rank": "headless",
    "processes of one node share memory, and nodes exchange data over TCP; see --nnodes": (
        "distributed-executor-backend cpu-distributed-timeout-seconds"
    ),
    "the CPUs and memory nodes of a process are those of its cpuset; see --threads": (
        "numa-bind numa-bind-nodes numa-bind-cpus"
    ),
    "the server is one API process and one engine process, which is restarted if it fails": (
        "worker-cls worker-extension-cls enable-fault-tolerance fault-tolerance-config enable-shm-tensor-arena "
        "renderer-num-workers aggregate-engine-logging scheduler-cls"
    ),
    "the formats of a model follow from its chat template; see --tool-call-parser and --reasoning-parser": (
        "tool-strict-level cohere-is-reasoning-model cohere-format anthropic-disabled-thinking-effort"
    ),
    "requests limit their reasoning with thinking_token_budget; see --reasoning-parser": "reasoning-config",
    "clients run tools themselves": "tool-server",
    "grammars have one backend, which needs no options": "structured-outputs-config",
    "send such requests without tools": "exclude-tools-when-tool-choice-none",
    "adapters have the type of the activations and change linear layers of text models only; see --enable-lora": (
        "lora-dtype enable-tower-connector-lora fully-sharded-loras lora-target-modules default-mm-loras "
        "specialize-active-lora enable-mixed-moe-lora-format enable-moe-shared-loras max-lora-cls-labels"
    ),
    "answers are generated token by token; see --spec-method": "diffusion-config -dc",
    "/metrics has all metrics, and the histograms have vLLM's buckets": (
        "per-request-spec-decode-metrics disable-log-stats show-hidden-metrics-for-version custom-histogram-buckets "
        "kv-cache-metrics kv-cache-metrics-sample cudagraph-metrics enable-mfu-metrics enable-per-request-metrics "
        "enable-server-load-tracking enable-logging-iteration-details"
    ),
    "this version serves text only": (
        "limit-mm-per-prompt enable-mm-embeds media-io-kwargs mm-processor-kwargs mm-processor-cache-gb "
        "mm-processor-cache-type mm-hasher-algorithm mm-shm-cache-max-object-size-mb mm-encoder-only "
        "mm-encoder-tp-mode mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path "
        "mm-encoder-fp8-scale-save-path mm-encoder-fp8-scale-save-margin interleave-mm-strings skip-mm-profiling "
        "video-pruning-rate video-pruning-method mm-tensor-ipc mm-processor-device mm-ipc-gpu-memory-gb "
        "mm-device-do-normalize allowed-local-media-path allowed-media-domains disable-chunked-mm-input "
        "trust-request-mm-kwargs enable-prompt-embeds ec-transfer-config ec-manager-config"
    ),
    "models with state-space or linear attention layers are not supported": (
        "mamba-backend mamba-ssu-algorithm enable-mamba-cache-stochastic-rounding mamba-cache-philox-rounds "
        "mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size mamba-cache-mode "
        "enable-mamba-shared-prefix-checkpoint replayssm-buffer-len use-replayssm gdn-prefill-backend "
        "kda-prefill-backend kda-decode-backend engram-config"
    ),
    "the KV cache stays in the engine; for preempted sequences see --swap-space-bytes": (
        "kv-offloading-size kv-offloading-backend kv-transfer-config kv-events-config offload-backend cpu-offload-gb "
        "cpu-offload-params offload-group-size offload-num-in-group offload-prefetch-step offload-params "
        "kv-sharing-fast-prefill"
    ),
    "the engine measures and chooses kernels itself": (
        "attention-backend attention-config -ac compilation-config -cc kernel-config ir-op-priority "
        "enable-flashinfer-autotune moe-backend linear-backend sparse-indexer-topk-backend optimization-level "
        "performance-mode disable-cascade-attn use-fp64-gumbel enable-flash-late-interaction jit-monitor-mode "
        "jit-monitor-verbose async-scheduling enable-cumem-allocator swa-bounded-replay"
    ),
    "see --runner and --pooler-config, which serve embeddings and rerankers of decoder models": (
        "convert io-processor-plugin"
    ),
    "answers are not watermarked": "watermark-config",
    "each token is sent as an event of its own": "stream-interval",
    "load changed weights by starting a new replica": "weight-transfer-config",
    "weights are mapped into memory and read layer by layer": (
        "safetensors-load-strategy safetensors-prefetch-num-threads safetensors-prefetch-block-size "
        "model-loader-extra-config ignore-patterns use-tqdm-on-load pt-load-map-location"
    ),
    "the server does not load code of other packages": (
        "middleware logits-processors additional-config tool-parser-plugin reasoning-parser-plugin"
    ),
    "the limits of headers are fixed; for bodies see --max-body-bytes": (
        "h11-max-incomplete-event-size h11-max-header-count"
    ),
    "configure this in a proxy in front of the server": "allow-credentials allowed-methods allowed-headers",
    "use a profiler of the operating system, or the times of steps at /metrics": (
        "profiler-config enable-layerwise-nvtx-tracing collect-detailed-traces enable-trace-replay"
    ),
    "the scheduler limits the cost of a step; see --max-num-batched-tokens and --max-generation-stall": (
        "max-num-scheduled-tokens max-num-active-seqs long-prefill-token-threshold "
        "long-prefill-token-threshold-adaptive scheduler-reserve-full-isl watermark prefill-schedule-interval"
    ),
    "the KV cache manager needs no such setting; --kv-cache-memory-bytes sets the size of the cache": (
        "num-gpu-blocks-override prefix-caching-hash-algo prefix-cache-retention-interval kv-cache-dtype-skip-layers "
        "prefix-match-unit disable-hybrid-kv-cache-manager disable-sliding-window"
    ),
    "use --hf-overrides to set single values of config.json": (
        "hf-config-path config-format model-class-overrides quantization-config allow-deprecated-quantization"
    ),
    "set HF_TOKEN: a token on the command line is visible in the process list": "hf-token",
    "--revision applies to all files of the model": "code-revision tokenizer-revision",
    "the tokenizer's kind follows from its files; see --tokenizer": "tokenizer-mode skip-tokenizer-init",
    "the server detects whether a template takes text or parts": "chat-template-content-format",
    "requests cannot bring a template; see --chat-template": "trust-request-chat-template",
    "answers always have the role assistant": "response-role",
    "requests ask for token ids with return_token_ids": "return-tokens-as-token-ids tokens-only",
    "requests ask for usage with stream_options.include_usage": "enable-force-include-usage",
    "logprobs are the model's own, before penalties and temperature": "logprobs-mode return-sampling-mask",
    "prompts and answers are never logged": "max-log-len enable-log-outputs enable-log-deltas",
    "unexpected errors are logged with their stack": "log-error-stack",
    "access is not logged; --log-requests logs one line per request": "disable-access-log-for-endpoints",
    "see --log-level and --log-format": "logging-config log-config-file",
    "set flags by variables: --max-num-seqs is QUIRE_ENGINE_MAX_NUM_SEQS": "config",
    "unknown variables QUIRE_ENGINE_… always stop the start": "fail-on-environ-validation",
    "clients speak HTTP": "grpc grpc-port",
    "the version of the model is at /version": "fingerprint-mode fingerprint-value",
    "the tokenizer is in the model's folder; requests use /tokenize": "enable-tokenizer-info-endpoint",
    "/docs needs a key where one is set": "disable-fastapi-docs",
    "with --ssl-ca-certs clients must show a certificate; ciphers are those of the TLS library": (
        "ssl-cert-reqs ssl-ciphers"
    ),
    "on Kubernetes, scale to zero instead (spec.autoscaling.minReplicas: 0)": (
        "enable-sleep-mode sleep-mode-offload-cudagraph sleep-preserve-parameter-names"
    ),
    "use --cudagraph-capture-sizes": "max-cudagraph-capture-size cuda-graph-sizes",
    "answers do not report the experts": "enable-return-routed-experts aux-output-config",
    "use --swap-space-bytes, with a unit": "swap-space",
    "long prompts always run in chunks; see --max-num-batched-tokens": "no-enable-chunked-prefill",
}
REFUSED = {name.lstrip("-"): reason for reason, names in _REFUSED.items() for name in names.split()}
"""The other flags and short forms, without dashes, and what to use instead."""
