"""A release of the chart, with operator and gateway as local processes with their pods' arguments and permissions."""

import os
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from quire_cluster.audit import Position
from quire_cluster.control_plane import ControlPlane
from quire_cluster.helm import Helm
from quire_cluster.ports import free_ports


class Installation:
    """A release and its processes on this machine."""

    def __init__(self, helm: Helm, server: ControlPlane, values: dict[str, Any], namespace: str, logs: Path) -> None:
        self.helm, self.server, self.values, self.namespace, self._logs = helm, server, values, namespace, logs
        self.name = f"quire-{uuid.uuid4().hex[:6]}"
        self._running, self.uid = ExitStack(), uuid.uuid4()
        self.install_flags: tuple[str, ...] = ()

    def __enter__(self) -> "Installation":
        self.helm.on_chart(
            "install", self.name, f"--namespace={self.namespace}", *self.install_flags, values=self.values
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()
        self.helm.run("uninstall", self.name, f"--namespace={self.namespace}")

    def upgrade(self, values: dict[str, Any]) -> None:
        self.values = values
        self.helm.on_chart("upgrade", self.name, f"--namespace={self.namespace}", values=values)

    def account(self, component: str) -> str:
        return f"system:serviceaccount:{self.namespace}:{self.name}-{component}"

    def container(self, component: str) -> dict[str, Any]:
        documents = self.helm.template(self.values, release=self.name, namespace=self.namespace)
        name = f"{self.name}-{component}"
        (deployment,) = [d for d in documents if d["kind"] == "Deployment" and d["metadata"]["name"] == name]
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert isinstance(container, dict)
        return container

    def run(self, component: str) -> str:
        """Start the component until the release is removed, and return its address."""
        return self._running.enter_context(self.running(component))

    @contextmanager
    def running(self, component: str) -> Iterator[str]:
        """Yield its address while it runs. It ends like a killed process."""
        (port,) = free_ports(1)
        kubeconfig = self.server.service_account_kubeconfig(self.namespace, f"{self.name}-{component}")
        command = [
            *(sys.executable, "-m", f"quire_{component}"),
            *self.container(component)["args"],
            *("--kubeconfig", str(kubeconfig), "--host", "127.0.0.1", "--port", str(port)),
        ]
        with (self._logs / f"{component}.log").open("w") as log:
            process = subprocess.Popen(command, env=os.environ | self._environment(component), stdout=log, stderr=log)
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                process.kill()
                process.wait()

    def _environment(self, component: str) -> dict[str, str]:
        """Return the environment that the kubelet creates for a pod, which a restart of its container keeps."""
        fields = {"metadata.name": f"{self.name}-{component}-0", "metadata.uid": str(self.uid)}
        environment: dict[str, str] = {}
        for variable in self.container(component).get("env", []):
            source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            value = variable["value"] if source is None else fields[source]
            for name, known in environment.items():
                value = value.replace(f"$({name})", known)
            environment[variable["name"]] = value
        return environment

    def probes_pass(self, component: str, address: str) -> bool:
        probes = [value for key, value in self.container(component).items() if key.endswith("Probe")]
        assert len(probes) == 3
        return all(get(address + probe["httpGet"]["path"]) is not None for probe in probes)

    def log(self, component: str) -> str:
        return (self._logs / f"{component}.log").read_text()

    def refused(self, component: str, since: Position) -> list[str]:
        asked = self.server.audit.requests(since, user=self.account(component))
        assert asked
        return [str(request) for request in asked if request.status == 403]


def get(url: str) -> bytes | None:
    """Return the body, or None for any status except 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            content: bytes = answer.read()
            return content
    except (urllib.error.URLError, ConnectionError):
        return None
