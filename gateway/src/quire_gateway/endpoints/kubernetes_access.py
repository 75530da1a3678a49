"""The connection to the API server: from inside a pod, or by a kubeconfig.

A watch needs an address, a certificate authority, and a token or client certificate. The gateway makes two kinds of GET
requests, which do not justify a Kubernetes client library.
"""

import base64
import os
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import yaml

from quire_common.errors import ConfigurationError
from quire_common.names import url_host

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The address of the API server and the credentials for it."""

    url: str
    tls: ssl.SSLContext | None
    """None for plain http."""
    token: str | None = None
    token_file: Path | None = None
    """Read again for every request, because the kubelet renews it."""

    def headers(self) -> dict[str, str]:
        """Return the headers that authenticate a request."""
        token = self.token_file.read_text().strip() if self.token_file is not None else self.token
        return {"Authorization": f"Bearer {token}"} if token else {}

    def session(self) -> aiohttp.ClientSession:
        """Return a session to the API server, which the caller closes."""
        connector = aiohttp.TCPConnector(ssl=True if self.tls is None else self.tls)
        return aiohttp.ClientSession(connector=connector, trust_env=False)


def access_of(kubeconfig: Path | None) -> Access:
    """Return the access to the API server, or raise ``ConfigurationError``."""
    return in_cluster(os.environ, _SERVICE_ACCOUNT) if kubeconfig is None else from_kubeconfig(kubeconfig)


def in_cluster(environ: Mapping[str, str], folder: Path) -> Access:
    """Return the access of a pod with a service account."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port or not (folder / "token").is_file():
        raise ConfigurationError(
            "--kubernetes: this is not a pod with a service account "
            f"(no KUBERNETES_SERVICE_HOST, or no token in {folder}); outside a cluster add --kubeconfig FILE"
        )
    try:
        tls = ssl.create_default_context(cafile=folder / "ca.crt")
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"--kubernetes: {folder / 'ca.crt'} cannot be read: {error}") from error
    return Access(url=f"https://{url_host(host)}:{port}", tls=tls, token_file=folder / "token")


def from_kubeconfig(path: Path) -> Access:
    """Return the access of a kubeconfig's current context."""
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--kubeconfig: {path} cannot be read: {error}") from error
    try:
        return _current_context(document, path.parent)
    except _Incomplete as error:
        raise ConfigurationError(f"--kubeconfig: {path}: {error}") from error
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigurationError(f"--kubeconfig: {path}: its certificates cannot be read: {error}") from error


class _Incomplete(Exception):
    """A kubeconfig that lacks something."""


def _current_context(document: object, folder: Path) -> Access:
    root = _mapping(document, "the file")
    context = _named(root, "contexts", root.get("current-context"), "context")
    cluster = _named(root, "clusters", context.get("cluster"), "cluster")
    user = _named(root, "users", context.get("user"), "user")
    if "exec" in user or "auth-provider" in user:
        raise _Incomplete(
            "its user gets credentials from a command (exec or auth-provider); the gateway supports tokens and "
            "client certificates only: use the token of a service account"
        )
    url = str(cluster.get("server", "")).rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise _Incomplete(f"cluster {context.get('cluster')!r} has no server address")
    token_file = user.get("tokenFile")
    return Access(
        url=url,
        tls=_tls(cluster, user, folder) if url.startswith("https://") else None,
        token=None if user.get("token") is None else str(user["token"]),
        token_file=None if token_file is None else folder / str(token_file),
    )


def _tls(cluster: Mapping[str, object], user: Mapping[str, object], folder: Path) -> ssl.SSLContext:
    authority = _pem(cluster, "certificate-authority", folder)
    tls = ssl.create_default_context(cadata=None if authority is None else authority.decode())
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    certificate, key = _pem(user, "client-certificate", folder), _pem(user, "client-key", folder)
    if certificate is not None and key is not None:
        # The ssl module reads a client certificate from files only.
        with tempfile.TemporaryDirectory() as private:
            pair = Path(private) / "pair.pem"
            pair.touch(mode=0o600)
            pair.write_bytes(certificate + b"\n" + key)
            tls.load_cert_chain(pair)
    return tls


def _pem(section: Mapping[str, object], key: str, folder: Path) -> bytes | None:
    """Return a certificate or key, which is in the kubeconfig itself or in a file next to it."""
    data, file = section.get(f"{key}-data"), section.get(key)
    if data is not None:
        return base64.b64decode(str(data), validate=True)
    return None if file is None else (folder / str(file)).read_bytes()


def _named(root: Mapping[str, object], group: str, name: object, kind: str) -> Mapping[str, object]:
    entries = root.get(group)
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("name") == name and name is not None:
            return _mapping(entry.get(kind), f"{kind} {name!r}")
    raise _Incomplete(f"there is no {kind} {name!r}" if name else f"no {kind} is selected")


def _mapping(value: object, what: str) -> Mapping[str, object]:
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    raise _Incomplete(f"{what} is not a mapping")
