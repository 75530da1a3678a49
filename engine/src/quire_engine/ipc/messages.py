"""The messages between the API process and the engine process, in msgspec's MessagePack over ZeroMQ.

From the engine process, ``StepOutput`` is the only array; the others are objects with a tag, and much rarer.

A request has an integer ``key`` that the API process counts up; the client-visible id stays in the API process. All
times are ``time.monotonic()`` seconds: both processes are on one host, so they read one clock.
"""

import msgspec

from quire_common.contract.adapters_file import AdapterFailure
from quire_engine import config_json
from quire_engine.config import EngineConfig
from quire_engine.core.batch import StepOutput
from quire_engine.core.sequence import Request
from quire_engine.core.stats import Counters, Gauges, StepSeconds
from quire_engine.grammar.spec import Vocabulary

# --- the start of an engine process ---


class RunnerFactory(msgspec.Struct, frozen=True, kw_only=True):
    """The function that loads the model: ``module:function``, called with the EngineConfig and keywords ``options``."""

    function: str = "quire_engine.runner:load_model"
    options: dict[str, bool | int | float | str | list[int]] = {}


class StartUp(msgspec.Struct, frozen=True, kw_only=True):
    """The start-up line of an engine process: one line of JSON on its standard input, which then stays open.

    When the input ends, the API process is gone, and the engine process ends too. No flag and no environment variable
    reaches the ``factory``.
    """

    address: str
    """The address on which the API process listens, in ZeroMQ's format."""
    began: float
    """The start time of the process on the monotonic clock."""
    config: EngineConfig
    factory: RunnerFactory

    def encode(self) -> bytes:
        return config_json.encode(self) + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> "StartUp":
        return config_json.decode(line, cls)


# --- API process -> engine process ---


class Submit(msgspec.Struct, array_like=True, tag="submit", frozen=True):
    """A request to compute. One with a ``parent`` is sent after that parent."""

    request: Request


class Cancel(msgspec.Struct, array_like=True, tag="cancel", frozen=True):
    keys: list[int]


class ResetPrefixCache(msgspec.Struct, array_like=True, tag="reset_prefix_cache", frozen=True):
    """A command that makes all cached prefixes unusable; running sequences continue."""


class SetVocabulary(msgspec.Struct, array_like=True, tag="set_vocabulary", frozen=True):
    """The tokens of the model, which are sent before the first request with a grammar."""

    vocabulary: Vocabulary


class LoadAdapter(msgspec.Struct, array_like=True, tag="load_adapter", frozen=True):
    """A command to read and check an adapter, which AdapterLoaded or AdapterFailed answers."""

    adapter: int
    """A number that was never used before in this server."""
    folder: str


class UnloadAdapter(msgspec.Struct, array_like=True, tag="unload_adapter", frozen=True):
    """A command to remove an adapter; requests that already use it continue."""

    adapter: int


class Ping(msgspec.Struct, array_like=True, tag="ping", frozen=True):
    """A request for Stats, which an idle engine sends after every message; it proves that the engine is alive."""


class Shutdown(msgspec.Struct, array_like=True, tag="shutdown", frozen=True):
    """A command to stop at once; the API process drains before it sends this."""


# --- engine process -> API process ---


class Connected(msgspec.Struct, tag="connected", frozen=True):
    """The first message, sent before slow imports: the socket's file is no longer needed."""


class Ready(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """The report that is sent once, after the engine has produced one token."""

    pid: int
    model_bytes: int
    kv_cache_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    dtype: str
    weights: str
    """The format of the linear layers' weights, e.g. float32, bf16, fp16."""
    phase_seconds: dict[str, float]
    """The start-up seconds by phase: process, import, config, weights, pack, kv_cache, warm_up."""
    eos_token_ids: tuple[int, ...] = ()
    max_num_seqs: int | None = None


class StepExpected(msgspec.Struct, tag="step_expected", frozen=True):
    """The announcement that steps are now expected to take this long; 0 means within the hang timeout.

    It is sent before such a step, and after the last one.
    """

    seconds: float


PATIENCE = 10.0
"""The factor by which a step may exceed its expected time: the machine may be busy or throttled."""


def hang_limit(hang_timeout_seconds: float, expected_seconds: float) -> float:
    """Return the time without a step after which the engine counts as hung, for a step's expected time."""
    return max(hang_timeout_seconds, PATIENCE * expected_seconds)


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The rejection or the failure of a request; the message gives the reason and what would fit."""

    key: int
    message: str


class AdapterLoaded(msgspec.Struct, tag="adapter_loaded", frozen=True):
    """The report that an adapter was read and can be served; it comes again whenever it is read again."""

    adapter: int
    rank: int
    num_bytes: int


class AdapterFailed(msgspec.Struct, tag="adapter_failed", frozen=True):
    """The report that an adapter cannot be served."""

    adapter: int
    reason: AdapterFailure
    message: str


class Stats(msgspec.Struct, tag="stats", frozen=True, kw_only=True):
    """The state of the engine, and its counters since its process started.

    It is sent with each step that ends at least 20 ms after the last report, and once more when the engine becomes
    idle. It is also the heartbeat.
    """

    time: float
    last_step_time: float
    gauges: Gauges
    counters: Counters
    seconds: StepSeconds
    received_prompt_tokens: int = 0
    """The prompt tokens of all Submits so far except forked sequences; the gauges do not include the newest ones yet.
    """


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The report that the engine process cannot start or continue; it exits after sending it."""

    message: str
    exit_code: int = 1
    """The exit code of quire-engine if this was its start: 2 if a restart cannot help."""


ToEngine = Submit | Cancel | ResetPrefixCache | SetVocabulary | LoadAdapter | UnloadAdapter | Ping | Shutdown
FromEngine = Connected | Ready | StepOutput | StepExpected | Refused | AdapterLoaded | AdapterFailed | Stats | Failed
