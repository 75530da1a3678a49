"""The autoscaler in a cluster: its subjects, and the use of its decisions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quire_common.contract import engine
from quire_common.names import url_host
from quire_operator.api import AutoscalingMode, MetricsSource, Spec
from quire_operator.autoscaling.autoscale import Subject
from quire_operator.autoscaling.decide import Decision
from quire_operator.autoscaling.decision_context import Policy
from quire_operator.autoscaling.demand import Reason
from quire_operator.autoscaling.history import ScalingRecord
from quire_operator.autoscaling.observation import ReplicaAddress, ReplicaPhase
from quire_operator.autoscaling.supply import SAMPLE_SECONDS
from quire_operator.autoscaling.ticks import Log, noted, tick_of
from quire_operator.deployment.conditions import MetricsProblem, MetricsReason
from quire_operator.deployment.scaling import PendingScaling
from quire_operator.deployment.status import scaling_record
from quire_operator.deployment.store import Store
from quire_operator.kube.objects import DeploymentState, Key, Pod, Resource, own_deployment

_LOG_LIMIT = 12
"""The number of log entries that are kept for each LLMDeployment."""
_NO_PROMETHEUS = MetricsProblem(
    reason=MetricsReason.PROMETHEUS_UNAVAILABLE,
    message="holding the number of replicas: the operator has no address of Prometheus; set --prometheus-url (chart: "
    "operator.prometheus.url)",
)
_STALE = MetricsProblem(
    reason=MetricsReason.STALE,
    message="holding the number of replicas: most ready replicas have not reported metrics recently",
)
_NO_GATEWAY = MetricsProblem(
    reason=MetricsReason.GATEWAY_UNAVAILABLE,
    message="holding the number of replicas: not all gateways report whether they hold requests",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """The parsed values of one resource, so that only changed ones are parsed again."""

    resource: Resource
    spec: Spec | None
    policy: Policy | None
    record: ScalingRecord | None

    def read(self, resource: Resource) -> "_Known":
        """Return what is known of the current version of the resource."""
        if resource is self.resource:
            return self
        if (resource.uid, resource.generation) != (self.resource.uid, self.resource.generation):
            return _known(resource)
        return _Known(resource=resource, spec=self.spec, policy=self.policy, record=scaling_record(resource.status))


def _known(resource: Resource) -> _Known:
    spec = Spec.parse(resource.body)
    read = spec if isinstance(spec, Spec) else None
    policy = None if read is None else Policy.of(read)
    return _Known(resource=resource, spec=read, policy=policy, record=scaling_record(resource.status))


class ClusterScaling:
    """The LLMDeployments of a cluster that autoscale.

    ``prometheus_problem`` returns why Prometheus does not answer, or None if it does. It is None if the operator has no
    Prometheus.
    """

    def __init__(
        self,
        *,
        store: Store,
        pending: PendingScaling,
        requested_name: Callable[[Key], str | None],
        prometheus_problem: Callable[[], str | None] | None = None,
    ) -> None:
        self._store, self._pending, self._requested_name = store, pending, requested_name
        self._prometheus_problem = prometheus_problem
        self._by_prometheus: frozenset[str] = frozenset()
        self._known: dict[Key, _Known] = {}
        self.latest: dict[str, Decision] = {}
        """The last decision for each existing LLMDeployment."""
        self._logs: dict[str, Log] = {}
        self._no_gateway_since: dict[str, float] = {}

    def decisions(self, key: str) -> Log:
        """Return the recent decisions; empty without autoscaling and before the first tick."""
        return self._logs.get(key, ())

    def subjects(self) -> list[Subject]:
        """Return all LLMDeployments that autoscale on metrics that this operator can read."""
        subjects = list(self._subjects())
        self._by_prometheus = frozenset(s.key for s in subjects if any(r.by_prometheus for r in s.replicas))
        live = {subject.key for subject in subjects}
        self._logs = {key: log for key, log in self._logs.items() if key in live}
        self.latest = {key: decision for key, decision in self.latest.items() if key in live}
        self._no_gateway_since = {key: since for key, since in self._no_gateway_since.items() if key in live}
        return subjects

    def sleeping(self) -> list[Subject]:
        """Return those without replicas that may get one."""
        return [
            self._subject(key, known, known.policy, state, by_prometheus=False)
            for key, known in self._resources()
            if known.spec is not None
            and known.policy is not None
            and known.policy.autoscaling.may_reach_zero
            and known.policy.autoscaling.mode is AutoscalingMode.ENFORCE
            and (state := self._deployment(known)) is not None
            and state.replicas_asked == 0
        ]

    def note(self, decisions: Mapping[str, Decision]) -> None:
        """Store the decisions, and report missing metrics in the conditions."""
        silent = None if self._prometheus_problem is None else self._prometheus_problem()
        for key, decision in decisions.items():
            self._logs[key] = self._noted(key, decision, silent)
            self.latest[key] = decision
            self._pending.note_metrics(Key.parse(key), self._problem(key, decision, silent))

    def _problem(self, key: str, decision: Decision, silent: str | None) -> MetricsProblem | None:
        if decision.reason is not Reason.NO_GATEWAY:
            self._no_gateway_since.pop(key, None)
        elif decision.time - self._no_gateway_since.setdefault(key, decision.time) >= SAMPLE_SECONDS:
            return _NO_GATEWAY  # gateways come and go, so a short absence is not reported
        if decision.reason is not Reason.METRICS_STALE:
            return None
        if silent is not None and key in self._by_prometheus:
            return MetricsProblem(
                reason=MetricsReason.PROMETHEUS_UNAVAILABLE, message=f"holding the number of replicas: {silent}"
            )
        return _STALE

    async def persist(self, key: str, record: ScalingRecord) -> None:
        """Store the record in the status. Raises ``ScalingNotDone`` if a later attempt may succeed."""
        await self._pending.persist(Key.parse(key), record)

    async def scale(self, key: str, *, replicas: int, victims: Sequence[str]) -> None:
        """Set the number of replicas. ``victims`` are the replicas to remove first, in this order."""
        names = tuple(victim.rpartition("/")[2] for victim in victims)
        self._pending.scale(Key.parse(key), replicas=replicas, victims=names)

    def _noted(self, key: str, decision: Decision, silent: str | None) -> Log:
        by_prometheus = key in self._by_prometheus
        tick = tick_of(
            decision,
            source=MetricsSource.PROMETHEUS if by_prometheus else MetricsSource.PODS,
            problem=silent if by_prometheus else None,
        )
        return noted(self.decisions(key), tick, limit=_LOG_LIMIT)

    def _subjects(self) -> Iterator[Subject]:
        for key, known in self._resources():
            spec, policy = known.spec, known.policy
            if spec is None or policy is None:
                continue
            source = policy.autoscaling.metrics_source
            if source is MetricsSource.PROMETHEUS and self._prometheus_problem is None:
                self._pending.note_metrics(key, _NO_PROMETHEUS)
                continue
            by_prometheus = self._prometheus_problem is not None and source is not MetricsSource.PODS
            state = self._deployment(known)
            if state is not None:  # otherwise there is nothing to scale
                yield self._subject(key, known, policy, state, by_prometheus=by_prometheus)

    def _resources(self) -> Iterator[tuple[Key, _Known]]:
        """Yield all LLMDeployments that are not being deleted."""
        known: dict[Key, _Known] = {}
        for key in self._store.live_keys():
            resource = self._store.resource(key)
            if resource is None or resource.deleting:
                continue
            before = self._known.get(key)
            known[key] = _known(resource) if before is None else before.read(resource)
        self._known = known
        yield from known.items()

    def _deployment(self, known: _Known) -> DeploymentState | None:
        return own_deployment(known.resource, self._store.children(known.resource.key))

    def _subject(
        self, key: Key, known: _Known, policy: Policy, state: DeploymentState, *, by_prometheus: bool
    ) -> Subject:
        return Subject(
            key=str(key),
            # Gateways hold no requests for an LLMDeployment whose name another one holds.
            model=self._requested_name(key) or "",
            policy=policy,
            replicas=tuple(
                _address(key, pod, by_prometheus=by_prometheus)
                for pod in self._store.pods(key)
                if pod.phase != "Failed"
            ),
            target=state.replicas_asked,
            rolling_out=state.is_rolling,
            record=known.record,
            uid=known.resource.uid,
        )


def _address(key: Key, pod: Pod, *, by_prometheus: bool) -> ReplicaAddress:
    url = f"http://{url_host(pod.ip)}:{engine.HTTP_PORT}{engine.METRICS_PATH}" if pod.ip else None
    return ReplicaAddress(
        name=f"{key.namespace}/{pod.name}", phase=_phase(pod), metrics_url=url, by_prometheus=by_prometheus
    )


def _phase(pod: Pod) -> ReplicaPhase:
    if pod.deleting:
        return ReplicaPhase.DRAINING
    if pod.ready:
        return ReplicaPhase.READY
    return ReplicaPhase.LOADING if pod.phase == "Running" else ReplicaPhase.PENDING
