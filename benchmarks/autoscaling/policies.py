"""The autoscalers of others, implemented from their published formulas and documentation, and two references.

Each has its formulas as pure functions, tested on the worked examples of its documentation, a frozen configuration
whose defaults are the published ones, and a ``Scaler`` of the simulator:

HPA     https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/; where it leaves a question
        open, the order of kube-controller-manager (``replica_calculator.go``, ``horizontal.go``)
KEDA    https://keda.sh/docs/2.17/reference/scaledobject-spec/ and …/scalers/prometheus/; it feeds an HPA
KPA     https://knative.dev/docs/serving/autoscaling/kpa-specific/ and …/concurrency/, and ``autoscaler.go``
llm-d   https://github.com/llm-d/llm-d-workload-variant-autoscaler, docs/developer-guide/saturation-scaling-config.md
        and internal/engines/analyzers/saturation_v2: demand in KV tokens against observed capacity; it feeds an HPA

A failed scrape ends a series at once in Prometheus, so a query does not find a sample older than its scrape interval.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from quire_cli.simulation.fleet import Scaling
from quire_cli.simulation.results import LATE_SECONDS
from quire_cli.simulation.traces import Request
from quire_operator.autoscaling.observation import Observation, ReplicaPhase, ReplicaSample

SYNC_SECONDS = SCRAPE_SECONDS = 15.0
"""The period of the HPA's controller and of Prometheus' scrapes."""
TOLERANCE = 0.1
_EPSILON = 1e-9
_SLACK_SECONDS = 1.0


# --- what a metrics pipeline shows ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The pods of one Deployment as a pipeline shows them."""

    current: int
    """``spec.replicas``."""
    pending: frozenset[str]
    unready: frozenset[str]
    """The running pods that are not ready."""
    ready: frozenset[str]
    samples: Mapping[str, ReplicaSample]
    """The samples of ready pods with a fresh series."""
    draining: Mapping[str, ReplicaSample]
    """The samples of pods with a deletion timestamp, which Prometheus scrapes until they end."""

    @property
    def missing(self) -> frozenset[str]:
        """The running pods without metrics."""
        return (self.ready | self.unready) - self.samples.keys()


def pods_of(observation: Observation, now: float, *, scrape_seconds: float) -> Pods:
    """Return the pods; samples older than ``scrape_seconds`` belong to a series that has ended."""
    names: dict[ReplicaPhase, set[str]] = {phase: set() for phase in ReplicaPhase}
    samples: dict[str, ReplicaSample] = {}
    draining: dict[str, ReplicaSample] = {}
    for replica in observation.replicas:
        names[replica.phase].add(replica.name)
        if replica.sample is None or now - replica.sample.time > scrape_seconds + _SLACK_SECONDS:
            continue
        if replica.phase is ReplicaPhase.READY:
            samples[replica.name] = replica.sample
        elif replica.phase is ReplicaPhase.DRAINING:
            draining[replica.name] = replica.sample
    there = sum(len(names[phase]) for phase in ReplicaPhase if phase is not ReplicaPhase.DRAINING)
    return Pods(
        current=there if observation.target is None else observation.target,
        pending=frozenset(names[ReplicaPhase.PENDING]),
        unready=frozenset(names[ReplicaPhase.LOADING]),
        ready=frozenset(names[ReplicaPhase.READY]),
        samples=samples,
        draining=draining,
    )


def in_flight(sample: ReplicaSample) -> float:
    """Return the requests in the engine: ``vllm:num_requests_running + vllm:num_requests_waiting``."""
    return sample.running + sample.waiting


def kv_usage(sample: ReplicaSample) -> float:
    """Return ``vllm:kv_cache_usage_perc``, 0 to 1."""
    return sample.kv_tokens_used / sample.kv_tokens_capacity


