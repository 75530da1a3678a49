"""The interface of the engine: its command, port, paths, exit code and metrics, with vLLM's names where it has one."""

ENGINE_COMMAND = "quire-engine"
FETCH_COMMAND = "quire-fetch"
"""Downloads models; part of the engine's distribution and image."""
FETCHED_VERSION = "quire-fetch: version "
"""Begins the termination message of a download that ended well; the version follows."""
CLIENT_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/tokenize",
    "/detokenize",
)
"""The paths of POST requests that gateways pass on. Other ones, for example to load an adapter or to drain, are for
administrators of an engine, who reach it directly."""
PROGRESS_PATH = "/progress"
"""The progress of a download as JSON, ``{"done": bytes, "total": bytes}``, on the port of the engine."""
ENVIRONMENT_PREFIX = "QUIRE_ENGINE_"
"""Variables with this prefix are flags to the engine."""
FLAGS_ONLY_VARIABLE = "QUIRE_FLAGS_ONLY"
"""A variable with which the engine refuses to start if others have that prefix: in pods, only the spec sets flags."""
HTTP_PORT = 8000
HTTP_PORT_NAME = "http"
GROUP_PORT = 29501
"""The port on which the leader of a group of pods listens for the others."""
GROUP_SECRET_VARIABLE = "QUIRE_GROUP_SECRET"
"""The variable with the secret that the pods of a group share."""
READY_PATH = "/readyz"
"""200 once a token was produced and while requests are accepted; 503 while loading and draining."""
LIVE_PATH = "/livez"
METRICS_PATH = "/metrics"
CONFIG_ERROR_EXIT_CODE = 2
"""The exit code of errors that no restart fixes: a wrong flag, a model that cannot be served."""
ENGINE_STOPPED = "engine_stopped"
"""The code of a 503 for a request that was under way when the engine process died. A request that never reached the
process gets another code, for example ``engine_restarting``."""
QUEUE_FULL = "queue_full"
"""The code of a 429 for a full queue: another replica may have room. A 429 for the limits of a key has another code."""
KEY_LIMIT = "rate_limit_exceeded"
"""The code of a 429 for the limits of a key."""
USAGE_HEADER = "X-Quire-Usage"
"""A request header with which a stream ends in a comment that contains its usage."""
USAGE_COMMENT = b": quire-usage "
"""The start of that comment; the usage follows as JSON, then an empty line."""

RESUMABLE_HEADER = "X-Quire-Resumable"
"""A request header with which a stream has the comments below, if the engine has ``--resumable-streams``. In the
response it says ``yes``, or ``no`` with the property of the request that prevents it."""
RESUME_COMMENT = b": quire-resume "
"""The start of the first comment: facts as a JSON object, then an empty line."""
TOKENS_COMMENT = b": quire-tokens "
"""The start of the comment after events: the token ids of these events as a JSON array, then an empty line."""
RESUME_FIELD = "quire_resume"
"""The field of a body that continues a stream: the facts, and the relayed tokens as ``token_ids``."""

NOT_STORED = "responses_not_stored"
"""The code of errors about a response by its id."""
NO_STORED_RESPONSES = "this server stores no responses; send the whole conversation in input"

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
CACHE_CONFIG = "vllm:cache_config_info"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
GENERATION_TOKENS = "vllm:generation_tokens_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
CACHE_HITS = "vllm:prefix_cache_hits_total"
FINISHED = "vllm:request_success_total"
STEPS = "quire_steps_total"
STEP_SECONDS = "quire_step_seconds_total"
QUEUED_TOKENS = "quire_queued_tokens"
PENDING_TOKENS = "quire_pending_prefill_tokens"
SCHEDULED_TOKENS = "quire_scheduled_tokens_total"
MAX_RUNNING = "quire_max_running_requests"
MAX_MODEL_LEN = "quire_max_model_len"
ARRIVED_REQUESTS = "quire_arrived_requests_total"
ARRIVED_PROMPT_TOKENS = "quire_arrived_prompt_tokens_total"
UNCACHED_PROMPT_TOKENS = "quire_uncached_prompt_tokens_total"
FIRST_TOKEN_WAIT = "quire_first_token_wait_seconds"
FIRST_TOKEN_WAIT_BUCKET = f"{FIRST_TOKEN_WAIT}_bucket"
FIRST_TOKEN_TIME_BUCKET = "vllm:time_to_first_token_seconds_bucket"
TOKEN_GAP_BUCKET = "vllm:inter_token_latency_seconds_bucket"
