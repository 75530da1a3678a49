"""Knative's pod autoscaler (KPA) on concurrency.

https://knative.dev/docs/serving/autoscaling/kpa-specific/ and
https://knative.dev/docs/serving/autoscaling/concurrency/; defaults of ``config-autoscaler``: target 100 at 70 %
utilization, stable window 60 s, panic window 10 % of it, panic threshold 200 %, scale-up rate 1000, scale-down rate 2,
scale-down delay 0 s. For questions that the pages leave open, the order is that of knative/serving
``pkg/autoscaler/scaling/autoscaler.go``.

Metrics: each pod's queue-proxy is scraped each second; the autoscaler decides each 2 s. Concurrency is the number of
requests that run or wait in a pod's engine, averaged over the scraped pods and applied to all that are ready.
"""

import math
from collections import deque
from dataclasses import dataclass

from benchmarks.autoscaling.policies.signals import in_flight, pods_of
from quire_cli.simulation.fleet import Scaling
from quire_operator.domain.autoscaling.observation import Observation

TICK_SECONDS = 2.0
SCRAPE_SECONDS = 1.0
_EPSILON = 1e-9


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

    period_seconds = TICK_SECONDS
    scrape_seconds = SCRAPE_SECONDS

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
