"""The report of a pass: the status of an LLMDeployment and its Events.

The status is not written if it is unchanged, less and less often if another client keeps overwriting it, and at most
once per second if only minor figures change.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

from quire_operator.api import Spec
from quire_operator.autoscaling.schedules import recorded_bounds
from quire_operator.deployment.conditions import BlockingCondition, View
from quire_operator.deployment.download import Download
from quire_operator.deployment.groups import judged, kept_failure
from quire_operator.deployment.pod_failures import worst_failure
from quire_operator.deployment.repairs import STATUS
from quire_operator.deployment.state import ReconcileResult, ReconcileState
from quire_operator.deployment.status import Event, events, is_minor, mixed_versions, scaling_record, status
from quire_operator.deployment.store import Cluster
from quire_operator.kube.errors import ClusterError, NotLeading
from quire_operator.kube.objects import Key, Resource, own_deployment

logger = logging.getLogger(__name__)

_MINOR_SECONDS = 1.0
"""The shortest time between a write and one that only changes minor figures."""


class Reporter:
    def __init__(self, cluster: Cluster, *, cluster_domain: str, download: Callable[[Key], Download | None]) -> None:
        self._kube, self._store, self._clock = cluster.kube, cluster.store, cluster.clock
        self._cluster_domain = cluster_domain
        self._download = download

    async def report(
        self,
        resource: Resource,
        state: ReconcileState,
        spec: Spec | None,
        result: ReconcileResult,
        *,
        rival: str | None,
    ) -> float | None:
        """Write the status of this pass; return the seconds until it may be written if it has to wait, else None."""
        now, other = self._clock(), state.other_autoscaler
        pods, workers = self._store.pods(resource.key), self._store.workers(resource.key)
        deployment = judged(own_deployment(resource, self._store.children(resource.key)), pods, now=now)
        seen = worst_failure((*pods, *workers), deployment)
        state.group_failure = kept_failure(state.group_failure, seen, deployment)
        is_rolling = deployment is None or deployment.is_rolling
        mixed = None if spec is None else mixed_versions(spec, pods, is_rolling=is_rolling)
        view = View(
            spec=spec,
            blocking=result.blocking,
            target=result.target,
            deployment=deployment,
            pods=pods,
            workers=workers,
            kept_failure=None if state.group_failure is None else state.group_failure.failure,
            additions=result.additions,
            contested=None if other is None or not other.is_on(now) else other.manager,
            metrics_problem=state.metrics_problem,
            fought_over=state.repairs.contests(now),
            nonblocking=result.nonblocking or mixed or _removed_fields(resource),
            rival=rival,
            queued=result.queued,
            claim=state.claim,
            bounds=None
            if spec is None or spec.autoscaling is None
            else recorded_bounds(spec.autoscaling, scaling_record(resource.status), now),
            download=self._download(resource.key),
            canary=None if result.tracked is None else result.tracked.record,
            rollout=None if result.tracked is None else result.tracked.section,
        )
        wanted = status(resource, view, cluster_domain=self._cluster_domain, now=now)
        since = now - state.written_at
        if wanted != resource.status and 0.0 <= since < _MINOR_SECONDS and is_minor(resource.status, wanted):
            return _MINOR_SECONDS - since
        # A served name is restored at once, however often another client changes it.
        has_name = wanted.get("servedName") == resource.status.get("servedName")
        if (
            has_name
            and state.status is not None
            and state.status[0] == wanted
            and state.status[1] != resource.status != wanted
        ):
            if wait := state.repairs.wait_seconds(STATUS, "", now):
                return wait
            state.repairs.note(STATUS, "", now)
        await self.write_status(resource, state, spec, wanted)
        return None

    async def write_status(
        self, resource: Resource, state: ReconcileState, spec: Spec | None, wanted: Mapping[str, object]
    ) -> None:
        """Write the status, unless it is stored already, as it is or as the server changes it."""
        if wanted == resource.status or state.status == (wanted, resource.status):
            return
        written = await self._kube.write_status(resource, wanted)
        self._store.put_resource(written)
        state.status, state.written_at = (wanted, written.status), self._clock()
        recommends = spec is not None and spec.only_recommends
        await self.record_events(resource, events(resource.status, wanted, recommends=recommends))

    async def record_events(self, resource: Resource, news: Sequence[Event]) -> None:
        for event in news:
            try:
                await self._kube.record_event(resource, event)
            except NotLeading:
                raise
            except ClusterError as error:
                logger.warning("%s: recording event %s failed: %s", resource.key, event.reason, error)


def _removed_fields(resource: Resource) -> BlockingCondition | None:
    told = "; ".join(map(str, resource.removed))
    return BlockingCondition(reason="RemovedField", message=told) if told else None
