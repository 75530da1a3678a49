"""What the gateway says of itself at /metrics: per model and per replica ("backend").

Series of replicas that left are removed. A model nobody serves never becomes a label, so clients can't make series.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire_gateway.fleet import Backend, Fleet

# A second series for each counter, to say when it began, which nobody reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

_FIRST_BYTE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_DURATION = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """All counters and histograms, and the gauges that are read off the fleet at a scrape."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self._fleet = fleet
        self.held: dict[str, int] = {}
        self.requests = self._counter("requests", "Answers, by the status they began with.", "model", "backend", "code")
        self.errors = self._counter(
            "errors", "Answers that the gateway gave itself, by status and by why.", "model", "code", "reason"
        )
        self.retries = self._counter("retries", "Attempts repeated on another replica, by why.", "model", "reason")
        self.hold_failures = self._counter("hold_failures", "Held requests given up, by why.", "model", "reason")
        self.disconnects = self._counter("client_disconnects", "Clients that left before the end.", "model")
        self.broken_streams = self._counter(
            "broken_streams", "Streams whose replica died before the end.", "model", "backend"
        )
        self.first_byte = self._histogram("time_to_first_byte_seconds", "Until a replica's answer began.", *_FIRST_BYTE)
        self.duration = self._histogram("request_duration_seconds", "Until the answer ended.", *_DURATION)
        self.registry.register(_Gauges(fleet, self.held))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def current_requests(self) -> dict[str, dict[str, int]]:
        """Held and in flight, of each model that has any."""
        found: dict[str, dict[str, int]] = {}
        for model, pool in self._fleet.pools.items():
            held, in_flight = self.held.get(model, 0), sum(b.in_flight for b in pool.backends.values())
            if held or in_flight:
                found[model] = {"held": held, "inFlight": in_flight}
        return found

    def forget(self, backend: Backend) -> None:
        """Drop the series of a replica that left."""
        for counter in (self.requests, self.broken_streams):
            counter.remove_by_labels({"model": backend.model, "backend": backend.endpoint.id})

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"quire_gateway_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *buckets: float) -> Histogram:
        return Histogram(f"quire_gateway_{name}", text, ("model",), buckets=buckets, registry=self.registry)


class _Gauges(Collector):
    """What is so now."""

    def __init__(self, fleet: Fleet, held: dict[str, int]) -> None:
        self._fleet, self._held = fleet, held

    def collect(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily(
            "quire_gateway_requests_in_flight", "Requests at a replica now.", labels=("model", "backend")
        )
        held = GaugeMetricFamily(
            "quire_gateway_held_requests", "Requests that wait for a replica to become ready.", labels=("model",)
        )
        endpoints = GaugeMetricFamily(
            "quire_gateway_endpoints", "Replicas in discovery, by state.", labels=("model", "state")
        )
        for model, pool in self._fleet.pools.items():
            held.add_metric((model,), self._held.get(model, 0))
            states = {"ready": 0, "not_ready": 0, "terminating": 0}
            for backend in pool.backends.values():
                in_flight.add_metric((model, backend.endpoint.id), backend.in_flight)
                terminating = backend.endpoint.terminating
                states["terminating" if terminating else "ready" if backend.is_ready else "not_ready"] += 1
            for state, count in states.items():
                endpoints.add_metric((model, state), count)
        yield from (in_flight, held, endpoints)
