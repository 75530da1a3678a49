"""The interfaces through which decisions reach the outside world: metrics, clock, cluster, hub and Lease.

Classes in ``adapters`` implement them, ``__main__`` and ``cli`` build these, and the loops know only the Protocols.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from quire_common.model_memory import ModelFacts
from quire_operator.domain.autoscaling.gateway_contract import GatewayRequests
from quire_operator.domain.autoscaling.history import ScalingRecord
from quire_operator.domain.autoscaling.observation import ReplicaPhase, ReplicaSample
from quire_operator.domain.canary.figures import TracksPage
from quire_operator.domain.cluster_state.observed import Child, Key, Pod, Ref, Resource
from quire_operator.domain.convergence.plan import RemoveFields
from quire_operator.domain.manifests.objects import Manifest
from quire_operator.domain.resource import HubSource
from quire_operator.domain.status.status import Event

Enqueue = Callable[[Key], None]
"""Has the next pass of an LLMDeployment run soon."""


class Clock(Protocol):
    """A clock that returns Unix seconds."""

    def now(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddress:
    """The address and phase of one live replica."""

    name: str
    """A name that is unique among all replicas: the pod's name with its namespace, or the local process's name."""
    phase: ReplicaPhase
    metrics_url: str | None
    """The URL of /metrics; None while the replica has no address."""
    by_prometheus: bool = False
    """True if the metrics of this replica come from Prometheus."""


class Metrics(Protocol):
    """A source of metrics of replicas and gateways. It never raises for network errors: missing values are absent."""

    async def samples(self, replicas: Sequence[ReplicaAddress]) -> Mapping[str, ReplicaSample]:
        """Return the newest sample of each replica by name, for all LLMDeployments in one call."""
        ...

    async def gateway_requests(self) -> GatewayRequests | None:
        """Return the requests that the gateways hold and run, or None if no gateway is known or none answered."""
        ...


class TracksReader(Protocol):
    """A reader of what the gateways report about canaries. It never raises for network errors."""

    async def tracks(self) -> TracksPage:
        """Return the sum of what the gateways that answer report."""
        ...


class ScalingNotDone(Exception):
    """A decision could not be persisted or applied now; the next tick tries again."""


class ScaleTarget(Protocol):
    """The target of scaling decisions: status and reconcile in a cluster, processes in local mode.

    Both methods raise ``ScalingNotDone`` if a later attempt may succeed.
    """

    async def persist(self, key: str, record: ScalingRecord) -> None:
        """Store the record so that it outlives this process. The autoscaler calls this before ``scale``."""
        ...

    async def scale(self, key: str, *, replicas: int, victims: Sequence[str]) -> None:
        """Set the number of replicas. ``victims`` are the replicas to remove first, in this order."""
        ...


class ClusterError(Exception):
    """A request to the API server failed.

    ClusterError
    ├── Conflict        another client changed the object: read it again, at once
    ├── Refused         the server rejects this object: the user must fix it
    ├── QuotaExceeded   the namespace's quota is exhausted
    ├── Forbidden       the operator lacks a permission
    │   └── PartlyForbidden    for some of several namespaces
    ├── NotFound        the object, its namespace or its kind does not exist
    ├── Throttled       the server requests a delay
    ├── Unavailable     the server failed, did not answer or could not be reached
    └── NotLeading      this process may not write: it is not certain that it holds the Lease
    """


class Conflict(ClusterError):
    """Another client changed or created the object in the meantime."""


class Refused(ClusterError):
    """The server rejects this object; only a changed object can succeed."""


class QuotaExceeded(ClusterError):
    """The quota of the namespace is exhausted."""


class Forbidden(ClusterError):
    """The operator lacks a permission."""


class PartlyForbidden(Forbidden):
    """A list is complete except for the objects in ``namespaces``."""

    def __init__(self, message: str, *, namespaces: frozenset[str]) -> None:
        super().__init__(message)
        self.namespaces = namespaces


class NotFound(ClusterError):
    """The object, its namespace or its kind does not exist."""


class Throttled(ClusterError):
    """The server requests a delay of ``after_seconds``; None if it names no time."""

    def __init__(self, message: str, *, after_seconds: float | None) -> None:
        super().__init__(message)
        self.after_seconds = after_seconds


class Unavailable(ClusterError):
    """The server failed, did not answer in time or could not be reached."""


class NotLeading(ClusterError):
    """The process may not write because it is not certain that it is the leader."""


class Cluster(Protocol):
    """The API server. Every method raises ``ClusterError`` and waits for a few seconds at most.

    Only writes pass the leader write fence. Each write returns the object as the server has stored it.
    """

    async def served_kinds(self) -> frozenset[str]:
        """Return the optional kinds that the API server serves."""
        ...

    async def takes_image_volumes(self, key: Key, deployment: Manifest) -> bool:
        """Return whether the API server keeps the image volume of this Deployment, by a dry run: the same for all keys.

        Raises ``Refused`` if the server rejects the Deployment for another reason, such as a policy of the namespace.
        """
        ...

    async def check_template(self, key: Key, deployment: Manifest) -> None:
        """Have the API server check a Deployment without storing it. Raises ``Refused`` if it rejects its pods."""
        ...

    async def create_secret(self, key: Key, manifest: Manifest) -> None:
        """Create a Secret; it is no error if it exists, and neither is its content read."""
        ...

    async def read_child(self, key: Key, ref: Ref) -> Child | None:
        """Return the object with this name and any owner, or None if it does not exist."""
        ...

    async def read_resource(self, key: Key) -> Resource | None:
        """Return the current LLMDeployment, or None if it does not exist."""
        ...

    async def create(self, key: Key, manifest: Manifest, *, must_be_new: bool) -> Child:
        """Apply the manifest without force. Raises ``Conflict`` if another client set one of its fields differently.

        If it ``must_be_new``, an object that has its name is not changed: raises ``Conflict`` whatever it contains.
        """
        ...

    async def update(self, key: Key, manifest: Manifest) -> Child:
        """Apply the manifest with force, so that our fields get our values back."""
        ...

    async def remove_fields(self, key: Key, action: RemoveFields) -> Child:
        """Remove fields that others added. Raises ``Conflict`` if the object has changed since it was observed."""
        ...

    async def delete(self, key: Key, ref: Ref, uid: str) -> None:
        """Delete the object with this uid; it is no error if it no longer exists."""
        ...

    async def set_deletion_costs(self, key: Key, costs: Mapping[str, str | None]) -> None:
        """Set the deletion cost of each pod; None removes it. A shrinking Deployment removes the lowest cost first."""
        ...

    async def write_status(self, resource: Resource, status: Mapping[str, object]) -> Resource:
        """Write the whole status. Raises ``Conflict`` if the resource has changed since it was observed."""
        ...

    async def record_event(self, resource: Resource, event: Event) -> None:
        """Create an Event about the resource."""
        ...

    def list_resources(self) -> AsyncIterator[Resource]:
        """Yield all LLMDeployments in the watched namespaces."""
        ...

    def list_children(self, kind: str) -> AsyncIterator[tuple[Key, Child]]:
        """Yield all objects of one child kind that have our label."""
        ...

    def list_pods(self) -> AsyncIterator[tuple[Key, Pod]]:
        """Yield all pods that have our label."""
        ...


class AdapterObjects(Protocol):
    """The LLMAdapters of a cluster. Every method raises ``ClusterError``."""

    def list_adapters(self) -> AsyncIterator[Resource]:
        """Yield all LLMAdapters in the watched namespaces. Raises ``NotFound`` if the cluster lacks the kind."""
        ...

    async def write_adapter_status(self, resource: Resource, status: Mapping[str, object]) -> Resource:
        """Write the whole status. Raises ``Conflict`` if the LLMAdapter has changed since it was observed."""
        ...

    async def record_event(self, resource: Resource, event: Event) -> None:
        """Create an Event about the LLMAdapter."""
        ...

    async def annotate_pod(self, namespace: str, pod: str, digest: str) -> None:
        """Note on a pod which list of adapters it is to read, so that its kubelet renews the file at once."""
        ...


class DryRun(Protocol):
    """Writes that the API server checks but does not store, for ``admission``. Every method raises ``ClusterError``."""

    async def owner(self, key: Key, ref: Ref) -> str | None:
        """Return the uid of the object's controller, "" if it has none, or None if the object does not exist."""
        ...

    async def apply(self, key: Key, manifest: Manifest) -> None:
        """Apply without storing. Raises ``Refused`` if the server rejects the manifest."""
        ...


