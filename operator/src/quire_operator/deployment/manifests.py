"""Objects as they are applied, and the features of the cluster for which they are rendered. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from json import dumps
from typing import Any

from quire_common.served_names import NameScope
from quire_operator.api import names
from quire_operator.kube.objects import HELD_PARTITION, LEADER_WORKER_SET, Ref

POD_MONITOR, PROMETHEUS_RULE = "PodMonitor", "PrometheusRule"


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitoring:
    interval: str = "15s"
    """The time between scrapes, in Prometheus' notation. The autoscaler decides each 15 s."""
    pod_monitor_labels: Mapping[str, str] = field(default_factory=dict)
    """The labels by which a Prometheus selects PodMonitors."""
    rule_labels: Mapping[str, str] = field(default_factory=dict)
    """The labels by which a Prometheus selects PrometheusRules."""
    runbook_url: str = "docs/runbooks"
    """The prefix of /NAME.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFeatures:
    """The optional features of a cluster. By default it has only Kubernetes' own, and the operator has no settings."""

    network_peers: tuple[Mapping[str, object], ...] | None = None
    """NetworkPolicyPeers that may reach replicas; None: all may, and no policy is created."""
    monitoring: Monitoring | None = None
    """None: neither PodMonitors nor PrometheusRules are created."""
    served_kinds: frozenset[str] = frozenset()
    """The optional kinds that the API server serves."""
    served_names: NameScope | None = NameScope.CLUSTER
    """The scope of served names at the gateway; None: there is no gateway, and several may have one name."""

    def creates(self, kind: str) -> bool:
        """Return True if the operator creates objects of this optional kind for specs that ask for them."""
        return self.monitoring is not None and kind in self.served_kinds


NO_FEATURES = ClusterFeatures()


JSON = dict[str, object]
COMPONENT = names.COMPONENT
HEADLESS_COMPONENT = "engine-headless"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    ref: Ref
    body: JSON

    @property
    def digest(self) -> str:
        """A hash that is equal for equal bodies."""
        return digest(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifests:
    """The children of one LLMDeployment, in the order of ``CHILDREN``."""

    children: tuple[Manifest, ...]

    def __iter__(self) -> Iterator[Manifest]:
        return iter(self.children)

    @property
    def workload(self) -> Manifest:
        """The Deployment or LeaderWorkerSet, of which every LLMDeployment has one."""
        return next(manifest for manifest in self if manifest.ref.kind in ("Deployment", LEADER_WORKER_SET))

    @property
    def trial(self) -> Manifest:
        """A Deployment with the template of a replica, for dry runs: the API server checks no LeaderWorkerSet."""
        workload: Any = self.workload.body
        if self.workload.ref.kind == "Deployment":
            return self.workload
        template = workload["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
        labels = {names.LABEL_DEPLOYMENT: template["metadata"]["labels"][names.LABEL_DEPLOYMENT]}
        spec = {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}
        body = {**workload, "apiVersion": "apps/v1", "kind": "Deployment", "spec": spec}
        return Manifest(ref=Ref("Deployment", self.workload.ref.name), body=body)

    @property
    def template_digest(self) -> str:
        """A hash that is equal for equal pod templates."""
        metadata: Any = self.workload.body["metadata"]
        return str(metadata["annotations"][names.ANNOTATION_TEMPLATE])

    def with_others(self, others: Sequence[Manifest], *, before: bool = False) -> "Manifests":
        """Return the same children with others, which are created after them or before."""
        return Manifests(children=(*others, *self.children) if before else (*self.children, *others))

    def held(self) -> "Manifests":
        """Return the same children with a workload that is scaled but replaces no replicas."""
        body: Any = self.workload.body
        pause: JSON = {"paused": True}
        if self.workload.ref.kind == LEADER_WORKER_SET:
            # New groups have the previous template too, because every index is below the partition.
            rules = {"partition": HELD_PARTITION, "maxSurge": 0, "maxUnavailable": 1}
            pause = {"rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": rules}}
        held = Manifest(ref=self.workload.ref, body={**body, "spec": {**body["spec"], **pause}})
        return Manifests(children=tuple(held if child.ref == held.ref else child for child in self))


def labels(name: str, *, component: str = COMPONENT) -> dict[str, str]:
    return {
        names.LABEL_APP: "quire",
        names.LABEL_INSTANCE: name,
        names.LABEL_COMPONENT: component,
        names.LABEL_MANAGED_BY: "quire-operator",
        names.LABEL_DEPLOYMENT: name,
    }


def selector(name: str, *, component: str = COMPONENT) -> dict[str, str]:
    """Return the labels that select the pods of one LLMDeployment: its replicas, or another component.

    A Deployment's selector is immutable, so it contains no labels that users choose.
    """
    return {names.LABEL_DEPLOYMENT: name, names.LABEL_COMPONENT: component}


def all_tracks(name: str) -> JSON:
    """Return the selector of the pods of one LLMDeployment that serve, with those of its canary."""
    return _of_components(name, names.COMPONENT, names.CANARY_COMPONENT)


def group_members(name: str) -> JSON:
    """Return the selector of all pods of one LLMDeployment whose replicas are groups."""
    return _of_components(name, names.COMPONENT, names.WORKER_COMPONENT)


def _of_components(name: str, *values: str) -> JSON:
    components: JSON = {"key": names.LABEL_COMPONENT, "operator": "In", "values": [*values]}
    return {"matchLabels": {names.LABEL_DEPLOYMENT: name}, "matchExpressions": [components]}


def owner_reference(name: str, uid: str) -> JSON:
    """Return the reference with which a child belongs to its LLMDeployment."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def digest(body: JSON) -> str:
    """Return a hash that is equal for equal bodies."""
    return blake2b(dumps(body, sort_keys=True).encode(), digest_size=12).hexdigest()
