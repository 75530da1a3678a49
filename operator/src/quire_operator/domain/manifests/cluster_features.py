"""The inputs of children that are not in their specs: the operator's settings, and the APIs found in the cluster.

``app`` builds them from ``settings`` and the findings of ``optional_kinds``; ``desired`` reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire_common.served_names import NameScope

JSON = Mapping[str, object]

POD_MONITOR, PROMETHEUS_RULE = "PodMonitor", "PrometheusRule"


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitoring:
    """The settings of PodMonitors and PrometheusRules."""

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

    network_peers: tuple[JSON, ...] | None = None
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
