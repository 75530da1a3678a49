"""A cluster's API as JSON, and kubectl, for everything that scenarios read and write.

It uses the official Kubernetes client, which supports every kubeconfig (certificates, tokens, login programs of
clouds). It knows paths and objects but nothing of quire. It can be used from several threads.
"""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import urllib3
from kubernetes.client import ApiClient, Configuration
from kubernetes.config import load_kube_config
from kubernetes.config.config_exception import ConfigException

from e2e_support.errors import ApiError, CommandFailed, NotFound, TargetUnavailable
from quire_cluster.tls import ClosedIfLost

JSON = dict[str, Any]
CALL_SECONDS: Final = 45.0
KUBECTL_SECONDS: Final = 240.0
MERGE: Final = "application/merge-patch+json"
LLMDEPLOYMENTS: Final = "/apis/quire.dev/v1alpha1"


class Kube:
    """One cluster as seen by one user."""

    def __init__(self, kubeconfig: str, kubectl: Path) -> None:
        self.kubeconfig, self._kubectl = kubeconfig, kubectl
        settings = Configuration()
        try:
            load_kube_config(kubeconfig, client_configuration=settings)  # type: ignore[no-untyped-call]
        except (ConfigException, OSError, ValueError) as error:
            raise TargetUnavailable(f"{kubeconfig} leads to no cluster: {error}") from error
        settings.retries = False  # an API server that is away is something to see, not to wait for
        self._client = ApiClient(settings)
        tls = urllib3.util.ssl_.create_urllib3_context()
        tls.sslsocket_class = ClosedIfLost
        self._client.rest_client.pool_manager.connection_pool_kw["ssl_context"] = tls
        self.server: str = settings.host

    def get(self, path: str, **query: str) -> JSON:
        return _parsed(self._call("GET", path, query=query))

    def find(self, path: str) -> JSON | None:
        """Return the object, or None."""
        try:
            return self.get(path)
        except NotFound:
            return None

    def items(self, path: str, *, selector: str = "") -> list[JSON]:
        """Return the items of a list that match the label selector."""
        listed = self.get(path, **({"labelSelector": selector} if selector else {}))
        found: list[JSON] = listed["items"]
        return found

    def create(self, path: str, body: Mapping[str, Any]) -> JSON:
        return _parsed(self._call("POST", path, body=body))

    def patch(self, path: str, body: Mapping[str, Any]) -> JSON:
        """Apply a merge patch: null removes a field."""
        return _parsed(self._call("PATCH", path, body=body, content_type=MERGE))

    def delete(self, path: str, *, grace_seconds: int | None = None) -> None:
        """Delete in the background. Do nothing if the object is already gone."""
        options: JSON = {"propagationPolicy": "Background"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        try:
            self._call("DELETE", path, body=options)
        except NotFound:
            return

    def text(self, path: str, **query: str) -> str:
        """Return a log, or the answer of a pod or Service through the API server's proxy."""
        return self._call("GET", path, query=query).decode(errors="replace")

    def kubectl(self, *arguments: str, stdin: str = "", seconds: float = KUBECTL_SECONDS) -> str:
        """Return the output of kubectl."""
        return self.output([str(self._kubectl), *arguments], stdin=stdin, seconds=seconds)

    def output(self, command: Sequence[str], *, stdin: str = "", seconds: float = KUBECTL_SECONDS) -> str:
        """Return the output of a program like those of ``run``, which must succeed."""
        done = self.run(command, stdin=stdin, seconds=seconds)
        if done.returncode != 0:
            raise CommandFailed(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def run(
        self, command: Sequence[str], *, stdin: str = "", seconds: float = KUBECTL_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run a program with kubectl on its PATH and this cluster in its kubeconfig."""
        try:
            return subprocess.run(
                command, input=stdin, env=self.environment(), capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired as error:
            raise CommandFailed(f"{' '.join(command)}: did not end within {seconds:g} s") from error

    def script(self, text: str, *, seconds: float) -> str:
        """Return the output of a bash script. None of its processes outlives its time."""
        with subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment(),
            text=True,
            process_group=0,
        ) as bash:
            try:
                output, said = bash.communicate(timeout=seconds)
            except subprocess.TimeoutExpired as error:
                raise CommandFailed(f"did not end within {seconds:g} s:\n{text}") from error
            finally:
                if bash.returncode is None:
                    os.killpg(bash.pid, signal.SIGKILL)
        if bash.returncode != 0:
            raise CommandFailed(f"{text}\n{output}\n{said}")
        return output

    def environment(self) -> dict[str, str]:
        path = f"{self._kubectl.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return os.environ | {"KUBECONFIG": self.kubeconfig, "PATH": path}

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        headers = {"Accept": "application/json, */*", "Content-Type": content_type}
        request = self._client.param_serialize(
            method, path, query_params=list((query or {}).items()), header_params=headers,
            body=None if body is None else dict(body), auth_settings=["BearerToken"],
        )  # fmt: skip
        verb, url, sent, content, _ = request
        encoded = None if content is None else json.dumps(content)
        try:
            pool = self._client.rest_client.pool_manager
            answer = pool.request(verb, url, headers=sent, body=encoded, timeout=urllib3.Timeout(CALL_SECONDS))
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(f"{method} {path}: no answer from {self.server}: {error}", status=None) from error
        if answer.status >= 400:
            kind = NotFound if answer.status == 404 else ApiError
            raise kind(f"{method} {path}: {answer.status}: {_message(answer.data)}", status=answer.status)
        content_bytes: bytes = answer.data
        return content_bytes


def namespaced(namespace: str, resource: str, name: str = "", *, group: str = "/api/v1") -> str:
    """Return the path of one object, or of all objects."""
    path = f"{group}/namespaces/{namespace}/{resource}"
    return f"{path}/{quote(name, safe='')}" if name else path


def _parsed(content: bytes) -> JSON:
    parsed: JSON = json.loads(content)
    return parsed


def _message(content: bytes) -> str:
    """Return the message of a Status, or the text itself."""
    try:
        said = json.loads(content)
    except ValueError:
        return content[:500].decode(errors="replace")
    return str(said.get("message", said)) if isinstance(said, dict) else str(said)
