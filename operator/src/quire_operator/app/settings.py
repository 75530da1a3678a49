"""The operator's settings: parsed once from ``flags``, validated with all problems reported, and never changed."""

import socket
import ssl
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire_common.flags.table import FlagValues
from quire_operator import __version__
from quire_operator.app.flags import FLAGS
from quire_operator.domain.autoscaling.prometheus_series import PrometheusOptions, ReplicaLabels
from quire_operator.domain.manifests.cluster_features import ClusterFeatures, Monitoring
from quire_operator.domain.manifests.pod_template import Images


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookOptions:
    """The webhook's port and its TLS files."""

    port: int
    certificate: Path
    key: Path
    client_ca: Path | None
    """The authorities whose clients may connect; None means that every client may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """The location of the gateways."""

    selector: str | None
    """The labels of their pods, in the operator's namespace."""
    urls: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSettings:
    """The settings of children other than pods."""

    features: ClusterFeatures
    """The part that is configured; the optional kinds are discovered."""
    discovery_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The operator's configuration."""

    kubeconfig: str | None
    """None: the pod's own service account."""
    namespace: str | None
    """The Lease's namespace; None: the pod's own namespace."""
    watch_namespaces: tuple[str, ...]
    """Empty: all namespaces."""
    images: Images
    lease_name: str
    identity: str
    """A name that is unique among the operators that run at once."""
    host: str
    port: int
    workers: int
    max_concurrent_rollouts: int
    """0: any number."""
    resync_seconds: float
    autoscaling_period_seconds: float
    gateways: GatewayOptions
    prometheus: PrometheusOptions | None
    """None: replicas are scraped directly."""
    webhook: WebhookOptions | None
    """None: LLMDeployments are validated only when they are reconciled."""
    capacity_check: bool
    """True if the operator checks with hub and nodes whether a spec fits."""
    children: ChildSettings
    cluster_domain: str
    log_level: str


def parse_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Return the settings, or raise ``FlagsError`` with every problem."""
    values = FLAGS.read(argv, environ)
    webhook = _webhook(values)
    values.check()
    return Settings(
        kubeconfig=values["kubeconfig"],
        namespace=values["namespace"],
        watch_namespaces=values["watch-namespace"] or (),
        images=Images(
            engine=values["engine-image"] or f"quire-engine:{__version__}",
            rocm_engine=values["engine-rocm-image"] or f"quire-engine-rocm:{__version__}",
            pull_policy=values["engine-pull-policy"],
            model_size_limit=values["model-size-limit"],
            hub_endpoint=values["hub-endpoint"],
            user_id=None if values["pod-user-id"] == "none" else int(values["pod-user-id"]),
            allowed_exceptions=frozenset(values["pod-template-allow"] or ()),
        ),
        lease_name=values["lease-name"],
        identity=values["identity"] or f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}",
        host=values["host"],
        port=values["port"],
        workers=values["workers"],
        max_concurrent_rollouts=values["max-concurrent-rollouts"],
        resync_seconds=values["resync"],
        autoscaling_period_seconds=values["autoscaling-period"],
        gateways=GatewayOptions(
            selector=values["gateway-selector"],
            urls=values["gateway-url"] or (),
        ),
        prometheus=_prometheus(values),
        webhook=webhook,
        capacity_check=values["capacity-check"],
        children=_children(values),
        cluster_domain=values["cluster-domain"],
        log_level=values["log-level"],
    )


def _prometheus(values: FlagValues) -> PrometheusOptions | None:
    if values["prometheus-url"] is None:
        return None
    return PrometheusOptions(
        url=values["prometheus-url"],
        token_file=values["prometheus-token-file"],
        ca_file=values["prometheus-ca-file"],
        labels=ReplicaLabels(namespace=values["prometheus-namespace-label"], pod=values["prometheus-pod-label"]),
    )


def _webhook(values: FlagValues) -> WebhookOptions | None:
    certificate, key = values["webhook-certificate"], values["webhook-key"]
    if values.is_set("webhook-certificate") != values.is_set("webhook-key"):
        values.problems.append("--webhook-certificate and --webhook-key belong together: set both")
    if values.is_set("webhook-client-ca") and not values.is_set("webhook-certificate"):
        values.problems.append("--webhook-client-ca requires --webhook-certificate")
    if certificate is None or key is None:
        return None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        values.problems.append(f"--webhook-key: does not belong to {certificate} ({error.reason or error})")
    return WebhookOptions(
        port=values["webhook-port"], certificate=certificate, key=key, client_ca=values["webhook-client-ca"]
    )


def _children(values: FlagValues) -> ChildSettings:
    monitoring = Monitoring(
        interval=values["monitor-interval"],
        pod_monitor_labels=values["monitor-labels"] or {},
        rule_labels=values["alert-labels"] or {},
        runbook_url=values["runbook-url"],
    )
    return ChildSettings(
        features=ClusterFeatures(
            network_peers=values["network-policy-from"],
            monitoring=monitoring if values["monitors"] else None,
            served_names=values["served-names"],
        ),
        discovery_seconds=values["discovery"],
    )
