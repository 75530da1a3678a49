"""The gateway's flags and its configuration: parsed once, validated with every problem, never changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire_common.flags.kinds import Flag, choice, duration, integer, path, size, switch, text
from quire_common.flags.table import FlagTable, FlagValues
from quire_common.served_names import NameScope
from quire_common.tls import TlsFiles

_DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyOptions:
    max_body_bytes: int
    body_memory_bytes: int
    """The bodies of all requests in flight together."""
    hold_limit: int
    """Requests per model that may wait for a replica."""
    hold_timeout_seconds: float
    max_attempts: int
    """Replicas that are tried for one request before it is held or answered with an error."""
    wait_comments_seconds: float = 25.0
    """The time after which a waiting stream has a comment, and that between two comments; 0 sends none."""
    shares_prefixes: bool = False
    """True if engines share cached prefixes between the names of API keys."""
    hides_names: bool = False
    """True if clients do not learn the names of replicas, and of models that they do not ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSource:
    namespaces: tuple[str, ...]
    """Empty: all namespaces."""
    kubeconfig: Path | None
    """None: the pod's own service account."""
    gateway_service: tuple[str, str] | None = None
    """The namespace and name of the Service whose endpoints are the gateways; None: they are not counted."""
    scope: NameScope = NameScope.CLUSTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    host: str
    port: int
    source: FileSource | KubernetesSource
    proxy: ProxyOptions
    drain_timeout_seconds: float
    log_level: str
    max_connections: int = 2048
    tls: TlsFiles | None = None
    """None: plain HTTP."""
    api_key_file: Path | None = None
    """None: requests need no key."""
    num_gateways: int | None = None
    """The gateways that share the limits of keys; None: counted by discovery, or unknown."""


# fmt: off
FLAGS = FlagTable(
    program="quire-gateway",
    env_prefix="QUIRE_GATEWAY_",
    separator=",",
    removed={
        "wake-port": "requests to the Service of a model no longer wake it; remove the flag, and send them to the "
        "gateway's port",
    },
    intro="""\
quire-gateway serves all LLMDeployments at one OpenAI-compatible address. A request goes to the replica of its "model"
with the shortest expected wait; /v1/models lists the models.

usage: quire-gateway --kubernetes | --endpoints-file FILE [flags]
""",
    groups={
        "Listening": (
            Flag("host", text(), "the address to listen on", "0.0.0.0"),
            Flag("port", integer(0, 65535), "the port to listen on; 0 chooses a free port", "8000"),
            Flag("ssl-certfile", path(readable=True), "serve HTTPS with this certificate and its chain, in PEM; "
                 "reloaded when it changes", unset="plain HTTP"),
            Flag("ssl-keyfile", path(readable=True), "the private key, in PEM", unset="in the certificate's file"),
            Flag("max-connections", integer(1, 10**6), "the number of client connections; at the bound, the one that "
                 "has been idle the longest is closed", "2048"),
            Flag("api-key-file", path(readable=True), "require one of the keys in this file, one per line, on all "
                 "paths but the probes, /metrics and /requests; reloaded when it changes. Replicas get no "
                 "key, but an opaque value for its name; the key of an engine that has its own comes in the header "
                 "X-Quire-Engine-Key", unset="open to all"),
        ),
        "Discovery (one of --endpoints-file and --kubernetes)": (
            Flag("endpoints-file", path(), "read the replicas from this JSON file, again whenever it changes"),
            Flag("kubernetes", switch(), "watch LLMDeployments and their EndpointSlices"),
            Flag("served-names", choice("cluster", "namespaced"), "how clients name a model: by its served name "
                 "(cluster), or as NAMESPACE/NAME (namespaced), so that no namespace can claim another one's name",
                 "cluster"),
            Flag("namespace", kind=text("NAME"), many=True, help="namespaces to watch", unset="all"),
            Flag("gateway-service", text("NAMESPACE/NAME"), "count the endpoints of this Service as the gateways that "
                 "share the limits of API keys"),
            Flag("gateways", integer(1, 10_000), "the number of gateways that share the limits of API keys",
                 unset="counted, or 1"),
            Flag("kubeconfig", path(), "connect to the cluster of this file",
                 unset="the pod's service account"),
        ),
        "Requests": (
            Flag("max-body-bytes", size(1024, 2**31), "answer larger request bodies with 413", "16MiB"),
            Flag("body-memory", size(1024, 2**40), "the memory for the bodies of all requests that arrive, wait or "
                 "are sent; a body that does not fit is answered with 503 and Retry-After. One API key "
                 "uses at most what it leaves free and gets 429 beyond that", "96MiB"),
            Flag("hold-limit", integer(0, 10**6), "the number of requests per model that may wait for a replica",
                 "1000"),
            Flag("hold-timeout", duration(maximum=_DAY_SECONDS), "how long a request waits for a replica before it is "
                 "answered with 503", "120s"),
            Flag("wait-comments", duration(maximum=300.0), "how long a stream waits for its replica before a comment "
                 "begins it, for load balancers that close silent connections, and the time between two comments. "
                 "From then on an error is an event instead of a status. A request sets another time with the header "
                 "X-Quire-Wait-Comments. 0 sends none", "25s"),
            Flag("share-prefixes", choice("tenant", "all"), "must equal the flag of the engines: whether keys of "
                 "different names share cached prefixes", "tenant"),
            Flag("hide-names", switch(), "hide replicas and models: no X-Quire-Replica header, no models in a 404, "
                 "and an empty /v1/models"),
            Flag("max-attempts", integer(1, 100), "the number of replicas to try before the first byte", "3"),
        ),
        "Shutdown and logs": (
            Flag("drain-timeout", duration(maximum=_DAY_SECONDS), "how long running requests may take after SIGTERM",
                 "120s"),
            Flag("log-level", choice("debug", "info", "warning", "error"), "the least severe level to log", "info"),
        ),
    },
    outro="""\
Also: --help, --version.

Each flag can be set by a variable: --hold-timeout 60 is QUIRE_GATEWAY_HOLD_TIMEOUT=60. A flag takes precedence.

  quire-gateway --kubernetes                                     in a cluster, with the pod's service account
  quire-gateway --kubernetes --kubeconfig ~/.kube/config --namespace chat
  quire-gateway --endpoints-file endpoints.json                  replicas on this machine, with a file such as
    {"models": [{"name": "chat", "endpoints": [{"id": "chat-0", "url": "http://127.0.0.1:40001", "ready": true}]}]}
""",
)
# fmt: on


