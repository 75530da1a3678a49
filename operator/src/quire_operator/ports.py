"""What quire's decisions ask of the outside world: metrics, a clock, a cluster, somebody who carries a decision out.

Implemented in ``adapters``, built by ``__main__`` and ``cli``; the loops know only these Protocols.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from quire_operator.domain.autoscaling.gateway_contract import GatewayRequests
from quire_operator.domain.autoscaling.history import ScalingRecord
from quire_operator.domain.autoscaling.observation import ReplicaPhase, ReplicaSample
from quire_operator.domain.capacity.model_config import ModelFacts
from quire_operator.domain.cluster_state.observed import Child, Key, Pod, Ref, Resource
from quire_operator.domain.convergence.plan import RemoveFields
from quire_operator.domain.manifests.desired import Manifest
from quire_operator.domain.resource import HubSource
from quire_operator.domain.status.status import Event


class Clock(Protocol):
    """Unix seconds."""

    def now(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddress:
    """One live replica, as the cluster knows it."""

    name: str
    """Unique among all replicas: the pod's name with its namespace, or the local process's name."""
    phase: ReplicaPhase
    metrics_url: str | None
    """Where it serves /metrics; None while it has no address."""
    by_prometheus: bool = False
    """Whether its metrics are to be had from Prometheus instead."""


class Metrics(Protocol):
    """Reads what replicas say of themselves. The network never raises here: what could not be read is absent."""

    async def samples(self, replicas: Sequence[ReplicaAddress]) -> Mapping[str, ReplicaSample]:
        """The newest sample of each replica by name, for all LLMDeployments in one call."""
        ...

    async def gateway_requests(self) -> GatewayRequests | None:
        """What requests the gateways have; None when none of them answered, or none is known."""
        ...


class ScalingNotDone(Exception):
    """A decision could not be persisted or carried out now; the next tick tries again."""


class ScaleTarget(Protocol):
    """Carries a decision out: in the cluster through status and reconcile, locally by moving processes.

    Both raise ``ScalingNotDone`` for what a later try may mend.
    """

    async def persist(self, key: str, record: ScalingRecord) -> None:
        """Keep the record so that it outlives this process. Called before ``scale``: nothing is acted on unseen."""
        ...

    async def scale(self, key: str, *, replicas: int, victims: Sequence[str]) -> None:
        """Go to ``replicas``; where that is fewer, ``victims`` are the ones that lose least, first to go first."""
        ...


class ClusterError(Exception):
    """A request to the API server that did not succeed.

    ClusterError
    ├── Conflict        somebody was quicker: look again, at once
    ├── Refused         the server will never take this object: what is wrong is the user's to mend
    ├── QuotaExceeded   the namespace may not have more
    ├── Forbidden       our own rights do not reach
    │   └── PartlyForbidden    of a list over several namespaces
    ├── NotFound        the object, its namespace or its kind is gone
    ├── Throttled       the server asks us to wait
    ├── Unavailable     the server failed, hung or could not be reached
    └── NotLeading      this process may not write: its lease is not surely its own
    """


class Conflict(ClusterError):
    """Somebody was quicker."""


class Refused(ClusterError):
    """The server will never take this object as it is."""


class QuotaExceeded(ClusterError):
    """The namespace may not have more."""


class Forbidden(ClusterError):
    """Our own rights do not reach."""


class PartlyForbidden(Forbidden):
    """All was listed but what is in these ``namespaces``."""

    def __init__(self, message: str, *, namespaces: frozenset[str]) -> None:
        super().__init__(message)
        self.namespaces = namespaces


class NotFound(ClusterError):
    """The object, its namespace or its kind is gone."""


class Throttled(ClusterError):
    """The server asks us to wait ``after_seconds``; None leaves it to us."""

    def __init__(self, message: str, *, after_seconds: float | None) -> None:
        super().__init__(message)
        self.after_seconds = after_seconds


class Unavailable(ClusterError):
    """The server failed, hung or could not be reached."""


class NotLeading(ClusterError):
    """This process may not write."""


class Cluster(Protocol):
    """The API server, as ``reconcile`` needs it. Every method raises ``ClusterError``, and waits no more than seconds.

    Only the writes pass the write gate. Each returns the object as the server has it then.
    """

    async def served_kinds(self) -> frozenset[str]:
        """Which of the optional kinds the API server has."""
        ...

    async def takes_image_volumes(self, key: Key, deployment: Manifest) -> bool:
        """Return whether the API server keeps the image volume of this Deployment, by a dry run: the same for all keys.

        Raises ``Refused`` if the server rejects the Deployment for another reason, such as a policy of the namespace.
        """
        ...

    async def read_child(self, key: Key, ref: Ref) -> Child | None:
        """The object of this name, whosever it is; None if there is none."""
        ...

    async def read_resource(self, key: Key) -> Resource | None:
        """The LLMDeployment as it is now; None if there is none."""
        ...

    async def create(self, key: Key, manifest: Manifest) -> Child:
        """Server-side apply that takes no field from anybody: ``Conflict`` if somebody has set one otherwise."""
        ...

    async def update(self, key: Key, manifest: Manifest) -> Child:
        """Server-side apply that takes our fields back from whoever set them."""
        ...

    async def remove_fields(self, key: Key, action: RemoveFields) -> Child:
        """Take out what others added; ``Conflict`` if the object changed since it was looked at."""
        ...

    async def delete(self, key: Key, ref: Ref, uid: str) -> None:
        """Delete this very object; no error if it is gone."""
        ...

    async def set_deletion_costs(self, key: Key, costs: Mapping[str, str | None]) -> None:
        """By pod: the lowest goes first when the Deployment gets smaller; None takes the mark off."""
        ...

    async def write_status(self, resource: Resource, status: Mapping[str, object]) -> Resource:
        """The whole status; ``Conflict`` unless the resource is still the one that was looked at."""
        ...

    async def record_event(self, resource: Resource, event: Event) -> None:
        """Post an Event about it."""
        ...

    def list_resources(self) -> AsyncIterator[Resource]:
        """All LLMDeployments that are ours to care for."""
        ...

    def list_children(self, kind: str) -> AsyncIterator[tuple[Key, Child]]:
        """All objects of one of our kinds that carry our label."""
        ...

    def list_pods(self) -> AsyncIterator[tuple[Key, Pod]]:
        """All pods that carry our label."""
        ...


class DryRun(Protocol):
    """What the API server would say of a write, as ``admission`` asks it. Every method raises ``ClusterError``."""

    async def owner(self, key: Key, ref: Ref) -> str | None:
        """The uid of the object's controller, empty if it has none; None if there is no such object."""
        ...

    async def apply(self, key: Key, manifest: Manifest) -> None:
        """Server-side apply that stores nothing; ``Refused`` if it never could."""
        ...


class ModelUnknown(Exception):
    """What a model is could not be found out. ``unreachable``: nor would it be of any other just now."""

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


class ModelReader(Protocol):
    """What a hub tells of its models without their weights being loaded."""

    async def facts(self, source: HubSource) -> ModelFacts:
        """Raises ``ModelUnknown``."""
        ...

    async def commit(self, source: HubSource) -> str:
        """Return the commit that the source means now. Raises ``ModelUnknown``."""
        ...

    async def aclose(self) -> None: ...


class Nodes(Protocol):
    """The machines that pods are put on."""

    async def labels(self) -> Sequence[Mapping[str, str]]:
        """Of each node that says how much memory its GPUs have. Raises ``ClusterError``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The record as it is in the cluster. ``version`` None: it is not there yet."""

    version: str | None
    holder: str = ""
    """Empty when nobody holds it."""
    acquired: datetime | None = None
    renewed: datetime | None = None
    transitions: int = 0


class Leases(Protocol):
    """The one Lease of this operator."""

    async def read(self) -> Lease: ...

    async def write(self, lease: Lease, *, duration_seconds: float) -> Lease:
        """Create or replace; ``Conflict`` unless it still has this version."""
        ...
