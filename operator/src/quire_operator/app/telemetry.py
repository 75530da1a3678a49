"""The operator's metrics and health.

``app`` feeds them. The server answers /metrics, /healthz and /readyz, and returns the autoscaler's decisions at
/decisions/NAMESPACE/NAME.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from quire_operator.app.scaling_telemetry import ScalingTelemetry
from quire_operator.domain.autoscaling.ticks import Log

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
        """Show the kinds that may not be listed."""
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
        """Record a renewal that a watch has shown."""
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
