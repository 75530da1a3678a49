"""The operator's metrics and health."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from time import time

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire_operator.autoscaling.decide import Decision
from quire_operator.autoscaling.ticks import Log
from quire_operator.kube.objects import Key

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
            "quire_operator_prometheus_errors", "Failed Prometheus queries by reason.", ["reason"], registry=registry
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


_BLIND_SECONDS = 30.0
_STARTING_SECONDS = 60.0
_AWAY_SECONDS = 10.0


class Telemetry:
    """The operator's metrics and their registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.reconciles = Histogram(
            "quire_operator_reconcile_seconds",
            "Duration of one reconcile of one LLMDeployment.",
            buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0),
            registry=self.registry,
        )
        self.errors = Counter(
            "quire_operator_reconcile_errors", "Failed reconciles by reason.", ["reason"], registry=self.registry
        )
        self.writes = Counter(
            "quire_operator_writes", "Mutating requests that succeeded.", ["verb", "kind"], registry=self.registry
        )
        self.decisions = Counter(
            "quire_operator_decisions", "Decisions of the autoscaler by reason.", ["reason"], registry=self.registry
        )
        self.queue = Gauge(
            "quire_operator_queue_depth", "LLMDeployments that wait for a reconcile.", registry=self.registry
        )
        self.watch_lag = Gauge(
            "quire_operator_watch_lag_seconds",
            "Delay of the watches relative to the operator's own calls.",
            registry=self.registry,
        )
        self.unlisted_kinds = Gauge(
            "quire_operator_unlisted_kinds",
            "1 for each kind that the operator has no permission to list.",
            ["kind"],
            registry=self.registry,
        )
        self.scaling = ScalingTelemetry(self.registry)
        self.leading = Gauge(
            "quire_operator_leading", "1 while this process is the leader and may write.", registry=self.registry
        )

    def stands(self, *, leading: bool, waiting: int) -> None:
        """Set the gauges for leadership and for the number of LLMDeployments that wait for a reconcile."""
        self.leading.set(leading)
        # A standby collects keys too, for when it leads, but none of them waits for it.
        self.queue.set(waiting if leading else 0)

    def unlisted(self, kinds: Collection[str]) -> None:
        self.unlisted_kinds.clear()
        for kind in kinds:
            self.unlisted_kinds.labels(kind=kind).set(1)

    def written(self, verb: str, kind: str) -> None:
        self.writes.labels(verb=verb, kind=kind).inc()


@dataclass(slots=True)
class WatchHealth:
    """The health of the watches: the Lease changes every 2 s, and a watch has to show these changes.

    Our own monotonic clock measures the delay, from the first renewal that our calls saw and no watch showed; the times
    in the Lease come from the holder's clock. While the API server is away, nothing changes, and the watches count as
    healthy.
    """

    started: float
    shown: datetime | None = None
    """The last renewal that a watch has shown."""
    unseen_since: float | None = None
    """The time at which our calls saw a renewal that no watch has shown yet."""
    called: float | None = None
    """The time at which our calls last saw the Lease."""

    def note_call(self, renewed: datetime | None, now: float) -> None:
        """Record a renewal that one of our calls has seen."""
        was_away = self.called is None or now - self.called > _AWAY_SECONDS
        self.called = now
        if renewed == self.shown:
            self.unseen_since = None
        elif self.unseen_since is None or was_away:
            self.unseen_since = now

    def note_watch(self, renewed: datetime | None) -> None:
        self.shown, self.unseen_since = renewed, None

    def lag(self) -> float:
        """Return for how many seconds our calls have seen renewals that the watches have not shown."""
        return 0.0 if self.unseen_since is None or self.called is None else self.called - self.unseen_since

    def problem(self) -> str | None:
        """Return why the watches count as broken, or None."""
        if self.shown is None and self.called is not None and self.called - self.started < _STARTING_SECONDS:
            return None
        lag = self.lag()
        return f"the watches have shown nothing of our Lease for {lag:.0f} s" if lag > _BLIND_SECONDS else None


class Server:
    """The HTTP server of /healthz, /readyz, /metrics and /decisions."""

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        problem: Callable[[], str | None],
        ready: Callable[[], bool],
        refresh: Callable[[], None],
        shortfall: Callable[[], str | None] = lambda: None,
        decisions: Callable[[str], Log] = lambda key: (),
        resources: Callable[[], str] = str,
    ) -> None:
        """Serve the results of these functions.

        ``problem`` makes /healthz fail. ``shortfall`` says what a ready operator cannot do. ``refresh`` sets the gauges
        before a scrape. ``decisions`` returns the leader's decisions for a ``namespace/name``. ``resources`` is
        appended to the registry's metrics.
        """
        self._telemetry, self._problem, self._ready, self._refresh = telemetry, problem, ready, refresh
        self._decisions_of, self._resources, self._shortfall = decisions, resources, shortfall
        app = web.Application()
        app.add_routes(
            [web.get("/healthz", self._healthz), web.get("/readyz", self._readyz), web.get("/metrics", self._metrics)]
            + [web.get("/decisions/{namespace}/{name}", self._decisions)]
        )
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port. Raises ``OSError`` if it is in use."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        address: tuple[str, int] = self._runner.addresses[0]
        return address[1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        problem = self._problem()
        return web.Response(text=problem or "ok", status=200 if problem is None else 503)

    async def _readyz(self, _: web.Request) -> web.Response:
        if not self._ready():
            return web.Response(text="the watches have not started", status=503)
        # Still ready: it works for all other kinds, and its webhook must answer.
        shortfall = self._shortfall()
        return web.Response(text="ok" if shortfall is None else f"ok, but {shortfall}")

    async def _metrics(self, _: web.Request) -> web.Response:
        self._refresh()
        page = generate_latest(self._telemetry.registry) + self._resources().encode()
        return web.Response(body=page, content_type="text/plain")

    async def _decisions(self, request: web.Request) -> web.Response:
        log = self._decisions_of(f"{request.match_info['namespace']}/{request.match_info['name']}")
        if not log:
            return web.Response(text="no decision: this process does not lead, or it does not autoscale", status=404)
        return web.Response(body=msgspec.json.encode(log), content_type="application/json")
