"""The controller of LeaderWorkerSets with its kinds and webhooks, as a process next to a control plane.

In a cluster it runs as a pod that makes its own certificates. Here it gets one of the control plane's authority, and
the API server calls its webhooks on loopback.
"""

import base64
import json
import shutil
from pathlib import Path
from typing import Any, Final

from quire_cluster.control_plane import READY_SECONDS, ControlPlane
from quire_cluster.crds import wait_established
from quire_cluster.ports import free_ports
from quire_cluster.processes import Process

PROGRAMS: Final = ("lws",)
KINDS: Final = ("leaderworkersets.leaderworkerset.x-k8s.io", "disaggregatedsets.disaggregatedset.x-k8s.io")
_WEBHOOKS: Final = "quire-test-lws"
_OF_GROUPS: Final = {"matchExpressions": [{"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}]}
_GROUP_PATH: Final = "leaderworkerset-x-k8s-io-v1-leaderworkerset"


class GroupController:
    """The controller of one control plane, which ends with it."""

    def __init__(self, control_plane: ControlPlane, program: Path) -> None:
        """``program`` is the controller; the definitions of its kinds are next to it."""
        self._control_plane, self._program = control_plane, program
        self._folder = control_plane.state / "lws"
        self._webhook_port, self._health_port = free_ports(2)
        environment = [f"KUBECONFIG={control_plane.admin_kubeconfig}"]
        arguments = [f"--config={self._folder / 'config.json'}", "--zap-log-level=info"]
        self.process = Process(
            "lws", lambda: ["/usr/bin/env", *environment, str(program), *arguments], control_plane.state
        )

    def install(self) -> None:
        """Add the webhooks and kinds, and start the controller; return when it works.

        The webhooks come first, as in its own manifests: a set that is created without them has pods without labels.
        """
        self.process.kill()  # of an earlier run that was killed
        self._configure()
        for configuration in self._webhooks():
            self._control_plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(configuration))
        for file in sorted(self._program.parent.glob("*.yaml")):
            self._control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(file))
        wait_established(self._control_plane.client(), *KINDS)
        self.process.start()
        self.process.wait_until(self._works, timeout_seconds=READY_SECONDS)

    def uninstall(self) -> None:
        """Stop the controller and remove its kinds with all objects."""
        try:
            for kind in ("mutatingwebhookconfiguration", "validatingwebhookconfiguration"):
                self._control_plane.kubectl("delete", kind, _WEBHOOKS, "--ignore-not-found")
            self._control_plane.kubectl("delete", "crd", *KINDS, "--ignore-not-found", "--timeout=90s")
        finally:
            self.process.kill()

    def _configure(self) -> None:
        pair = self._control_plane.identity("lws-webhook", subject="/CN=lws-webhook", addresses=["127.0.0.1"])
        self._folder.mkdir(exist_ok=True)
        shutil.copyfile(pair.certificate, self._folder / "tls.crt")
        shutil.copyfile(pair.key, self._folder / "tls.key")
        configuration = {
            "apiVersion": "config.lws.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": f"127.0.0.1:{self._health_port}"},
            "webhook": {"host": "127.0.0.1", "port": self._webhook_port, "certDir": str(self._folder)},
        }
        (self._folder / "config.json").write_text(json.dumps(configuration))

    def _works(self) -> bool:
        """Return True if it serves its webhooks and its controllers have started."""
        log = self.process.log_path.read_text() if self.process.log_path.exists() else ""
        return "Serving webhook server" in log and log.count("Starting workers") >= 2

    def _webhooks(self) -> list[dict[str, Any]]:
        groups = {"apiGroups": ["leaderworkerset.x-k8s.io"], "resources": ["leaderworkersets"]}
        pods = {"apiGroups": [""], "resources": ["pods"]}
        change, make = ["CREATE", "UPDATE"], ["CREATE"]
        mutating = [
            self._hook("mleaderworkerset.kb.io", f"mutate-{_GROUP_PATH}", groups, change),
            {**self._hook("mpod.kb.io", "mutate--v1-pod", pods, make), "objectSelector": _OF_GROUPS},
        ]
        validating = [self._hook("vleaderworkerset.kb.io", f"validate-{_GROUP_PATH}", groups, change)]
        return [
            {
                "apiVersion": "admissionregistration.k8s.io/v1",
                "kind": f"{kind}WebhookConfiguration",
                "metadata": {"name": _WEBHOOKS},
                "webhooks": hooks,
            }
            for kind, hooks in (("Mutating", mutating), ("Validating", validating))
        ]

    def _hook(self, name: str, path: str, objects: dict[str, list[str]], operations: list[str]) -> dict[str, Any]:
        authority = self._control_plane.server.authority.read_bytes()
        return {
            "name": name,
            "admissionReviewVersions": ["v1"],
            "clientConfig": {
                "url": f"https://127.0.0.1:{self._webhook_port}/{path}",
                "caBundle": base64.b64encode(authority).decode(),
            },
            "failurePolicy": "Fail",
            "sideEffects": "None",
            "rules": [{**objects, "apiVersions": ["v1"], "operations": operations}],
        }
