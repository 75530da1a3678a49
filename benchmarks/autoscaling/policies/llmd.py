"""llm-d's workload variant autoscaler (WVA), based on KV cache and queue; an HPA follows its number.

Two published analyzers:
- *percentage* (V1), https://github.com/llm-d/llm-d-workload-variant-autoscaler docs/saturation-analyzer.md: one more
  replica while the spare KV share or queue of those not saturated is small on average, one fewer if the load would fit
  without it; nothing while one starts.
- *tokens* (V2, the default since v0.9.0), docs/developer-guide/saturation-scaling-config.md ("Engine post-step
  formula", "Per-replica demand …") and internal/engines/analyzers/saturation_v2: demand in KV tokens compared with the
  observed capacity of a replica when its queue was full; all missing replicas at once, with pending ones counted.

Thresholds: KV 0.80, queue 5, spare 0.10 and 3, scale up over 0.85, down under 0.70. Metrics are ``max_over_time[1m]``
of what Prometheus scraped (15 s); WVA evaluates each 60 s (``GLOBAL_OPT_INTERVAL``); its ``wva_desired_replicas`` is
scraped and read by an HPA with ``averageValue: 1``, whose windows the chart sets to 240 s and ten pods in 150 s
(docs/integrations/hpa-integration.md). With one variant, cost does not matter.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from benchmarks.autoscaling.policies.hpa import SYNC_SECONDS, Controller, Rules, Step, Unit, replicas_for_average_value
from benchmarks.autoscaling.policies.signals import Pods, Series, kv_usage, pods_of
from quire_cli.simulation.fleet import Scaling
from quire_operator.domain.autoscaling.observation import Observation, ReplicaSample

SCRAPE_SECONDS = 15.0
_PEAK_SECONDS = 60.0
_SHAPE_SECONDS = 300.0
_REMEMBERED = 10
_BUCKETS = ((100, "short"), (500, "medium"))
_EPSILON = 1e-9


class Analyzer(StrEnum):
    PERCENTAGE = "percentage"
    TOKENS = "tokens"


def chart_rules(window_seconds: float) -> Rules:
    """Return the rules in WVA's chart."""
    return Rules(window_seconds=window_seconds, policies=(Step(unit=Unit.PODS, value=10, period_seconds=150),))


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmdConfig:
    """The settings of ``wva-saturation-scaling-config`` and of the HPA's behavior."""

    analyzer: Analyzer = Analyzer.TOKENS
    kv_cache_threshold: float = 0.80
    queue_length_threshold: float = 5.0
    kv_spare_trigger: float = 0.10
    queue_spare_trigger: float = 3.0
    scale_up_threshold: float = 0.85
    scale_down_boundary: float = 0.70
    interval_seconds: float = 60.0
    up: Rules = chart_rules(240.0)
    down: Rules = chart_rules(240.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The engine limits that WVA reads from the Deployment's arguments."""

    max_batched_tokens: int
    max_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One ready replica's peaks of the last minute and the mean shape of its requests."""

    kv_usage: float
    queue_length: float
    kv_tokens: float = 0.0
    """The capacity in tokens."""
    mean_input: float = 0.0
    mean_output: float = 0.0

    @property
    def tokens_in_use(self) -> float:
        return self.kv_usage * self.kv_tokens


# --- V1 ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Spare:
    """Averages over the replicas that are not saturated, and whether one of them could be removed."""

    replicas: int
    kv: float
    queue: float
    down_is_safe: bool

    def is_short(self, config: LlmdConfig) -> bool:
        return self.kv < config.kv_spare_trigger - _EPSILON or self.queue < config.queue_spare_trigger - _EPSILON


def spare_capacity(replicas: Sequence[Replica], config: LlmdConfig) -> Spare:
    kv_limit, queue_limit = config.kv_cache_threshold, config.queue_length_threshold
    free = [r for r in replicas if r.kv_usage < kv_limit and r.queue_length < queue_limit]
    if not free:
        return Spare(replicas=0, kv=0.0, queue=0.0, down_is_safe=False)
    kv, queue = sum(r.kv_usage for r in free), sum(r.queue_length for r in free)
    left = len(free) - 1
    safe = (
        left >= 1
        and kv_limit - kv / left >= config.kv_spare_trigger - _EPSILON
        and queue_limit - queue / left >= config.queue_spare_trigger - _EPSILON
    )
    return Spare(
        replicas=len(free), kv=kv_limit - kv / len(free), queue=queue_limit - queue / len(free), down_is_safe=safe
    )


def percentage_target(
    replicas: Sequence[Replica], config: LlmdConfig, *, current: int, pending: int, desired: int | None
) -> int:
    """Return the target replicas; an earlier target that is not reached yet stays."""
    if desired is not None and desired != current:
        return desired
    ready = len(replicas)
    spare = spare_capacity(replicas, config)
    if spare.is_short(config):
        return current if pending else ready + 1
    return ready - 1 if spare.down_is_safe else ready


# --- V2 ---


class ComputeBound:
    """The estimate of the maximum tokens of a replica if compute, not memory, is the limit (``k2``)."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._seen: dict[str, deque[float]] = {}

    def tokens(self, replica: Replica, config: LlmdConfig, *, memory_bound: float) -> float:
        """Return the tokens in use while the queue is full, or their past mean, or a value from the engine's limits."""
        seen = self._seen.setdefault(_bucket(replica.mean_output), deque(maxlen=_REMEMBERED))
        if replica.queue_length >= config.queue_length_threshold and replica.tokens_in_use > 0:
            seen.append(replica.tokens_in_use)
            return replica.tokens_in_use
        if seen:
            return sum(seen) / len(seen)
        return self._derived(replica) or memory_bound

    def _derived(self, replica: Replica) -> float:
        shape = replica.mean_input + replica.mean_output
        if replica.mean_output <= 0:
            return 0.0
        steady = self._limits.max_batched_tokens * replica.mean_output / shape
        return min(steady, self._limits.max_sequences) * (replica.mean_input + replica.mean_output / 2)


def _bucket(mean_output: float) -> str:
    return next((name for limit, name in _BUCKETS if mean_output < limit), "long")


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Demand and supply in KV tokens."""

    demand: float
    per_replica: float
    ready: int
    pending: int

    def required(self, config: LlmdConfig) -> float:
        supply = (self.ready + self.pending) * self.per_replica
        return max(0.0, self.demand / config.scale_up_threshold - supply)

    def spare(self, config: LlmdConfig) -> float:
        return max(0.0, self.ready * self.per_replica - self.demand / config.scale_down_boundary)

    def target(self, config: LlmdConfig) -> int:
        if self.per_replica <= 0:
            return self.ready + self.pending
        required = self.required(config)
        if required > 0:
            return self.ready + self.pending + math.ceil(required / self.per_replica - _EPSILON)
        removable = math.floor(self.spare(config) / self.per_replica + _EPSILON)
        return max(1, self.ready + self.pending - removable)


def token_balance(replicas: Sequence[Replica], config: LlmdConfig, bound: ComputeBound, *, pending: int) -> Balance:
    demand, capacities = 0.0, []
    for replica in replicas:
        demand += replica.tokens_in_use + replica.queue_length * (replica.mean_input + replica.mean_output)
        memory = replica.kv_tokens * config.kv_cache_threshold
        capacities.append(min(memory, bound.tokens(replica, config, memory_bound=memory)))
    per_replica = median(capacities) if capacities else 0.0
    return Balance(demand=demand, per_replica=per_replica, ready=len(replicas), pending=pending)


# --- the scaler ---


class LlmdScaler:
    """WVA and HPA for the simulator's protocol: WVA each interval, the HPA each 15 s with the last scrape of WVA."""

    period_seconds = SYNC_SECONDS
    scrape_seconds = SCRAPE_SECONDS

    def __init__(self, config: LlmdConfig, *, limits: EngineLimits, minimum: int, maximum: int) -> None:
        self._config = config
        self._bound = ComputeBound(limits)
        self._peaks = Series(_PEAK_SECONDS)
        self._shapes = Series(_SHAPE_SECONDS)
        self._controller = Controller(up=config.up, down=config.down, minimum=minimum, maximum=maximum)
        self._looked_at = float("-inf")
        self._desired: int | None = None
        self._exported: int | None = None

    def decide(self, observation: Observation, now: float) -> Scaling:
        pods = pods_of(observation, now, scrape_seconds=self.scrape_seconds)
        self._peaks.add(pods.samples, now)
        self._shapes.add(pods.samples, now)
        read, self._exported = self._exported, self._desired  # a scrape of WVA is in between
        if now - self._looked_at >= self._config.interval_seconds - _EPSILON:
            self._looked_at = now
            self._desired = self._target(pods)
        if read is None:
            return Scaling(replicas=pods.current)
        proposal = replicas_for_average_value(
            float(read), target=1.0, current=pods.current, tolerances=self._controller.tolerances
        )
        return Scaling(replicas=self._controller.settle(proposal, pods.current, now))

    def _target(self, pods: Pods) -> int | None:
        """Return the target; without metrics the last number stays."""
        replicas = [r for name in sorted(pods.ready) if (r := self._replica(name)) is not None]
        if not replicas:
            return self._desired
        pending = max(0, pods.current - len(pods.ready))
        if self._config.analyzer is Analyzer.TOKENS:
            return token_balance(replicas, self._config, self._bound, pending=pending).target(self._config)
        return max(
            1,
            percentage_target(replicas, self._config, current=pods.current, pending=pending, desired=self._desired),
        )

    def _replica(self, name: str) -> Replica | None:
        usage = self._peaks.highest(name, kv_usage)
        queue = self._peaks.highest(name, lambda sample: sample.waiting)
        if usage is None or queue is None:
            return None
        finished = self._shapes.rate(lambda sample: sample.finished_requests).get(name, 0.0)
        prompts = self._shapes.rate(lambda sample: sample.prompt_tokens).get(name, 0.0)
        generated = self._shapes.rate(lambda sample: sample.generation_tokens).get(name, 0.0)
        return Replica(
            kv_usage=usage,
            queue_length=queue,
            kv_tokens=self._peaks.highest(name, _capacity) or 0.0,
            mean_input=prompts / finished if finished else 0.0,
            mean_output=generated / finished if finished else 0.0,
        )


def _capacity(sample: ReplicaSample) -> float:
    return sample.kv_tokens_capacity
