"""What the API process and the engine process say to each other, as msgspec arrays over ZeroMQ.

A request is known by an integer ``key`` that the API process counts up; the client-visible id never crosses. All times
are ``time.monotonic()`` seconds: both processes are on one host, so they read one clock.
"""

from dataclasses import asdict

import msgspec

from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.stopping import FinishReason


class Sampling(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The wire form of ``core.sampling_params.SamplingParams``; tests hold the fields equal."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def to_params(self) -> SamplingParams:
        return SamplingParams(**msgspec.structs.asdict(self))


def to_sampling(params: SamplingParams) -> Sampling:
    return Sampling(**asdict(params))


# --- API process -> engine process ---


class Submit(msgspec.Struct, array_like=True, tag="submit", frozen=True, kw_only=True):
    key: int
    prompt_token_ids: list[int]
    params: Sampling
    arrival_time: float
    priority: int = 0
    tenant: str | None = None
    cache_salt: str | None = None
    adapter_id: int | None = None
    parent: int | None = None
    """Key of the first sequence with the same prompt of the same HTTP request, which was submitted before."""


class Cancel(msgspec.Struct, array_like=True, tag="cancel", frozen=True):
    keys: list[int]


class ResetPrefixCache(msgspec.Struct, array_like=True, tag="reset_prefix_cache", frozen=True):
    """Let no prefix computed so far be found any more; what runs goes on."""


class Ping(msgspec.Struct, array_like=True, tag="ping", frozen=True):
    """Answered with Stats, as everything is that comes while the engine is idle: it lives."""


class Shutdown(msgspec.Struct, array_like=True, tag="shutdown", frozen=True):
    """Stop at once; draining is the API process's business, which simply waits before it sends this."""


# --- engine process -> API process ---


class Connected(msgspec.Struct, array_like=True, tag="connected", frozen=True):
    """Sent first of all, before anything heavy is loaded: the socket's name is not needed any more."""


class Ready(msgspec.Struct, array_like=True, tag="ready", frozen=True, kw_only=True):
    """Sent once, after one token was produced."""

    pid: int
    model_bytes: int
    kv_cache_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    dtype: str
    weights: str
    """How the linear layers hold their weights, e.g. float32, bf16, fp16."""
    phase_seconds: dict[str, float]
    """Start-up by phase: process, import, config, weights, pack, kv_cache, warm_up."""
    eos_token_ids: tuple[int, ...] = ()
    max_num_seqs: int | None = None


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    """Of one drawn token, or one of a prompt: itself first, then the likeliest in falling order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class PromptLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Of prompt tokens that follow on those sent before; the first message begins with the prompt's second token."""

    key: int
    entries: list[Logprobs]


class Finished(msgspec.Struct, array_like=True, frozen=True):
    key: int
    reason: FinishReason
    stop_token_id: int | None
    """The token that ended it, when the reason is stop; it is among the tokens sent."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    num_preemptions: int


class Outputs(msgspec.Struct, array_like=True, tag="outputs", frozen=True, kw_only=True):
    """What one step drew: parallel columns, one entry a sequence that got a token."""

    keys: list[int]
    token_ids: list[int]
    time: float
    finished: list[Finished] = []
    logprobs: list[Logprobs | None] | None = None
    first_scheduled_keys: list[int] = []
    """Requests which ran for the first time in this step, and when that step began: the end of their queueing."""
    first_scheduled_time: float = 0.0
    prompt_logprobs: list[PromptLogprobs] = []


class Refused(msgspec.Struct, array_like=True, tag="refused", frozen=True):
    """The engine cannot serve this request: the message says why and what would fit."""

    key: int
    message: str


class Stats(msgspec.Struct, array_like=True, tag="stats", frozen=True, kw_only=True):
    """Gauges now and counters since the engine process started; sent with each step that is at least 20 ms after the
    last, and once more when the engine goes idle. Also the heartbeat."""

    time: float
    last_step_time: float
    num_running: int
    num_waiting: int
    queued_tokens: int
    blocks_total: int
    """Over all KV cache groups, as are the next two."""
    blocks_used: int
    blocks_cached: int
    """Free, but still holding a prefix that a request may hit."""
    kv_usage: float
    """Share of blocks in use, 0 to 1, of the KV cache group that is fullest: what ``kv_cache_usage_perc`` reports."""
    kv_slots_wasted: int
    """Allocated token slots of running sequences that hold no token."""
    steps: int
    prompt_tokens: int
    generation_tokens: int
    scheduled_tokens: int
    discarded_tokens: int
    """Drawn after their sequence had ended: the price of scheduling one step ahead."""
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemptions: dict[str, int]
    """By kind and reason, written kind:reason, e.g. recompute:cheaper."""
    step_seconds: dict[str, float]
    """Total seconds by part: schedule, prepare, swap, run, sample, output."""
    recomputed_tokens: int = 0
    """Computed again after a preemption by recompute."""
    swap_blocks_total: int = 0
    """Host blocks for preempted sequences, over all KV cache groups, as are the next three."""
    swap_blocks_used: int = 0
    swapped_out_blocks: int = 0
    """Copied from the cache to the swap space, and back."""
    swapped_in_blocks: int = 0
    prefilling_tokens: int = 0
    """What running sequences lack of their prompts."""
    parked_tokens: int = 0
    """Those of ``queued_tokens`` that siblings will compute."""
    received_prompt_tokens: int = 0
    """Of all Submits so far but those of children: what was sent beyond them is not in the gauges yet."""


class Failed(msgspec.Struct, array_like=True, tag="failed", frozen=True):
    """The engine process cannot go on (or not start); it exits after saying so."""

    message: str
    exit_code: int = 1
    """What quire-engine should end with if this was its start: 2 where no restart mends it."""


ToEngine = Submit | Cancel | ResetPrefixCache | Ping | Shutdown
FromEngine = Connected | Ready | Outputs | Refused | Stats | Failed
