"""The operator's settings: parsed once from ``FLAGS``, validated with all problems reported, and never changed."""

import json
import re
import socket
import ssl
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire_common.flags.kinds import Flag, Kind, choice, duration, integer, path, pattern, text, url
from quire_common.flags.table import FlagTable, FlagValues
from quire_common.names import object_name_problem
from quire_common.quantities import parse_bytes
from quire_common.served_names import NameScope
from quire_operator import __version__
from quire_operator.api import PullPolicy
from quire_operator.autoscaling.engine_metrics import PrometheusOptions, ReplicaLabels
from quire_operator.deployment.manifests import ClusterFeatures, Monitoring
from quire_operator.deployment.network import peer_problems
from quire_operator.deployment.pod_rules import EXCEPTIONS
from quire_operator.deployment.pod_template import Images

_LABEL_NAME = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?", re.ASCII)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_SELECTOR_TERM = r"[A-Za-z0-9][\w./-]*(=[\w.-]*)?"


def _object_name(text: str) -> str:
    if object_name_problem(text) is not None:
        raise ValueError
    return text


def _certificates(text: str) -> Path:
    try:
        ssl.create_default_context(cafile=text)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(error.strerror or str(error)) from error
    return Path(text)


def _labels(text: str) -> Mapping[str, str]:
    labels: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not _LABEL_NAME.fullmatch(name) or not _LABEL_VALUE.fullmatch(value):
            raise ValueError(f"{part!r} is not label=value")
        labels[name] = value
    return labels


def _quantity(text: str) -> str:
    if not parse_bytes(text):
        raise ValueError
    return text


def _network_peers(text: str) -> tuple[Mapping[str, object], ...]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    problems = list(peer_problems(value))
    if problems:
        raise ValueError("; ".join(map(str, problems)))
    return tuple(value)


_OBJECT_NAME = Kind("NAME", "the name of a Kubernetes object: lower-case letters, digits, '-' and '.'", _object_name)
_DOMAIN = replace(_OBJECT_NAME, metavar="DOMAIN")
_CERTIFICATES = Kind("PATH", "a file with certificates in PEM", _certificates)
_LABELS = Kind("LABELS", "labels such as release=prometheus,team=ml", _labels)
_QUANTITY = Kind("QUANTITY", "a number of bytes such as 200Gi", _quantity)
_NETWORK_PEERS = Kind("JSON", "NetworkPolicyPeers in JSON", _network_peers)
_IMAGE = pattern(r"[A-Za-z0-9][\w./:@-]{0,511}", "an image reference", "IMAGE")
_METRIC_LABEL = pattern(r"[A-Za-z_][A-Za-z0-9_]*", "the name of a label", "LABEL")