class Series:
    """The samples of the last ``seconds`` by pod, for range functions of PromQL."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._points: dict[str, deque[ReplicaSample]] = {}

    def add(self, samples: Mapping[str, ReplicaSample], now: float) -> None:
        for name, sample in samples.items():
            points = self._points.setdefault(name, deque())
            if not points or points[-1].time < sample.time:
                points.append(sample)
        for name in list(self._points):
            points = self._points[name]
            while points and points[0].time <= now - self._seconds:
                points.popleft()
            if not points:
                del self._points[name]

    def highest(self, name: str, value: Callable[[ReplicaSample], float]) -> float | None:
        """Return ``max_over_time``; None if the window has no sample."""
        return max((value(sample) for sample in self._points.get(name, ())), default=None)

    def rate(self, counter: Callable[[ReplicaSample], float]) -> dict[str, float]:
        """Return ``rate`` of each pod's counter per second; a pod with one sample has none.

        A fall is a restart from 0.
        """
        rates: dict[str, float] = {}
        for name, points in self._points.items():
            if len(points) < 2:
                continue
            values = [counter(sample) for sample in points]
            pairs = zip(values, values[1:], strict=False)
            increase = sum(after - before if after >= before else after for before, after in pairs)
            rates[name] = increase / (points[-1].time - points[0].time)
        return rates


# --- HPA ---


class Unit(StrEnum):
    PODS = "Pods"
    PERCENT = "Percent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An entry of ``behavior.*.policies[]``: at most ``value`` in each period."""

    unit: Unit
    value: float
    period_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules ``behavior.scaleUp`` or ``behavior.scaleDown``, with the default ``selectPolicy: Max``."""

    window_seconds: float
    policies: tuple[Step, ...]
    tolerance: float = TOLERANCE


SCALE_UP = Rules(
    window_seconds=0.0,
    policies=(
        Step(unit=Unit.PERCENT, value=100, period_seconds=15),
        Step(unit=Unit.PODS, value=4, period_seconds=15),
    ),
)
"""The published default."""
SCALE_DOWN = Rules(window_seconds=300.0, policies=(Step(unit=Unit.PERCENT, value=100, period_seconds=15),))
"""The published default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    up: float = TOLERANCE
    down: float = TOLERANCE

    def cover(self, ratio: float) -> bool:
        """Return whether the ratio is too near to 1 to act."""
        return 1 - self.down - _EPSILON <= ratio <= 1 + self.up + _EPSILON


def replicas_for_pods_metric(
    values: Mapping[str, float],
    *,
    target: float,
    current: int,
    pending: AbstractSet[str] = frozenset(),
    missing: AbstractSet[str] = frozenset(),
    tolerances: Tolerances = Tolerances(),
) -> int | None:
    """Return the replicas for a metric of each pod with the average ``target``; None if no pod has the metric.

    Pods that lack it count as 100 % of the target on the way down and as 0 on the way up; unready pods count as 0 on
    the way up. If that reverses the direction or comes near enough to the target, nothing changes.
    """
    if not values:
        return None
    ratio = sum(values.values()) / len(values) / target
    waits = pending if ratio > 1 else frozenset()
    if not waits and not missing:
        return current if tolerances.cover(ratio) else _whole(ratio * len(values))
    filled = dict(values) | dict.fromkeys(missing, target if ratio < 1 else 0.0) | dict.fromkeys(waits, 0.0)
    cautious = sum(filled.values()) / len(filled) / target
    turned = (ratio < 1 < cautious) or (cautious < 1 < ratio)
    if tolerances.cover(cautious) or turned:
        return current
    wanted = _whole(cautious * len(filled))
    backwards = (cautious < 1 and wanted > current) or (cautious > 1 and wanted < current)
    return current if backwards else wanted


def replicas_for_average_value(
    total: float, *, target: float, current: int, tolerances: Tolerances = Tolerances()
) -> int:
    """Return the replicas for an external metric with ``target.averageValue``, whose total all replicas share."""
    if current > 0 and tolerances.cover(total / (target * current)):
        return current
    return _whole(total / target)


def _whole(replicas: float) -> int:
    return math.ceil(replicas - _EPSILON)


@dataclass(frozen=True, slots=True)
class _Change:
    time: float
    replicas: int


