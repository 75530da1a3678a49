"""The input of a simulation besides its requests: the speed of an engine, the start and end of replicas, faults. Pure.

``simulate`` reads them.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

DEFAULT_GENERATION_STALL_SECONDS = 0.25
"""The default of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """The engine of one replica.

    The time of a step is

    step_seconds + prompt tokens / prefill_tokens_per_second + prefill_seconds_per_pair · pairs of a prompt token and
    one it looks back on + decode_seconds_per_sequence · decoding sequences + decode_seconds_per_kv_token · their tokens
    """

    prefill_tokens_per_second: float
    step_seconds: float
    decode_seconds_per_sequence: float
    kv_tokens: int
    decode_seconds_per_kv_token: float = 0.0
    prefill_seconds_per_pair: float = 0.0
    max_sequences: int = 256
    max_batched_tokens: int = 2048
    max_model_length: int | None = None
    """Tokens of one sequence, prompt and answer; longer prompts are refused, longer answers cut. None: no limit."""
    block_size: int = 16
    prefix_caching: bool = True
    max_generation_stall_seconds: float | None = DEFAULT_GENERATION_STALL_SECONDS
    """The time a step may spend on prompts while others generate; None limits it by ``max_batched_tokens`` only."""
    max_queued_requests: int = 1024
    max_queued_kv_caches: int = 8
    """More prompt tokens than fill the KV cache so many times may not wait: the engine turns requests away."""

    def prefill_seconds(self, tokens: int, *, cached: int = 0) -> float:
        """Return the time of a prompt on an idle engine, with ``cached`` more tokens found in the prefix cache."""
        steps = math.ceil(tokens / self.max_batched_tokens)
        pairs = tokens * (cached + tokens / 2)
        return (
            steps * self.step_seconds + tokens / self.prefill_tokens_per_second + pairs * self.prefill_seconds_per_pair
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeOutage:
    """No replica's metrics can be had for a while; they serve on."""

    start: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """The busiest ready replica dies: what it had fails, and it is ready again after a start-up delay."""

    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowReplicas:
    """The ``count`` oldest replicas take ``factor`` times as long for every step, for a while."""

    start: float
    seconds: float
    factor: float
    count: int = 1


Fault: TypeAlias = ScrapeOutage | Crash | SlowReplicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything but the requests and the law."""

    engine: EngineModel
    startup_delay_seconds: float
    """From being asked for to being ready."""
    min_replicas: int = 1
    max_replicas: int
    initial_replicas: int = 1
    """Ready from the beginning."""
    startup_jitter: float = 0.1
    """Start-up delays vary by up to this share, both ways."""
    drain_seconds: float = 120.0
    """The time a removed replica has to finish its requests; the rest then fails."""
    hold_seconds: float = 120.0
    """The time the gateway holds a request while no replica is ready."""
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    scored_from: float = 0.0
    """The end of the warm-up, which counts neither in attainment nor in replica-hours."""
    wake_seconds: float | None = None
    """The delay of an extra evaluation if a request is held at zero replicas; None: no extra evaluation."""
    settle_seconds: float = 600.0
    """The time to wait for unfinished requests after the last arrival."""
    prefix_block_tokens: int = 512
    """Prompt tokens that one of ``Request.prefix_blocks`` stands for; Mooncake's traces have 512."""
    slowdown: tuple[float, ...] = ()
    """Replicas that share one machine's cores: ``slowdown[n - 1]`` is how many times as long a step takes while n are
    busy; the last holds for more. Empty: each has its own hardware."""
    timeline_seconds: float | None = None
    """The time between points of the timeline; None adds one at each evaluation."""