# fmt: off
FLAGS = FlagTable(
    program="quire-operator",
    env_prefix="QUIRE_OPERATOR_",
    separator=",",
    removed={
        "oci-volumes": "the kubelet mounts every oci:// model; remove the flag",
        "wake-by-service": "requests to the Service of a model no longer wake it; remove the flag, and send them to a "
        "gateway"
    },
    intro="""\
quire-operator turns every LLMDeployment of a Kubernetes cluster into running replicas of the engine. Several operators
may run: one of them acts, the others are on standby.

usage: quire-operator [flags]
""",
    groups={
        "Cluster": (
            Flag("kubeconfig", text("PATH"), "the file with the connection to the cluster",
                 unset="the pod's service account"),
            Flag("namespace", _OBJECT_NAME, "the namespace of the Lease", unset="the pod's own, else default"),
            Flag("watch-namespace", kind=_OBJECT_NAME, many=True, help="the namespaces to act in",
                 unset="all"),
            Flag("cluster-domain", _DOMAIN, "the DNS domain of Services", "cluster.local"),
        ),
        "Pods": (
            Flag("engine-image", _IMAGE, "the engine's image where spec.engine.image is not set",
                 unset="quire-engine:VERSION"),
            Flag("engine-rocm-image", _IMAGE, "the same for LLMDeployments that request amd.com/gpu, with torch's "
                 "build for ROCm", unset="quire-engine-rocm:VERSION"),
            Flag("engine-pull-policy", choice(values={policy.value: policy for policy in PullPolicy}), "the pull "
                 "policy of the engine's image", unset="Kubernetes' default for its tag"),
            Flag("model-size-limit", _QUANTITY, "the size limit of a model that a pod downloads without "
                 "spec.model.cache", "200Gi"),
            Flag("hub-endpoint", url("https://hub.example"), "a mirror of the model hub", unset="the hub itself"),
            Flag("pod-user-id", pattern(r"[1-9]\d{0,9}|none", "a user id such as 65532, or none", "UID"), "the user "
                 "and group of replicas; none leaves them to the cluster, as OpenShift's restricted-v2 requires",
                 "65532"),
            Flag("pod-template-allow", kind=choice(*sorted(EXCEPTIONS), metavar="NAME"), many=True,
                 unset="none", help="types of volumes, and rules of pods, that spec.podTemplate may use: "
                 + ", ".join(sorted(EXCEPTIONS))),
            Flag("capacity-check", choice(values={"auto": True, "off": False}), "auto creates no pods that are known "
                 "not to fit. It reads the model's size from the hub, the memory limit, and the nodes' GPUs if all "
                 "namespaces are watched. off reads neither hub nor nodes", "auto"),
        ),
        "Other children": (
            Flag("network-policy-from", _NETWORK_PEERS, "the only NetworkPolicyPeers that may reach replicas",
                 unset="no policies: all may"),
            Flag("served-names", choice(values={"unique": NameScope.CLUSTER, "namespaced": NameScope.NAMESPACED,
                 "shared": None}), "unique: two LLMDeployments with one served name conflict; namespaced: clients of "
                 "the gateway ask for NAMESPACE/NAME; shared: there is no gateway", "unique"),
            Flag("monitors", choice(values={"auto": True, "off": False}), "auto: create PodMonitors and "
                 "PrometheusRules where these kinds exist", "auto"),
            Flag("monitor-interval", pattern(r"(?=.)(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?", 'a duration such as "15s"',
                 "DURATION"), "the time between scrapes by PodMonitors", "15s"),
            Flag("monitor-labels", _LABELS, "labels of PodMonitors, such as release=prometheus"),
            Flag("alert-labels", _LABELS, "labels of PrometheusRules, such as release=prometheus"),
            Flag("runbook-url", pattern(r"[\w./:~%@-]{1,1000}", "a URL or a path", "URL"), "the address of the "
                 "runbooks, in front of /NAME.md", "docs/runbooks"),
            Flag("discovery", duration(1.0), "how often the cluster is searched for such kinds and their objects",
                 "60s"),
        ),
        "Several operators": (
            Flag("lease-name", _OBJECT_NAME, "the Lease that they share", "quire-operator"),
            Flag("identity", pattern(r"[A-Za-z0-9_.-]{1,128}", "1 to 128 letters, digits, '-', '_', '.'", "TEXT"),
                 "a name that is unique among them", unset="host name and a random id"),
        ),
        "Work": (
            Flag("workers", integer(1, 1024), "the number of LLMDeployments that are reconciled at once", "32"),
            Flag("max-concurrent-rollouts", integer(0, 100_000), "the LLMDeployments whose replicas a new operator "
                 "replaces at once; 0: all", "5"),
            Flag("resync", duration(10.0), "how often every LLMDeployment is reconciled without a change", "10m"),
            Flag("autoscaling-period", duration(1.0), "the time between two evaluations of the autoscaler", "15s"),
        ),
        "Prometheus for the autoscaler (without it, or with metricsSource: Pods, replicas are scraped directly)": (
            Flag("prometheus-url", url("http://prometheus:9090"), "the address of Prometheus", unset="none"),
            Flag("prometheus-token-file", path(readable=True), "a file with a bearer token; read at each query"),
            Flag("prometheus-ca-file", _CERTIFICATES, "certificates of authorities to trust", unset="the system's"),
            Flag("prometheus-namespace-label", _METRIC_LABEL, "the label with a series' namespace", "namespace"),
            Flag("prometheus-pod-label", _METRIC_LABEL, "the label with a series' pod", "pod"),
        ),
        "Validating webhook (off without a certificate)": (
            Flag("webhook-certificate", _CERTIFICATES, "the TLS certificate; reloaded when it changes"),
            Flag("webhook-key", path(readable=True), "the certificate's private key"),
            Flag("webhook-client-ca", _CERTIFICATES, "answer only clients with a certificate of these authorities",
                 unset="all"),
            Flag("webhook-port", integer(1, 65535), "the port of the webhook", "9443"),
        ),
        "Gateways, for minReplicas: 0 (they hold the first requests; without them nothing scales to zero)": (
            Flag("gateway-selector", pattern(rf"{_SELECTOR_TERM}(,{_SELECTOR_TERM})*",
                 "a label selector such as app=gateway", "LABELS"), "the labels of their pods, in --namespace",
                 unset="none"),
            Flag("gateway-url", kind=url("http://gateway:8000"), many=True,
                 help="the addresses of gateways outside the cluster", unset="none"),
        ),
        "Serving /healthz, /readyz and /metrics, and logs": (
            Flag("host", text(), "the address to listen on", "0.0.0.0"),
            Flag("port", integer(0, 65535), "the port to listen on; 0 chooses a free port", "8080"),
            Flag("log-level", choice("debug", "info", "warning", "error"), "the least severe level to log", "info"),
        ),
    },
    outro="""\
Also: --help, --version.

Each flag can be set by a variable: --engine-image IMAGE is QUIRE_OPERATOR_ENGINE_IMAGE=IMAGE, with commas between
several values. A flag takes precedence.

  quire-operator                                        in a cluster, with its pod's service account
  quire-operator --kubeconfig ~/.kube/config --watch-namespace chat --namespace chat
""",
)
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookOptions:
    """The webhook's address and its TLS files."""

    host: str
    port: int
    certificate: Path
    key: Path
    client_ca: Path | None
    """The authorities whose clients may connect; None means that every client may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
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
    gateway_selector: str | None
    """The labels of the gateways' pods, in the operator's namespace."""
    gateway_urls: tuple[str, ...]
    prometheus: PrometheusOptions | None
    """None: replicas are scraped directly."""
    webhook: WebhookOptions | None
    """None: LLMDeployments are validated only when they are reconciled."""
    capacity_check: bool
    """True if the operator checks with hub and nodes whether a spec fits."""
    features: ClusterFeatures
    """The part that is configured; the optional kinds are discovered."""
    discovery_seconds: float
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
        gateway_selector=values["gateway-selector"],
        gateway_urls=values["gateway-url"] or (),
        prometheus=_prometheus(values),
        webhook=webhook,
        capacity_check=values["capacity-check"],
        features=_features(values),
        discovery_seconds=values["discovery"],
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
        host=values["host"],
        port=values["webhook-port"],
        certificate=certificate,
        key=key,
        client_ca=values["webhook-client-ca"],
    )


def _features(values: FlagValues) -> ClusterFeatures:
    monitoring = Monitoring(
        interval=values["monitor-interval"],
        pod_monitor_labels=values["monitor-labels"] or {},
        rule_labels=values["alert-labels"] or {},
        runbook_url=values["runbook-url"],
    )
    return ClusterFeatures(
        network_peers=values["network-policy-from"],
        monitoring=monitoring if values["monitors"] else None,
        served_names=values["served-names"],
    )