class Controller:
    """The controller's state of one HPA: its recommendations and the changes it made."""

    def __init__(self, *, up: Rules = SCALE_UP, down: Rules = SCALE_DOWN, minimum: int, maximum: int) -> None:
        self._up, self._down = up, down
        self._minimum, self._maximum = minimum, maximum
        self._recommended: list[_Change] = []
        self._changes: list[_Change] = []

    @property
    def tolerances(self) -> Tolerances:
        return Tolerances(up=self._up.tolerance, down=self._down.tolerance)

    def settle(self, proposal: int | None, current: int, now: float) -> int:
        """Return the replicas to request; without a proposal, because no metric could be read, nothing changes."""
        if proposal is None:
            return current
        if not self._recommended:
            self._recommended.append(_Change(now, current))
        wanted = self._bounded(self._limited(self._stabilized(proposal, current, now), current, now))
        if wanted != current:
            self._changes.append(_Change(now, wanted - current))
        return wanted

    def _stabilized(self, proposal: int, current: int, now: float) -> int:
        """Return the stabilized proposal: up to the minimum recommended in the window, down to the maximum."""
        longest = max(self._up.window_seconds, self._down.window_seconds)
        self._recommended = [r for r in self._recommended if r.time > now - longest]
        self._recommended.append(_Change(now, proposal))
        lowest = min(self._within(self._up.window_seconds, now, proposal))
        highest = max(self._within(self._down.window_seconds, now, proposal))
        return min(max(current, lowest), highest)

    def _within(self, seconds: float, now: float, proposal: int) -> list[int]:
        return [proposal, *(r.replicas for r in self._recommended if r.time > now - seconds)]

    def _limited(self, wanted: int, current: int, now: float) -> int:
        if wanted > current:
            return min(wanted, self._limit(self._up, current, now, sign=1))
        if wanted < current:
            return max(wanted, self._limit(self._down, current, now, sign=-1))
        return current

    def _limit(self, rules: Rules, current: int, now: float, *, sign: int) -> int:
        """Return the limits that the policies set now; they count from the start of each period."""
        reaches: list[int] = []
        for step in rules.policies:
            start = current - sum(c.replicas for c in self._changes if c.time > now - step.period_seconds)
            if step.unit is Unit.PODS:
                reaches.append(int(start + sign * step.value))
            elif sign > 0:
                reaches.append(math.ceil(start * (1 + step.value / 100) - _EPSILON))
            else:
                reaches.append(int(start * (1 - step.value / 100) + _EPSILON))
        return max(*reaches, current) if sign > 0 else min(*reaches, current)

    def _bounded(self, replicas: int) -> int:
        return max(self._minimum, min(replicas, self._maximum))


@dataclass(frozen=True, slots=True, kw_only=True)
class HpaConfig:
    """One HPA on the running and waiting requests per pod, for which there is no published target."""

    requests_per_pod: float = 16.0
    up: Rules = SCALE_UP
    down: Rules = SCALE_DOWN


class HpaScaler:
    """The HPA for the simulator's protocol."""

    period_seconds = SYNC_SECONDS
    scrape_seconds = SCRAPE_SECONDS

    def __init__(self, config: HpaConfig, *, minimum: int, maximum: int) -> None:
        self._config = config
        self._controller = Controller(up=config.up, down=config.down, minimum=minimum, maximum=maximum)

    def decide(self, observation: Observation, now: float) -> Scaling:
        pods = pods_of(observation, now, scrape_seconds=self.scrape_seconds)
        proposal = replicas_for_pods_metric(
            {name: in_flight(sample) for name, sample in pods.samples.items()},
            target=self._config.requests_per_pod,
            current=pods.current,
            pending=pods.pending,
            missing=pods.missing,
            tolerances=self._controller.tolerances,
        )
        return Scaling(replicas=self._controller.settle(proposal, pods.current, now))


# --- KEDA ---


_FAILURES = 3
"""``failureThreshold`` in the examples of the page."""
_RANGE_SECONDS = 120.0


class Query(StrEnum):
    """The query that the trigger sends to Prometheus."""

    WAITING = "sum(vllm:num_requests_waiting)"
    TOKEN_RATE = "sum(rate(vllm:prompt_tokens_total[2m]))"


@dataclass(frozen=True, slots=True, kw_only=True)
class KedaConfig:
    """The configuration of one ScaledObject. Query and threshold have no published default."""

    query: Query = Query.WAITING
    threshold: float = 16.0
    ignore_null_values: bool = True
    fallback_replicas: int | None = None
    up: Rules = SCALE_UP
    down: Rules = SCALE_DOWN


class Trigger:
    """The results of one trigger: the query's value, 0 or an error for an empty one, the fallback after errors."""

    def __init__(self, config: KedaConfig) -> None:
        self._config = config
        self._failures = 0

    def metric(self, result: float | None) -> float | None:
        """Return the value that the HPA receives; None for an error."""
        if result is None and self._config.ignore_null_values:
            result = 0.0
        if result is not None:
            self._failures = 0
            return result
        self._failures += 1
        replicas = self._config.fallback_replicas
        return None if replicas is None or self._failures <= _FAILURES else self._config.threshold * replicas