def parse_config(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Return the configuration, or raise ``FlagsError`` with every problem."""
    values = FLAGS.read(argv, environ)
    source, tls = _source(values), _tls(values)
    if values["body-memory"] < values["max-body-bytes"]:
        values.problems.append("--body-memory must be at least --max-body-bytes, or the largest bodies never fit")
    values.check()
    return Config(
        host=values["host"],
        port=values["port"],
        source=source,
        proxy=ProxyOptions(
            max_body_bytes=values["max-body-bytes"],
            body_memory_bytes=values["body-memory"],
            hold_limit=values["hold-limit"],
            hold_timeout_seconds=values["hold-timeout"],
            max_attempts=values["max-attempts"],
            wait_comments_seconds=values["wait-comments"],
            shares_prefixes=values["share-prefixes"] == "all",
            hides_names=bool(values["hide-names"]),
        ),
        drain_timeout_seconds=values["drain-timeout"],
        log_level=values["log-level"],
        max_connections=values["max-connections"],
        tls=tls,
        api_key_file=values["api-key-file"],
        num_gateways=_num_gateways(values),
    )


def _source(values: FlagValues) -> FileSource | KubernetesSource:
    in_cluster = bool(values["kubernetes"])
    if in_cluster == values.is_set("endpoints-file"):
        values.problems.append("the source of replicas is not clear: set either --endpoints-file FILE or --kubernetes")
    if not in_cluster:
        values.problems.extend(
            f"--{name} requires --kubernetes"
            for name in ("namespace", "kubeconfig", "gateway-service", "served-names")
            if values.is_set(name)
        )
        return FileSource(path=values["endpoints-file"] or Path())
    kubeconfig: Path | None = values["kubeconfig"]
    if kubeconfig is not None and not kubeconfig.is_file():
        values.problems.append(f"--kubeconfig: there is no file {kubeconfig}")
    return KubernetesSource(
        namespaces=values["namespace"] or (),
        kubeconfig=kubeconfig,
        gateway_service=_gateway_service(values),
        scope=NameScope(values["served-names"]),
    )


def _gateway_service(values: FlagValues) -> tuple[str, str] | None:
    if not values.is_set("gateway-service"):
        return None
    namespace, found, name = values["gateway-service"].partition("/")
    if not (namespace and found and name) or "/" in name:
        values.problems.append("--gateway-service: expected NAMESPACE/NAME")
    if values.is_set("gateways"):
        values.problems.append("--gateways and --gateway-service exclude each other")
    return namespace, name


def _num_gateways(values: FlagValues) -> int | None:
    """Return the fixed number of gateways. With an endpoints file, other gateways cannot be seen."""
    given: int | None = values["gateways"]
    return 1 if given is None and not values["kubernetes"] else given


def _tls(values: FlagValues) -> TlsFiles | None:
    if not values.is_set("ssl-certfile"):
        if values.is_set("ssl-keyfile"):
            values.problems.append("--ssl-keyfile requires --ssl-certfile")
        return None
    return TlsFiles(certfile=values["ssl-certfile"], keyfile=values["ssl-keyfile"])
