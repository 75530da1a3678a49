"""The autoscaler in a cluster: whom it looks at, and what becomes of its decisions.

Between ``autoscale``, which decides for all LLMDeployments at once, and ``reconcile``, which alone writes.
"""

from collections.abc import Callable, Iterator, Sequence

from quire_operator.autoscale import Subject
from quire_operator.domain import engine_contract
from quire_operator.domain.autoscaler import Decision, Policy
from quire_operator.domain.conditions import MetricsProblem
from quire_operator.domain.history import ScalingRecord
from quire_operator.domain.observation import ReplicaPhase
from quire_operator.domain.observed import Key, Pod, Ref
from quire_operator.domain.scaling_reasons import Reason
from quire_operator.domain.scaling_status import scaling_record
from quire_operator.domain.spec import Invalid, MetricsSource, Spec
from quire_operator.domain.ticks import Log, noted, tick_of
from quire_operator.ports import ReplicaAddress
from quire_operator.reconcile import Reconciler
from quire_operator.store import Store

_LOG_LIMIT = 12
"""Stretches of like decisions that are told of, for each LLMDeployment."""
PROMETHEUS_UNAVAILABLE = "PrometheusUnavailable"
_NO_PROMETHEUS = MetricsProblem(
    reason=PROMETHEUS_UNAVAILABLE,
    message="the operator was not told where Prometheus is (--prometheus-url; the chart's operator.prometheus.url)",
)
_STALE = MetricsProblem(reason=Reason.METRICS_STALE.value, message="most ready replicas have given none of late")


class ClusterScaling:
    """Implements ``ports.ScaleTarget``. ``prometheus_problem`` says why Prometheus does not answer, if it does not; it
    is None where the operator has no Prometheus."""

    def __init__(
        self,
        *,
        store: Store,
        reconciler: Reconciler,
        prometheus_problem: Callable[[], str | None] | None = None,
    ) -> None:
        self._store, self._reconciler = store, reconciler
        self._prometheus_problem = prometheus_problem
        self._by_prometheus: frozenset[str] = frozenset()
        self._logs: dict[str, Log] = {}

    def decisions(self, key: str) -> Log:
        """What was decided of late; empty for what does not autoscale, and before the first tick."""
        return self._logs.get(key, ())

    def subjects(self) -> list[Subject]:
        """All LLMDeployments that autoscale by what this operator can read."""
        subjects = list(self._subjects())
        self._by_prometheus = frozenset(s.key for s in subjects if any(r.by_prometheus for r in s.replicas))
        return subjects

    def note(self, decisions: dict[str, Decision]) -> None:
        """Have the conditions tell where metrics are missing, and keep what was said."""
        silent = None if self._prometheus_problem is None else self._prometheus_problem()
        self._logs = {key: self._noted(key, decision, silent) for key, decision in decisions.items()}
        for key, decision in decisions.items():
            problem = None
            if decision.reason is Reason.METRICS_STALE:
                problem = _STALE
                if silent is not None and key in self._by_prometheus:
                    problem = MetricsProblem(reason=PROMETHEUS_UNAVAILABLE, message=silent)
            self._reconciler.note_metrics(Key.parse(key), problem)

    async def persist(self, key: str, record: ScalingRecord) -> None:
        """See ``ports.ScaleTarget``."""
        await self._reconciler.persist(Key.parse(key), record)

    async def scale(self, key: str, *, replicas: int, victims: Sequence[str]) -> None:
        """See ``ports.ScaleTarget``."""
        names = tuple(victim.rpartition("/")[2] for victim in victims)
        self._reconciler.scale(Key.parse(key), replicas=replicas, victims=names)

    def _noted(self, key: str, decision: Decision, silent: str | None) -> Log:
        by_prometheus = key in self._by_prometheus
        tick = tick_of(
            decision,
            source=MetricsSource.PROMETHEUS if by_prometheus else MetricsSource.PODS,
            problem=silent if by_prometheus else None,
        )
        return noted(self.decisions(key), tick, limit=_LOG_LIMIT)

    def _subjects(self) -> Iterator[Subject]:
        for key in self._store.live_keys():
            resource = self._store.resource(key)
            spec = None if resource is None or resource.deleting else Spec.parse(resource.body)
            if resource is None or spec is None or isinstance(spec, Invalid) or spec.autoscaling is None:
                continue
            source = spec.autoscaling.metrics_source
            if source is MetricsSource.PROMETHEUS and self._prometheus_problem is None:
                self._reconciler.note_metrics(key, _NO_PROMETHEUS)
                continue
            by_prometheus = self._prometheus_problem is not None and source is not MetricsSource.PODS
            deployment = self._store.children(key).get(Ref("Deployment", key.name))
            state = None if deployment is None else deployment.deployment
            policy = Policy.of(spec)
            if policy is None or state is None:
                continue  # nothing runs that could be scaled
            yield Subject(
                key=str(key),
                model=spec.model.served_name,
                policy=policy,
                replicas=tuple(
                    _address(key, pod, by_prometheus=by_prometheus)
                    for pod in self._store.pods(key)
                    if pod.phase != "Failed"
                ),
                target=state.replicas_asked,
                rolling_out=state.is_rolling,
                record=scaling_record(resource.status),
            )


def _address(key: Key, pod: Pod, *, by_prometheus: bool) -> ReplicaAddress:
    url = f"http://{_host(pod.ip)}:{engine_contract.HTTP_PORT}{engine_contract.METRICS_PATH}" if pod.ip else None
    return ReplicaAddress(
        name=f"{key.namespace}/{pod.name}", phase=_phase(pod), metrics_url=url, by_prometheus=by_prometheus
    )


def _host(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip


def _phase(pod: Pod) -> ReplicaPhase:
    if pod.deleting:
        return ReplicaPhase.DRAINING
    if pod.ready:
        return ReplicaPhase.READY
    return ReplicaPhase.LOADING if pod.phase == "Running" else ReplicaPhase.PENDING