class KedaScaler:
    """KEDA for the simulator's protocol."""

    period_seconds = SYNC_SECONDS
    scrape_seconds = SCRAPE_SECONDS

    def __init__(self, config: KedaConfig, *, minimum: int, maximum: int) -> None:
        self._config = config
        self._series = Series(_RANGE_SECONDS)
        self._trigger = Trigger(config)
        self._controller = Controller(up=config.up, down=config.down, minimum=minimum, maximum=maximum)

    def decide(self, observation: Observation, now: float) -> Scaling:
        pods = pods_of(observation, now, scrape_seconds=self.scrape_seconds)
        value = self._trigger.metric(self._result(pods, now))
        proposal = None
        if value is not None:
            proposal = replicas_for_average_value(
                value, target=self._config.threshold, current=pods.current, tolerances=self._controller.tolerances
            )
        return Scaling(replicas=self._controller.settle(proposal, pods.current, now))

    def _result(self, pods: Pods, now: float) -> float | None:
        """Evaluate the query over all series; return None without series."""
        scraped = {**pods.samples, **pods.draining}
        self._series.add(scraped, now)
        if self._config.query is Query.WAITING:
            values = [sample.waiting for sample in scraped.values()]
        else:
            values = list(self._series.rate(lambda sample: sample.prompt_tokens).values())
        return sum(values) if values else None


# --- KPA ---


@dataclass(frozen=True, slots=True, kw_only=True)
class KpaConfig:
    """The settings of ``config-autoscaler`` and the annotations of a revision."""

    target: float = 100.0
    """``container-concurrency-target-default`` or ``autoscaling.knative.dev/target``."""
    target_utilization: float = 0.7
    stable_window_seconds: float = 60.0
    panic_window_share: float = 0.1
    panic_threshold: float = 2.0
    max_scale_up_rate: float = 1000.0
    max_scale_down_rate: float = 2.0
    scale_down_delay_seconds: float = 0.0

    @property
    def target_per_pod(self) -> float:
        return self.target * self.target_utilization


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """The concurrency of the whole revision, averaged over the two windows."""

    stable: float
    panic: float


class Kpa:
    """The autoscaler of one revision: the caller keeps the windows, this class panic and delay."""

    def __init__(self, config: KpaConfig, *, ready: int, now: float) -> None:
        self._config = config
        # A new autoscaler for more than one pod starts in panic, so that it does not scale down before it has data.
        self._panicking_since: float | None = now if ready > 1 else None
        self._most_in_panic = ready if ready > 1 else 0
        self._delayed: deque[tuple[float, int]] = deque()

    @property
    def is_panicking(self) -> bool:
        return self._panicking_since is not None

    def scale(self, concurrency: Concurrency, *, ready: int, now: float) -> int:
        """Return the desired number of pods."""
        config, pods = self._config, max(1, ready)
        stable = math.ceil(concurrency.stable / config.target_per_pod - _EPSILON)
        panic = math.ceil(concurrency.panic / config.target_per_pod - _EPSILON)
        highest = math.ceil(config.max_scale_up_rate * pods)
        lowest = math.floor(pods / config.max_scale_down_rate)
        wanted = min(max(stable, lowest), highest)
        self._judge_panic(is_over=panic / pods >= config.panic_threshold, now=now)
        if self.is_panicking:
            self._most_in_panic = max(self._most_in_panic, wanted, min(max(panic, lowest), highest))
            wanted = self._most_in_panic
        return self._with_delay(wanted, now)

    def _judge_panic(self, *, is_over: bool, now: float) -> None:
        if is_over:
            self._panicking_since = now
        elif self._panicking_since is not None and now - self._panicking_since > self._config.stable_window_seconds:
            self._panicking_since = None
            self._most_in_panic = 0

    def _with_delay(self, wanted: int, now: float) -> int:
        """Return the maximum desired within the scale-down delay."""
        if self._config.scale_down_delay_seconds <= 0:
            return wanted
        self._delayed.append((now, wanted))
        while self._delayed[0][0] <= now - self._config.scale_down_delay_seconds:
            self._delayed.popleft()
        return max(pods for _, pods in self._delayed)


