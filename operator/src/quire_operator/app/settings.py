"""quire-operator's command line: parsed once, validated with every reason, never changed.

Flags stand above the environment (``QUIRE_OPERATOR_WORKERS`` for ``--workers``), which stands above the defaults.
"""

import argparse
import re
import socket
import ssl
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from quire_operator import __version__
from quire_operator.app.child_settings import ChildSettings, add_child_flags, read_child_settings
from quire_operator.domain.autoscaling.prometheus_series import PrometheusOptions, ReplicaLabels
from quire_operator.domain.manifests.pod_template import Images
from quire_operator.domain.resource.names import is_http_url, object_name_problem
from quire_operator.domain.resource.quantities import parse_duration_seconds
from quire_operator.errors import SettingsProblem

T = TypeVar("T")

_DESCRIPTION = """\
Turns every LLMDeployment of a Kubernetes cluster into running replicas of the engine, and keeps it so. Several may run:
one acts, the others stand by."""

_EPILOG = """\
examples:
  quire-operator                                        in a cluster, as its pod's service account
  quire-operator --kubeconfig ~/.kube/config --watch-namespace chat --namespace chat

Each flag can also be set in the environment, e.g. QUIRE_OPERATOR_ENGINE_IMAGE=registry.example/engine:1
(several namespaces separated by commas)."""

_IMAGE = re.compile(r"[A-Za-z0-9][\w./:@-]{0,511}")
_OCI_VOLUMES: Mapping[str, bool | None] = {"auto": None, "image": True, "fetch": False}
_CAPACITY_CHECK: Mapping[str, bool] = {"auto": True, "off": False}
_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookOptions:
    """Where reviews of the API server come in; they come by TLS only."""

    port: int
    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Where the gateways are."""

    selector: str | None
    """Labels of their pods, in the operator's namespace."""
    urls: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    kubeconfig: str | None
    """None: the pod's own service account."""
    namespace: str | None
    """Where the Lease is; None: the pod's own namespace."""
    watch_namespaces: tuple[str, ...]
    """Empty: all."""
    images: Images
    lease_name: str
    identity: str
    """Unique among those that run at once."""
    host: str
    port: int
    workers: int
    resync_seconds: float
    autoscaling_period_seconds: float
    gateways: GatewayOptions
    prometheus: PrometheusOptions | None
    """None: replicas are asked for their metrics themselves."""
    webhook: WebhookOptions | None
    """None: LLMDeployments are judged when they are reconciled only."""
    capacity_check: bool
    """Whether hub and nodes are asked if what a spec asks for can run."""
    children: ChildSettings
    cluster_domain: str
    log_level: str


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A flag and what it does on one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=38, width=118)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsProblem([message])


def parse_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """The settings, or ``SettingsProblem`` with all that is wrong. ``--help`` and ``--version`` exit."""
    reader = _Reader(_parser().parse_args(argv), environ)
    image = f"quire-{{}}:{__version__}"
    settings = Settings(
        kubeconfig=reader.read("kubeconfig", str, None, "a file"),
        namespace=reader.read("namespace", _name, None, "a namespace"),
        watch_namespaces=reader.read("watch_namespace", _names, (), "namespaces"),
        images=Images(
            engine=reader.read("engine_image", _image, image.format("engine"), "an image reference"),
            operator=reader.read("operator_image", _image, image.format("operator"), "an image reference"),
            hub_endpoint=reader.read("hub_endpoint", _url, None, "an http or https URL"),
            image_volumes=reader.read("oci_volumes", _oci_volumes, None, f"one of {', '.join(_OCI_VOLUMES)}"),
        ),
        lease_name=reader.read("lease_name", _name, "quire-operator", "the name of a Lease"),
        identity=reader.read("identity", _identity, _own_identity(), "1 to 128 letters, digits, '-', '_', '.'"),
        host=reader.read("host", str, "0.0.0.0", "an address"),
        port=reader.read("port", _between(0, 65535), 8080, "a port, 0 to 65535"),
        workers=reader.read("workers", _between(1, 1024), 32, "a number from 1 to 1024"),
        resync_seconds=reader.read("resync", _duration(10.0), 600.0, 'a duration of at least 10s, such as "10m"'),
        autoscaling_period_seconds=reader.read(
            "autoscaling_period", _duration(1.0), 15.0, 'a duration of at least 1s, such as "15s"'
        ),
        gateways=GatewayOptions(
            selector=reader.read("gateway_selector", _selector, None, "a label selector such as app=gateway"),
            urls=reader.read("gateway_url", _urls, (), "http or https URLs"),
        ),
        prometheus=_prometheus(reader),
        webhook=_webhook(reader),
        capacity_check=reader.read("capacity_check", _capacity_check, True, f"one of {', '.join(_CAPACITY_CHECK)}"),
        children=read_child_settings(reader),
        cluster_domain=reader.read("cluster_domain", _name, "cluster.local", "a DNS domain"),
        log_level=reader.read("log_level", _level, "info", f"one of {', '.join(_LEVELS)}"),
    )
    if reader.problems:
        raise SettingsProblem(reader.problems)
    return settings


