"""Kubeconfig files: address, CA and identity. Written as JSON, which every YAML parser accepts."""

import json
from dataclasses import dataclass
from pathlib import Path

from quire_cluster.certificates import KeyPair


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    url: str
    authority: Path


def with_certificate(server: Server, pair: KeyPair) -> str:
    return _kubeconfig(server, {"client-certificate": str(pair.certificate), "client-key": str(pair.key)})


def with_token(server: Server, token: str) -> str:
    return _kubeconfig(server, {"token": token})


def write(path: Path, kubeconfig: str) -> Path:
    """Write the file, readable only by its owner."""
    path.touch(mode=0o600)
    path.write_text(kubeconfig)
    return path


def _kubeconfig(server: Server, user: dict[str, str]) -> str:
    cluster = {"server": server.url, "certificate-authority": str(server.authority)}
    context = {"cluster": "quire-test", "user": "user", "namespace": "default"}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "quire-test", "cluster": cluster}],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "quire-test", "context": context}],
        "current-context": "quire-test",
    }
    return json.dumps(document, indent=2) + "\n"
