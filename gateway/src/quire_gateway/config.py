"""The command line: parsed once, validated with every reason, never changed.

Flags stand above the environment (``QUIRE_GATEWAY_PORT`` for ``--port``), which stands above the defaults.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, TypeVar

from quire_gateway import __version__
from quire_gateway.errors import ConfigProblem

T = TypeVar("T")

_DESCRIPTION = """\
One OpenAI-compatible address in front of every LLMDeployment. Requests are routed by the "model" in their body to the
replica with the least expected wait; /v1/models lists what is served."""

_EPILOG = """\
examples:
  quire-gateway --port 8000 --endpoints-file endpoints.json      replicas on this machine, listed in a file
  quire-gateway --kubernetes                                     in a cluster, with the pod's service account
  quire-gateway --kubernetes --kubeconfig ~/.kube/config --namespace chat

the file, which may be replaced at any time:
  {"models": [{"name": "chat", "endpoints": [{"id": "chat-0", "url": "http://127.0.0.1:40001", "ready": true}]}]}

Certificates and keys are read again when their files change. A client's key also goes on to the replica.

Flags with one value can also be set in the environment: QUIRE_GATEWAY_HOLD_TIMEOUT=60 for --hold-timeout 60."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyOptions:
    """How a request is treated."""

    max_body_bytes: int
    hold_limit: int
    """Requests per model that may wait for a replica."""
    hold_timeout_seconds: float
    max_attempts: int
    """Replicas asked for one request before it is held or given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    certfile: Path
    keyfile: Path | None
    """None: in the certificate's file."""

    @property
    def key(self) -> Path:
        return self.keyfile or self.certfile


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSource:
    namespaces: tuple[str, ...]
    """Empty: all."""
    kubeconfig: Path | None
    """None: the pod's own service account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    host: str
    port: int
    source: FileSource | KubernetesSource
    proxy: ProxyOptions
    drain_timeout_seconds: float
    log_level: str
    tls: TlsOptions | None = None
    """None: plain HTTP."""
    api_key_file: Path | None = None
    """None: requests need no key."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigProblem([message])


def parse_config(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """The configuration, or ``ConfigProblem`` with all that is wrong. ``--help`` and ``--version`` exit."""
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    reader = _Reader(args, environ)
    reader.problems += [_unknown(word, parser) for word in unknown if word.startswith("-")] or [
        f"unexpected argument {word!r}" for word in unknown
    ]
    config = Config(
        host=reader.read("host", str, "0.0.0.0", "an address"),
        port=reader.read("port", _between(0, 65535), 8000, "a port, 0 to 65535"),
        source=_source(args, reader),
        proxy=ProxyOptions(
            max_body_bytes=reader.read(
                "max_body_bytes", _between(1024, 2**31), 16 * 2**20, "a number of bytes >= 1024"
            ),
            hold_limit=reader.read("hold_limit", _between(0, 10**6), 1000, "a number of requests >= 0"),
            hold_timeout_seconds=reader.read("hold_timeout", _seconds, 120.0, "a number of seconds >= 0"),
            max_attempts=reader.read("max_attempts", _between(1, 100), 3, "a number >= 1"),
        ),
        drain_timeout_seconds=reader.read("drain_timeout", _seconds, 120.0, "a number of seconds >= 0"),
        log_level=reader.read("log_level", _level, "info", "one of debug, info, warning, error"),
        tls=_tls(reader),
        api_key_file=reader.read("api_key_file", _file, None, "a file that can be read"),
    )
    if reader.problems:
        raise ConfigProblem(reader.problems)
    return config


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="quire-gateway",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"quire-gateway {__version__}")
    listen = parser.add_argument_group("listening")
    listen.add_argument("--host", metavar="ADDRESS", help="address to listen on (default 0.0.0.0)")
    listen.add_argument("--port", metavar="N", help="port to listen on; 0 takes a free one (default 8000)")
    listen.add_argument(
        "--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate (PEM, with its chain)"
    )
    listen.add_argument("--ssl-keyfile", metavar="FILE", help="its private key (default: in the same file)")
    listen.add_argument(
        "--api-key-file", metavar="FILE", help="ask for one of its keys, one a line, on all but probes and /metrics"
    )
    discovery = parser.add_argument_group("where the replicas are (one of the two)")
    discovery.add_argument(
        "--endpoints-file", metavar="FILE", help="read them from this JSON file, again whenever it changes"
    )
    discovery.add_argument(
        "--kubernetes", action="store_true", help="watch the Services and EndpointSlices of LLMDeployments"
    )
    discovery.add_argument(
        "--namespace", metavar="NAME", nargs="+", action="extend", help="only in these (default all)"
    )
    discovery.add_argument("--kubeconfig", metavar="FILE", help="instead of the pod's service account")
    proxy = parser.add_argument_group("requests")
    proxy.add_argument("--max-body-bytes", metavar="N", help="larger bodies are refused with 413 (default 16777216)")
    proxy.add_argument(
        "--hold-limit", metavar="N", help="requests per model that may wait for a replica (default 1000)"
    )
    proxy.add_argument("--hold-timeout", metavar="SECONDS", help="how long they wait before 503 (default 120)")
    proxy.add_argument("--max-attempts", metavar="N", help="replicas to try before the first byte (default 3)")
    life = parser.add_argument_group("life")
    life.add_argument("--drain-timeout", metavar="SECONDS", help="time to finish requests after SIGTERM (default 120)")
    life.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error (default info)")
    return parser


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    """About a flag that is none, and the one it was probably meant to be."""
    flags = [option for action in parser._actions for option in action.option_strings]
    near = get_close_matches(word.partition("=")[0], flags, n=1)
    return f"there is no option {word}" + (f"; did you mean {near[0]}?" if near else "")


