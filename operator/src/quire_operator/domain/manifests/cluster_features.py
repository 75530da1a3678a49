"""What the children of LLMDeployments depend on beside their specs: what the operator is told, what the cluster has.

Made by ``app`` from ``settings`` and from what ``optional_kinds`` finds; read by ``desired``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire_common.served_names import NameScope

JSON = Mapping[str, object]

POD_MONITOR, PROMETHEUS_RULE = "PodMonitor", "PrometheusRule"


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitoring:
    """How the Prometheus operator is told of replicas."""

    interval: str = "15s"
    """Between scrapes, as Prometheus writes durations. The autoscaler decides each 15 s."""
    pod_monitor_labels: Mapping[str, str] = field(default_factory=dict)
    """What a Prometheus selects PodMonitors by."""
    rule_labels: Mapping[str, str] = field(default_factory=dict)
    """What a Prometheus selects PrometheusRules by."""
    runbook_url: str = "docs/runbooks"
    """In front of /NAME.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFeatures:
    """The defaults are those of a cluster that has nothing beside Kubernetes, and of an operator told nothing."""

    network_peers: tuple[JSON, ...] | None = None
    """NetworkPolicyPeers that may reach replicas; None: all may, and no policy is made."""
    monitoring: Monitoring | None = None
    """None: neither PodMonitors nor PrometheusRules are made."""
    served_kinds: frozenset[str] = frozenset()
    """Those of the optional kinds that the API server has."""
    served_names: NameScope | None = NameScope.CLUSTER
    """The scope of served names at the gateway; None: there is no gateway, and several may have one name."""

    def creates(self, kind: str) -> bool:
        """Return True if the operator creates objects of this optional kind for specs that ask for them."""
        return self.monitoring is not None and kind in self.served_kinds
