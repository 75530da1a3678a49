"""What the API process and the engine process say to each other, as msgspec arrays over ZeroMQ.

A request is known by an integer ``key`` that the API process counts up; the client-visible id never crosses. All times
are ``time.monotonic()`` seconds: both processes are on one host, so they read one clock.
"""

import msgspec

from quire_engine.core.batch import FinishedSequence, PromptLogprobs, TokenLogprobs
from quire_engine.core.sequence import Request
from quire_engine.core.stats import Counters, Gauges, StepSeconds

# --- API process -> engine process ---


class Submit(msgspec.Struct, array_like=True, tag="submit", frozen=True):
    """Compute this request. One with a ``parent`` is sent after that parent."""

    request: Request


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


class Outputs(msgspec.Struct, array_like=True, tag="outputs", frozen=True, kw_only=True):
    """What one step drew: parallel columns, one entry a sequence that got a token."""

    keys: list[int]
    token_ids: list[int]
    time: float
    finished: list[FinishedSequence] = []
    logprobs: list[TokenLogprobs | None] | None = None
    first_scheduled_keys: list[int] = []
    """Requests which ran for the first time in this step, and when that step began: the end of their queueing."""
    first_scheduled_time: float = 0.0
    prompt_logprobs: list[PromptLogprobs] = []
    first_scheduled_cached: list[int] = []
    """The prompt tokens of these requests that were found in the prefix cache."""


class StepExpected(msgspec.Struct, array_like=True, tag="step_expected", frozen=True):
    """From now on steps are expected to take so long; 0 is no longer than the hang timeout allows anyway. It is sent
    before such a step, and after the last one."""

    seconds: float


class Refused(msgspec.Struct, array_like=True, tag="refused", frozen=True):
    """The engine cannot serve this request: the message says why and what would fit."""

    key: int
    message: str


class Stats(msgspec.Struct, array_like=True, tag="stats", frozen=True, kw_only=True):
    """The state of the engine, and its counters since its process started. It is sent with each step that ends at least
    20 ms after the last report, and once more when the engine goes idle. It is also the heartbeat."""

    time: float
    last_step_time: float
    gauges: Gauges
    counters: Counters
    seconds: StepSeconds
    received_prompt_tokens: int = 0
    """Prompt tokens of all Submits so far but those of children: what was sent in addition is not in the gauges yet."""


class Failed(msgspec.Struct, array_like=True, tag="failed", frozen=True):
    """The engine process cannot go on (or not start); it exits after saying so."""

    message: str
    exit_code: int = 1
    """What quire-engine should end with if this was its start: 2 where no restart mends it."""


ToEngine = Submit | Cancel | ResetPrefixCache | Ping | Shutdown
FromEngine = Connected | Ready | Outputs | StepExpected | Refused | Stats | Failed