class _Reader:
    """Reads one option after the other, from the flag or the environment, and collects what is wrong."""

    def __init__(self, args: argparse.Namespace, environ: Mapping[str, str]) -> None:
        self._args, self._environ = args, environ
        self.problems: list[str] = []

    def text(self, name: str) -> tuple[str, str | None]:
        """Where it was said, and what."""
        flag, variable = f"--{name.replace('_', '-')}", f"QUIRE_GATEWAY_{name.upper()}"
        given: str | None = getattr(self._args, name)
        return (flag, given) if given is not None else (variable, self._environ.get(variable))

    def read(self, name: str, convert: Callable[[str], T], default: T, what: str) -> T:
        where, text = self.text(name)
        if text is None:
            return default
        try:
            return convert(text)
        except ValueError:
            self.problems.append(f"{where}: must be {what}, got {text!r}")
            return default


def _source(args: argparse.Namespace, reader: _Reader) -> FileSource | KubernetesSource:
    _, file = reader.text("endpoints_file")
    _, kubeconfig = reader.text("kubeconfig")
    namespaces = tuple(args.namespace or ())
    if args.kubernetes == (file is not None):
        reader.problems.append("say where the replicas are: either --endpoints-file FILE or --kubernetes")
    if not args.kubernetes:
        for flag, given in (("--namespace", namespaces), ("--kubeconfig", kubeconfig)):
            if given:
                reader.problems.append(f"{flag} goes with --kubernetes only")
        return FileSource(path=Path(file or ""))
    if kubeconfig is not None and not Path(kubeconfig).is_file():
        reader.problems.append(f"--kubeconfig: there is no file {kubeconfig}")
    return KubernetesSource(namespaces=namespaces, kubeconfig=None if kubeconfig is None else Path(kubeconfig))


def _tls(reader: _Reader) -> TlsOptions | None:
    certfile = reader.read("ssl_certfile", _file, None, "a file that can be read")
    keyfile = reader.read("ssl_keyfile", _file, None, "a file that can be read")
    if certfile is None:
        if keyfile is not None:
            reader.problems.append("--ssl-keyfile goes with --ssl-certfile only")
        return None
    return TlsOptions(certfile=certfile, keyfile=keyfile)


def _file(text: str) -> Path:
    try:
        Path(text).read_bytes()
    except OSError as error:
        raise ValueError(text) from error
    return Path(text)


def _between(low: int, high: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    return convert


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 86_400:
        raise ValueError(text)
    return value


def _level(text: str) -> str:
    if text not in ("debug", "info", "warning", "error"):
        raise ValueError(text)
    return text