def _prometheus(reader: "_Reader") -> PrometheusOptions | None:
    url = reader.read("prometheus_url", _url, None, "an http or https URL")
    labels = ReplicaLabels(
        namespace=reader.read("prometheus_namespace_label", _label, "namespace", "the name of a label"),
        pod=reader.read("prometheus_pod_label", _label, "pod", "the name of a label"),
    )
    token_file = reader.read("prometheus_token_file", _file, None, "a file that can be read")
    ca_file = reader.read("prometheus_ca_file", _certificates, None, "a file with certificates")
    if url is None:
        return None
    return PrometheusOptions(url=url, token_file=token_file, ca_file=ca_file, labels=labels)


def _webhook(reader: "_Reader") -> WebhookOptions | None:
    port = reader.read("webhook_port", _between(1, 65535), 9443, "a port, 1 to 65535")
    certificate = reader.read("webhook_certificate", _certificates, None, "a file with certificates")
    key = reader.read("webhook_key", _file, None, "a file that can be read")
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        reader.problems.append("--webhook-certificate and --webhook-key belong together: give both")
        return None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        reader.problems.append(f"--webhook-key: does not belong to {certificate} ({error.reason or error})")
    return WebhookOptions(port=port, certificate=certificate, key=key)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="quire-operator",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"quire-operator {__version__}")
    cluster = parser.add_argument_group("the cluster")
    cluster.add_argument("--kubeconfig", metavar="FILE", help="instead of the pod's service account")
    cluster.add_argument("--namespace", metavar="NAME", help="where the Lease is (default the pod's own, else default)")
    cluster.add_argument(
        "--watch-namespace", metavar="NAME", nargs="+", action="extend", help="act only in these (default all)"
    )
    cluster.add_argument("--cluster-domain", metavar="DOMAIN", help="of Service names (default cluster.local)")
    pods = parser.add_argument_group("what pods are made of")
    pods.add_argument(
        "--engine-image", metavar="IMAGE", help="where spec.engine.image is not set (default quire-engine:VERSION)"
    )
    pods.add_argument("--operator-image", metavar="IMAGE", help="downloads models: has the quire command")
    pods.add_argument("--hub-endpoint", metavar="URL", help="a mirror of the model hub (default the hub itself)")
    pods.add_argument(
        "--oci-volumes",
        metavar="HOW",
        help="how oci:// models without a cache come to pods: image (a volume of the kubelet's), fetch (a download"
        " beside the engine) or auto (image where the API server takes it; the default)",
    )
    pods.add_argument(
        "--capacity-check",
        metavar="HOW",
        help="auto: nothing is made that is known not to fit, by the hub's word on the model, the memory limit and,"
        " where all namespaces are watched, the nodes' GPUs (the default); off: hub and nodes are not asked",
    )
    add_child_flags(parser)
    election = parser.add_argument_group("several operators")
    election.add_argument("--lease-name", metavar="NAME", help="they share this Lease (default quire-operator)")
    election.add_argument("--identity", metavar="TEXT", help="unique among them (default host name and a random id)")
    work = parser.add_argument_group("work")
    work.add_argument("--workers", metavar="N", help="LLMDeployments reconciled at once (default 32)")
    work.add_argument("--resync", metavar="DURATION", help="how often everything is looked at again (default 10m)")
    work.add_argument("--autoscaling-period", metavar="DURATION", help="how often the autoscaler looks (default 15s)")
    prometheus = parser.add_argument_group(
        "Prometheus, for the autoscaler (without it, or with metricsSource: Pods, replicas are asked themselves)"
    )
    prometheus.add_argument("--prometheus-url", metavar="URL", help="its address, such as http://prometheus:9090")
    prometheus.add_argument("--prometheus-token-file", metavar="FILE", help="holds a bearer token; read at each query")
    prometheus.add_argument(
        "--prometheus-ca-file", metavar="FILE", help="certificates that vouch for it (default the system's)"
    )
    prometheus.add_argument(
        "--prometheus-namespace-label", metavar="LABEL", help="names a series' namespace (default namespace)"
    )
    prometheus.add_argument("--prometheus-pod-label", metavar="LABEL", help="names a series' pod (default pod)")
    webhook = parser.add_argument_group("the validating webhook (off without a certificate)")
    webhook.add_argument(
        "--webhook-certificate", metavar="FILE", help="its TLS certificate; read again when it changes"
    )
    webhook.add_argument("--webhook-key", metavar="FILE", help="the certificate's private key")
    webhook.add_argument("--webhook-port", metavar="N", help="port of the webhook (default 9443)")
    gateways = parser.add_argument_group(
        "the gateways, for minReplicas: 0 (they hold the first requests; without them nothing goes to zero)"
    )
    gateways.add_argument(
        "--gateway-selector", metavar="LABELS", help="their pods, by labels, in --namespace (default none)"
    )
    gateways.add_argument(
        "--gateway-url", metavar="URL", nargs="+", action="extend", help="or the address of each, outside the cluster"
    )
    serving = parser.add_argument_group("serving /healthz, /readyz and /metrics")
    serving.add_argument("--host", metavar="ADDRESS", help="address to listen on (default 0.0.0.0)")
    serving.add_argument("--port", metavar="N", help="port to listen on; 0 takes a free one (default 8080)")
    serving.add_argument("--log-level", metavar="LEVEL", help=f"{', '.join(_LEVELS)} (default info)")
    return parser


