"""Disturbances of an operator: its token expires, and the history that its watches request is removed."""

import json
import urllib.request
from pathlib import Path

from kube_support.operators import Namespace

from quire_cluster.control_plane import ControlPlane


class Account:
    """A ServiceAccount's folder as the kubelet mounts it; each token is bound to its own Secret."""

    def __init__(self, space: Namespace, folder: Path) -> None:
        self._space, self.folder, self._count = space, folder, 0
        folder.mkdir()
        (folder / "ca.crt").write_bytes(space.server.server.authority.read_bytes())
        (folder / "namespace").write_text(space.name)

    def renew(self) -> None:
        """Replace the file at once, as the kubelet does."""
        self._count += 1
        secret = self._space.create("secrets", {"metadata": {"name": f"token-{self._count}"}})
        reference = {
            "kind": "Secret",
            "apiVersion": "v1",
            "name": f"token-{self._count}",
            "uid": secret["metadata"]["uid"],
        }
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"boundObjectRef": reference},
        }
        path = self._space.path("serviceaccounts", "quire-operator/token")
        answer = self._space.server.client().post(path, request)
        assert answer.ok, answer.body
        fresh = self.folder / "token.new"
        fresh.write_text(answer.body["status"]["token"])
        fresh.replace(self.folder / "token")

    def revoke(self) -> None:
        self._space.delete("secrets", f"token-{self._count}")


def compact(server: ControlPlane) -> None:
    """Remove all of etcd's history up to now."""
    ports = json.loads((server.state / "ports.json").read_text())

    def call(path: str, body: dict[str, str]) -> dict[str, dict[str, str]]:
        url = f"http://127.0.0.1:{ports['etcd']}/v3/{path}"
        with urllib.request.urlopen(urllib.request.Request(url, data=json.dumps(body).encode()), timeout=10) as answer:
            result: dict[str, dict[str, str]] = json.loads(answer.read())
            return result

    revision = call("kv/range", {"key": "AA=="})["header"]["revision"]
    call("kv/compaction", {"revision": revision})
