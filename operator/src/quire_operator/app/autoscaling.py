"""The autoscaler of the process: its sources of metrics and its loop, which run only while this process leads."""

from collections.abc import Awaitable, Callable, Sequence

from quire_operator.app.settings import Settings
from quire_operator.app.telemetry import Telemetry
from quire_operator.autoscaling.autoscale import Autoscaler, keep_scaling
from quire_operator.autoscaling.controller import ClusterScaling
from quire_operator.autoscaling.decide import Decision
from quire_operator.autoscaling.prometheus import Prometheus
from quire_operator.autoscaling.scrape import Gateways, MetricsSources, Scraper
from quire_operator.autoscaling.ticks import Log
from quire_operator.deployment.controller import Reconciler
from quire_operator.deployment.store import Cluster


class LeadingAutoscaler:
    """The autoscaler of the leader. Each ``run`` starts without memory of earlier ticks."""

    def __init__(
        self,
        settings: Settings,
        telemetry: Telemetry,
        cluster: Cluster,
        *,
        reconciler: Reconciler,
        gateways: Callable[[], Awaitable[Sequence[str]]],
    ) -> None:
        """``gateways`` returns the addresses of all gateways."""
        self._settings, self._telemetry, self._store, self._clock = settings, telemetry, cluster.store, cluster.clock
        self._reconciler, self._gateways = reconciler, gateways
        self._scaling: ClusterScaling | None = None
        """Set only while it runs."""

    def decisions(self, key: str) -> Log:
        """Return the recent decisions for an LLMDeployment; empty while another process leads."""
        return () if self._scaling is None else self._scaling.decisions(key)

    async def run(self) -> None:
        """Decide at intervals until cancelled."""
        options, told = self._settings.prometheus, self._telemetry.scaling
        prometheus = None if options is None else Prometheus(options, clock=self._clock, failed=told.prometheus_failed)
        scraper, gateways = Scraper(clock=self._clock, failed=told.scrape_failed), Gateways(self._gateways)
        sources = MetricsSources(pods=scraper, prometheus=prometheus, gateways=gateways)
        self._scaling = scaling = ClusterScaling(
            store=self._store,
            pending=self._reconciler.scaling,
            requested_name=self._reconciler.served_names.requested_name,
            prometheus_problem=None if prometheus is None else lambda: prometheus.problem,
        )
        autoscaler = Autoscaler(metrics=sources, target=scaling, clock=self._clock)
        told.show(
            lambda: scaling.latest,
            last_answer=None if prometheus is None else lambda: prometheus.last_answer,
            gateways=lambda: None if gateways.asked is None else (gateways.asked, gateways.answered),
        )
        try:
            period = self._settings.autoscaling_period_seconds
            await keep_scaling(autoscaler, scaling, tick_seconds=period, decided=self._count, ticked=told.ticks.observe)
        finally:
            self._scaling = None
            told.hide()
            await sources.aclose()

    def _count(self, decision: Decision) -> None:
        self._telemetry.decisions.labels(reason=decision.reason.value).inc()