class _Reader:
    """Reads one option after the other, from the flag or the environment, and collects what is wrong."""

    def __init__(self, args: argparse.Namespace, environ: Mapping[str, str]) -> None:
        self._args, self._environ = args, environ
        self.problems: list[str] = []

    def read(self, name: str, convert: Callable[[str], T], default: T, what: str) -> T:
        """The option, or its default; what can't be read is noted."""
        where, text = self._text(name)
        if text is None:
            return default
        try:
            return convert(text)
        except ValueError as error:
            reason = f" ({error})" if str(error) else ""
            self.problems.append(f"{where}: must be {what}, got {text!r}{reason}")
            return default

    def _text(self, name: str) -> tuple[str, str | None]:
        flag, variable = f"--{name.replace('_', '-')}", f"QUIRE_OPERATOR_{name.upper()}"
        given = getattr(self._args, name)
        if given is None:
            return variable, self._environ.get(variable)
        return flag, ",".join(given) if isinstance(given, list) else str(given)


def _own_identity() -> str:
    return f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"


def _name(text: str) -> str:
    if object_name_problem(text) is not None:
        raise ValueError
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(_name(part.strip()) for part in text.split(",") if part.strip())


def _image(text: str) -> str:
    if _IMAGE.fullmatch(text) is None:
        raise ValueError
    return text


def _url(text: str) -> str:
    if not is_http_url(text):
        raise ValueError
    return text


def _urls(text: str) -> tuple[str, ...]:
    return tuple(_url(part.strip()) for part in text.split(",") if part.strip())


def _selector(text: str) -> str:
    # The API server judges it whole; this is against a value that was meant for another flag.
    if not re.fullmatch(r"[A-Za-z0-9][\w./-]*(=[\w.-]*)?(,[A-Za-z0-9][\w./-]*(=[\w.-]*)?)*", text):
        raise ValueError
    return text


def _label(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        raise ValueError
    return text


def _file(text: str) -> Path:
    path = Path(text)
    try:
        path.read_bytes()
    except OSError as error:
        raise ValueError(error.strerror) from error
    return path


def _certificates(text: str) -> Path:
    try:
        ssl.create_default_context(cafile=text)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(error.strerror or str(error)) from error
    return Path(text)


def _identity(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", text):
        raise ValueError
    return text


def _between(low: int, high: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        value = int(text) if text.isdecimal() else -1
        if not low <= value <= high:
            raise ValueError
        return value

    return convert


def _duration(least: float) -> Callable[[str], float]:
    def convert(text: str) -> float:
        value = parse_duration_seconds(text)
        if value is None or value < least:
            raise ValueError
        return value

    return convert


def _oci_volumes(text: str) -> bool | None:
    if text not in _OCI_VOLUMES:
        raise ValueError
    return _OCI_VOLUMES[text]


def _capacity_check(text: str) -> bool:
    if text not in _CAPACITY_CHECK:
        raise ValueError
    return _CAPACITY_CHECK[text]


def _level(text: str) -> str:
    if text not in _LEVELS:
        raise ValueError
    return text
