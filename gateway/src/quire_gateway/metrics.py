"""The gateway's own metrics at /metrics: per model and per replica ("backend").

Series of replicas that left are removed. Only a served model becomes a label, so clients cannot create series.
"""

from collections.abc import Iterator, Mapping
from time import monotonic

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire_common.contract.gateway import INTER_TOKEN_LATENCY, TIME_TO_FIRST_TOKEN, bin_start
from quire_gateway.bodies import BodyMemory
from quire_gateway.fleet import Backend, Fleet

# Otherwise each counter has a second series with its creation time, which is not used.
disable_created_metrics()  # type: ignore[no-untyped-call]

_FIRST_BYTE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_DURATION = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The counters and histograms, and the gauges that are computed from the fleet at a scrape."""

    def __init__(self, fleet: Fleet, memory: BodyMemory) -> None:
        self.registry = CollectorRegistry()
        self._fleet = fleet
        self.held: dict[str, int] = {}
        self.requests = self._counter("requests", "Answers by their status.", "model", "backend", "code")
        self.errors = self._counter(
            "errors", "Error answers from the gateway itself, by status and reason.", "model", "code", "reason"
        )
        self.retries = self._counter("retries", "Attempts repeated on another replica, by reason.", "model", "reason")
        self.hold_failures = self._counter("hold_failures", "Held requests that failed, by reason.", "model", "reason")
        self.disconnects = self._counter(
            "client_disconnects", "Clients that disconnected before the end of the answer.", "model"
        )
        self.broken_streams = self._counter(
            "broken_streams", "Streams whose replica died before the end of the answer.", "model", "backend"
        )
        self.resumed_streams = self._counter(
            "resumed_streams", "Streams that another replica continued after theirs died or terminated.", "model"
        )
        self.compared_answers = self._counter(
            "compared_answers", "Greedy requests that both tracks of a canary answered, by result.", "model", "result"
        )
        self.first_byte = self._histogram(
            "time_to_first_byte_seconds", "Time until the first byte of a replica's answer.", *_FIRST_BYTE
        )
        self.duration = self._histogram("request_duration_seconds", "Time until the end of the answer.", *_DURATION)
        self.registry.register(_FleetMetrics(fleet, self.held, memory))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def current_requests(self) -> dict[str, dict[str, int]]:
        """Return the held and running requests of each model that has any, with those of its adapters."""
        found: dict[str, dict[str, int]] = {}
        for model, pool in self._fleet.pools.items():
            held = self.held.get(model, 0)
            # The replicas of an adapter are those of its model, whose requests they are for the autoscaler.
            in_flight = 0 if pool.adapter_of else sum(b.in_flight for b in pool.backends.values())
            if held or in_flight:
                counts = found.setdefault(pool.adapter_of or model, {"held": 0, "inFlight": 0})
                counts["held"] += held
                counts["inFlight"] += in_flight
        return found

    def tracks(self) -> dict[str, dict[str, object]]:
        """Return the figures of the tracks of each model with a canary."""
        return {
            model: pool.tracks.page(monotonic()) for model, pool in self._fleet.pools.items() if pool.tracks is not None
        }

    def forget(self, backend: Backend) -> None:
        """Remove the series of a replica that left."""
        for counter in (self.requests, self.broken_streams):
            counter.remove_by_labels({"backend": backend.endpoint.id})

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"quire_gateway_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *buckets: float) -> Histogram:
        return Histogram(f"quire_gateway_{name}", text, ("model",), buckets=buckets, registry=self.registry)


_TRACK_LATENCIES = (
    (TIME_TO_FIRST_TOKEN, "track_first_byte_seconds", "Time to the first byte, by track."),
    (INTER_TOKEN_LATENCY, "track_inter_token_seconds", "Mean time between the events of a stream, by track."),
)


class _FleetMetrics(Collector):
    """The state of the fleet, and the figures of models with a canary: computed at each scrape."""

    def __init__(self, fleet: Fleet, held: dict[str, int], memory: BodyMemory) -> None:
        self._fleet, self._held, self._memory = fleet, held, memory

    def collect(self) -> Iterator[Metric]:
        yield from self._states()
        yield from self._tracks()

    def _states(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily(
            "quire_gateway_requests_in_flight", "Requests that a replica works on.", labels=("model", "backend")
        )
        held = GaugeMetricFamily(
            "quire_gateway_held_requests", "Requests that wait for a ready replica.", labels=("model",)
        )
        endpoints = GaugeMetricFamily(
            "quire_gateway_endpoints", "Replicas in discovery by state.", labels=("model", "state")
        )
        for model, pool in self._fleet.pools.items():
            held.add_metric((model,), self._held.get(model, 0))
            if pool.adapter_of:
                continue  # its replicas are those of its model
            states = {"ready": 0, "not_ready": 0, "terminating": 0}
            for backend in pool.backends.values():
                in_flight.add_metric((model, backend.endpoint.id), backend.in_flight)
                terminating = backend.endpoint.terminating
                states["terminating" if terminating else "ready" if backend.is_ready else "not_ready"] += 1
            for state, count in states.items():
                endpoints.add_metric((model, state), count)
        bodies = GaugeMetricFamily(
            "quire_gateway_body_bytes", "Memory of the request bodies in flight.", value=self._memory.used_bytes
        )
        yield from (in_flight, held, endpoints, bodies)

    def _tracks(self) -> Iterator[Metric]:
        """Yield the figures of tracks, which start again with each revision of the canary."""
        weight = GaugeMetricFamily(
            "quire_gateway_canary_weight", "Share of the requests for the canary, from 0 to 1.", labels=("model",)
        )
        requests = CounterMetricFamily(
            "quire_gateway_track_requests", "Requests by track and result.", labels=("model", "track", "result")
        )
        latencies = [
            (metric, HistogramMetricFamily(f"quire_gateway_{name}", text, labels=("model", "track")))
            for metric, name, text in _TRACK_LATENCIES
        ]
        for model, pool in self._fleet.pools.items():
            if pool.tracks is None:
                continue
            weight.add_metric((model,), pool.tracks.route.weight_percent / 100)
            for track, figures in pool.tracks.figures.items():
                requests.add_metric((model, track, "error"), figures.errors)
                requests.add_metric((model, track, "ok"), figures.requests - figures.errors)
                for metric, family in latencies:
                    found = figures.latencies[metric]
                    family.add_metric((model, track), _buckets(found), _total(found))
        yield from (weight, requests, *(family for _, family in latencies))


def _buckets(histogram: Mapping[int, int]) -> list[tuple[str, float]]:
    """Return cumulative counts at the bounds; a bin counts below a bound if it starts below it."""
    counts = [(bin_start(number), count) for number, count in histogram.items()]
    below = [
        (str(float(bound)), float(sum(count for start, count in counts if start < bound))) for bound in _FIRST_BYTE
    ]
    return [*below, ("+Inf", float(sum(count for _, count in counts)))]


def _total(histogram: Mapping[int, int]) -> float:
    """Return the sum of the latencies, each as the middle of its bin."""
    return sum(bin_start(number + 0.5) * count for number, count in histogram.items())