class ModelUnknown(Exception):
    """The facts about a model are unavailable. ``unreachable`` is True if no model can be read at the moment."""

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


class ModelReader(Protocol):
    """A reader of facts about models on a hub, without a download of their weights."""

    async def facts(self, source: HubSource) -> ModelFacts:
        """Return the model's config and parameter count. Raises ``ModelUnknown``."""
        ...

    async def commit(self, source: HubSource) -> str:
        """Return the commit to which the source's revision resolves now. Raises ``ModelUnknown``."""
        ...

    async def aclose(self) -> None: ...


class ProgressReader(Protocol):
    """A reader of the progress that pods serve while they download a model."""

    async def read(self, url: str) -> bytes | None:
        """Return the answer; None if the pod does not answer."""
        ...


class Nodes(Protocol):
    """The nodes of the cluster."""

    async def labels(self) -> Sequence[Mapping[str, str]]:
        """Return the labels of each node that reports its GPU memory. Raises ``ClusterError``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The Lease as it is in the cluster. ``version`` is None if it does not exist yet."""

    version: str | None
    holder: str = ""
    """The identity of the leader; empty without a leader."""
    acquired: datetime | None = None
    renewed: datetime | None = None
    transitions: int = 0


class Leases(Protocol):
    """The single Lease of this operator."""

    async def read(self) -> Lease: ...

    async def write(self, lease: Lease, *, duration_seconds: float) -> Lease:
        """Create or replace the Lease. Raises ``Conflict`` if its version has changed."""
        ...
