"""The metrics of the autoscaler: the last decision about each LLMDeployment, and the health of its metrics sources.

``app`` and the scaling loop feed it. A scrape computes the series of each LLMDeployment from its last decision, so that
they disappear with it and cost nothing between scrapes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire_operator.domain.autoscaling.autoscaler import Decision
from quire_operator.domain.cluster_state.observed import Key

_PREFIX = "quire_operator_autoscaling_"
_TICK_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0)


class ScalingTelemetry:
    """Counters and histograms, and a collector of the last decisions."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ticks = Histogram(
            f"{_PREFIX}tick_seconds",
            "Duration of one evaluation of all autoscaled LLMDeployments.",
            buckets=_TICK_BUCKETS,
            registry=registry,
        )
        self._prometheus_errors = Counter(
            "quire_operator_prometheus_errors",
            "Failed Prometheus queries by reason.",
            ["reason"],
            registry=registry,
        )
        self._scrape_errors = Counter(
            "quire_operator_replica_scrape_errors",
            "Failed scrapes of replicas by reason.",
            ["reason"],
            registry=registry,
        )
        self._collector = _Decisions()
        registry.register(self._collector)

    def prometheus_failed(self, reason: str) -> None:
        self._prometheus_errors.labels(reason=reason).inc()

    def scrape_failed(self, reason: str) -> None:
        self._scrape_errors.labels(reason=reason).inc()

    def show(
        self,
        decisions: Callable[[], Mapping[str, Decision]],
        *,
        last_answer: Callable[[], float] | None,
        gateways: Callable[[], tuple[int, int] | None],
    ) -> None:
        """Serve the decisions while this process leads.

        ``last_answer`` returns the Unix time of Prometheus' last answer; None if there is no Prometheus. ``gateways``
        returns how many gateways were polled and how many answered.
        """
        self._collector.shown = _Shown(decisions=decisions, last_answer=last_answer, gateways=gateways)

    def hide(self) -> None:
        """Stop serving decisions: this process no longer leads."""
        self._collector.shown = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    decisions: Callable[[], Mapping[str, Decision]]
    last_answer: Callable[[], float] | None
    gateways: Callable[[], tuple[int, int] | None]


class _Decisions(Collector):
    def __init__(self) -> None:
        self.shown: _Shown | None = None

    def collect(self) -> Iterator[Metric]:
        shown = self.shown
        if shown is None:
            return
        yield from _decided(shown.decisions())
        if shown.last_answer is not None:
            yield GaugeMetricFamily(
                "quire_operator_prometheus_last_answer_timestamp_seconds",
                "Unix time of the last answer of Prometheus; 0 before the first answer.",
                value=shown.last_answer(),
            )
        gateways = shown.gateways()
        if gateways is not None:
            asked, answered = gateways
            text = "Gateways that {} in the last poll of held requests."
            yield GaugeMetricFamily("quire_operator_gateways", text.format("were polled"), value=asked)
            yield GaugeMetricFamily("quire_operator_gateway_answers", text.format("answered"), value=answered)


def _decided(decisions: Mapping[str, Decision]) -> Iterator[Metric]:
    numbers = {name: _family(name, text) for name, text in _NUMBERS.items()}
    need, seen, reasons = _family(*_NEED, "term"), _family(*_INPUT, "input"), _family(*_REASON, "reason")
    age, now = _family(*_AGE), time()
    for text, decision in decisions.items():
        key = Key.parse(text)
        labels = [key.namespace, key.name]
        for name, value in _numbers(decision).items():
            numbers[name].add_metric(labels, value)
        for term in decision.terms:
            need.add_metric([*labels, term.reason.value], term.need)
        for name in _SEEN & decision.inputs.keys():
            seen.add_metric([*labels, name], decision.inputs[name])
        reasons.add_metric([*labels, decision.reason.value], 1.0)
        if (oldest := decision.oldest_sample) is not None:
            age.add_metric(labels, max(0.0, now - oldest))
    yield from (*numbers.values(), need, seen, reasons, age)


_NUMBERS = {
    "desired_replicas": "Replicas in the last decision; in mode Recommend, the recommended number.",
    "current_replicas": "Requested replicas at the last tick.",
    "min_replicas": "spec.autoscaling.minReplicas.",
    "max_replicas": "spec.autoscaling.maxReplicas.",
    "enforced": "1 in mode Enforce, 0 in mode Recommend.",
}
_SEEN = frozenset({"ready", "starting", "fresh", "waiting", "running", "heldRequests"})
"""The inputs that are served. Replicas serve their own metrics; these are inputs that they do not know."""
_NEED = ("need_replicas", "Replicas that each signal requires, not rounded; the largest one counts.")
_INPUT = ("input", "Inputs of the last tick.")
_REASON = ("reason", "1 for the reason of the last decision.")
_AGE = ("metrics_age_seconds", "Age of the oldest sample among the newest ones of the ready replicas.")


def _family(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{_PREFIX}{name}", text, labels=("namespace", "name", *labels))


def _numbers(decision: Decision) -> dict[str, float]:
    return {
        "desired_replicas": decision.desired,
        "current_replicas": decision.current,
        "min_replicas": decision.bounds[0],
        "max_replicas": decision.bounds[1],
        "enforced": float(decision.enforced),
    }