class KpaScaler:
    """The KPA for the simulator's protocol."""

    period_seconds = 2.0
    scrape_seconds = 1.0

    def __init__(self, config: KpaConfig, *, minimum: int, maximum: int) -> None:
        self._config = config
        self._minimum, self._maximum = minimum, maximum
        self._kpa: Kpa | None = None
        self._points: deque[tuple[float, float]] = deque()

    def decide(self, observation: Observation, now: float) -> Scaling:
        pods = pods_of(observation, now, scrape_seconds=self.scrape_seconds)
        ready = len(pods.ready)
        if self._kpa is None:
            self._kpa = Kpa(self._config, ready=ready, now=now)
        if pods.samples:
            mean = sum(map(in_flight, pods.samples.values())) / len(pods.samples)
            self._points.append((now, mean * ready))
        while self._points and self._points[0][0] <= now - self._config.stable_window_seconds:
            self._points.popleft()
        if not self._points:
            return Scaling(replicas=pods.current)
        wanted = self._kpa.scale(self._concurrency(now), ready=ready, now=now)
        return Scaling(replicas=max(self._minimum, min(wanted, self._maximum)))

    def _concurrency(self, now: float) -> Concurrency:
        """Return the concurrency over the rest of each window; without panic scrapes, the stable window's."""
        stable = [value for _, value in self._points]
        since = now - self._config.stable_window_seconds * self._config.panic_window_share
        panic = [value for time, value in self._points if time > since] or stable
        return Concurrency(stable=sum(stable) / len(stable), panic=sum(panic) / len(panic))


# --- llm-d ---


_PEAK_SECONDS = 60.0
_SHAPE_SECONDS = 300.0
_REMEMBERED = 10
_BUCKETS = ((100, "short"), (500, "medium"))


def chart_rules(window_seconds: float) -> Rules:
    return Rules(window_seconds=window_seconds, policies=(Step(unit=Unit.PODS, value=10, period_seconds=150),))


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmdConfig:
    """The settings of ``wva-saturation-scaling-config`` and of the HPA's behavior."""

    kv_cache_threshold: float = 0.80
    queue_length_threshold: float = 5.0
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
        return token_balance(replicas, self._config, self._bound, pending=pending).target(self._config)

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


# --- references ---


_HEADROOM = 1.25
_SPARE = 1
_LOOK_BACK_SECONDS = 900


class StaticScaler:
    period_seconds = 60.0
    scrape_seconds = 0.0

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    def decide(self, observation: Observation, now: float) -> Scaling:
        return Scaling(replicas=self._replicas)


def needed_so_far(work: Sequence[float]) -> list[float]:
    """Return, by second, the maximum replicas that any interval up to then kept busy, with ``LATE_SECONDS`` allowed.

    ``work[t]`` is the seconds of a busy replica that arrive in second t. Work that arrives from a to t is done in time
    by n replicas only if it is at most n · (t − a + LATE_SECONDS).
    """
    most, needs = 0.0, []
    for at in range(len(work)):
        total = 0.0
        for back in range(min(at + 1, _LOOK_BACK_SECONDS)):
            total += work[at - back]
            most = max(most, total / (back + 1 + LATE_SECONDS))
        needs.append(most)
    return needs


class ReactiveBound:
    """The reactive bound for the simulator's protocol; it reads the requests themselves."""

    period_seconds = 1.0
    scrape_seconds = 60.0

    def __init__(self, requests: Sequence[Request], costs: Sequence[float], *, static: int, maximum: int) -> None:
        """Create the bound. ``costs`` are busy seconds by request, ``static`` the replicas of hindsight static."""
        work = [0.0] * (int(requests[-1].time) + 1)
        for request, cost in zip(requests, costs, strict=True):
            work[int(request.time)] += cost
        needs = needed_so_far(work)
        most = max(needs[-1], 1e-9)
        self._needs = [need / most * static for need in needs]
        self._maximum = maximum

    def decide(self, observation: Observation, now: float) -> Scaling:
        # The requests of the second that has just ended are known.
        known = min(int(now) - 1, len(self._needs) - 1)
        need = self._needs[known] if known >= 0 else 0.0
        asked = len(observation.replicas) if observation.target is None else observation.target
        wanted = math.ceil(need * _HEADROOM) + _SPARE
        return Scaling(replicas=max(asked, min(wanted, self._maximum)))
