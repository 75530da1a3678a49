"""Operators as processes that tests start, kill, pause and watch, and functions that poll the cluster."""

import http.client
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from kube_support.rights import grant

from quire_cluster.client import ApiClient
from quire_cluster.control_plane import ControlPlane

T = TypeVar("T")
POLL_SECONDS: Final = 0.05
PATIENCE: Final = 90.0
"""The wait for an event that is certain, long enough for a busy machine. Tests assert how soon events happen by their
order, not by a clock.
"""
_LAST_LINES: Final = 20
ZYGOTE: Final = Path(__file__).parent / "zygote.py"
CUSTOM: Final = frozenset({"llmdeployments", "llmadapters", "podmonitors", "prometheusrules", "leaderworkersets"})


def until(
    look: Callable[[], T],
    *,
    within: float = PATIENCE,
    every: float = POLL_SECONDS,
    why: Callable[[], object] = lambda: "",
) -> T:
    """Return the result of `look` as soon as it is true; fail with `why` after too long."""
    deadline = time.monotonic() + within
    while not (found := look()):
        assert time.monotonic() < deadline, f"not so after {within:g} s; last seen {found!r}; {why()}"
        time.sleep(every)
    return found


@dataclass(frozen=True, slots=True)
class OperatorProcess:
    """An operator. `identity` is its name in the Lease and in its User-Agent."""

    pid: int
    identity: str
    log: Path

    @property
    def is_alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        until(lambda: not self.is_alive)

    def terminate(self) -> None:
        self.send(signal.SIGTERM)

    def pause(self) -> None:
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        if self.is_alive:
            os.kill(self.pid, number)

    def lines(self) -> list[dict[str, Any]]:
        """Return its log lines."""
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def said(self, text: str) -> bool:
        """Return True if a line of its log has this text in its message."""
        return any(text in str(line.get("message", "")) for line in self.lines())

    def last_words(self) -> str:
        """Return whether it lives, and the end of its log, for the message of a failed wait."""
        told = [str(line.get("message", "")) for line in self.lines()][-_LAST_LINES:]
        return "\n".join([f"{self.identity} is {'alive' if self.is_alive else 'dead'}; it said last:", *told])

    def port(self) -> int:
        """Return the port of /healthz once it is served."""
        return int(until(lambda: self._served() or 0))

    def _served(self) -> str | None:
        found = (re.search(r"on port (\d+)", str(line.get("message", ""))) for line in self.lines())
        return next((match[1] for match in found if match), None)

    def health(self) -> tuple[int, str]:
        """Return the answer of /healthz."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port(), timeout=10)
        try:
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def writes(self) -> list[str]:
        """Return the writes that it was about to send, in order."""
        return [f"{line['verb']} {line['kind']}" for line in self.lines() if "write" in line]


class Operators:
    """A factory that forks operators from one zygote. Several threads may start some at once."""

    def __init__(self, folder: Path, *, zygote: Path = ZYGOTE) -> None:
        self._folder = folder
        self._zygote = subprocess.Popen(
            [sys.executable, str(zygote)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._zygote.stdout is not None and self._zygote.stdout.readline().strip() == "ready"
        self._started = itertools.count(1)
        self._asking = threading.Lock()

    def start(
        self,
        *argv: str,
        identity: str | None = None,
        before_write: int | str | None = None,
        then: signal.Signals = signal.SIGKILL,
        clock_skew_seconds: float = 0.0,
        tick_seconds: float | None = None,
        service_account: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> OperatorProcess:
        """Return an operator with these flags, on a free port.

        It sends itself the signal `then` before its n-th write, or before the first one such as "create Deployment".
        Its clock is wrong by `clock_skew_seconds`, its
        autoscaler ticks each `tick_seconds`. The folder `service_account` replaces that of a pod.
        """
        number = next(self._started)
        identity = identity or f"operator-{number}"
        log = self._folder / f"{number}-{identity}.log"
        period = () if tick_seconds is None else ("--autoscaling-period", f"{tick_seconds:g}s")
        flags = [*argv, *period, "--identity", identity, "--host", "127.0.0.1", "--port", "0"]
        order = {
            "argv": flags,
            "log": str(log),
            "before_write": before_write,
            "signal": then,
            "clock_skew_seconds": clock_skew_seconds,
            "service_account": None if service_account is None else str(service_account),
            "environment": environment or {},
        }
        return OperatorProcess(pid=self._ask(order), identity=identity, log=log)

    def _ask(self, order: dict[str, Any]) -> int:
        """Send one order and return its answer; a lock keeps answers of several threads apart."""
        assert self._zygote.stdin is not None and self._zygote.stdout is not None
        with self._asking:
            self._zygote.stdin.write(json.dumps(order) + "\n")
            self._zygote.stdin.flush()
            answer = json.loads(self._zygote.stdout.readline())
        assert answer["log"] == order["log"], "this is another one's process"
        return int(answer["pid"])

    def stop(self) -> None:
        with self._zygote:  # closes its input, which ends it and its children
            pass


class Namespace:
    """A namespace of the API server, with a test's ways to read and change it."""

    def __init__(self, server: ControlPlane, name: str) -> None:
        self.server, self.name = server, name
        self._client: ApiClient = server.client()
        self._granted: Path | None = None

    @property
    def kubeconfig(self) -> Path:
        """The operator's kubeconfig, with the chart's permissions in this namespace."""
        if self._granted is None:
            self._granted = grant(self.server, self.name)
        return self._granted

    def flags(self, kubeconfig: Path | None = None) -> tuple[str, ...]:
        """Return the flags of an operator that acts only here."""
        config = str(kubeconfig or self.kubeconfig)
        return ("--kubeconfig", config, "--namespace", self.name, "--watch-namespace", self.name)

    def path(self, kind: str, name: str = "") -> str:
        prefix = {
            "deployments": "/apis/apps/v1",
            "replicasets": "/apis/apps/v1",
            "controllerrevisions": "/apis/apps/v1",
            "poddisruptionbudgets": "/apis/policy/v1",
            "llmdeployments": "/apis/quire.dev/v1alpha1",
            "llmadapters": "/apis/quire.dev/v1alpha1",
            "leases": "/apis/coordination.k8s.io/v1",
            "networkpolicies": "/apis/networking.k8s.io/v1",
            "leaderworkersets": "/apis/leaderworkerset.x-k8s.io/v1",
            "podmonitors": "/apis/monitoring.coreos.com/v1",
            "prometheusrules": "/apis/monitoring.coreos.com/v1",
            "horizontalpodautoscalers": "/apis/autoscaling/v2",
            "endpointslices": "/apis/discovery.k8s.io/v1",
        }.get(kind, "/api/v1")
        return f"{prefix}/namespaces/{self.name}/{kind}" + (f"/{name}" if name else "")

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        answer = self._client.get(self.path(kind, name))
        assert answer.status in (200, 404), answer.body
        return answer.body if answer.ok else None

    def names(self, kind: str) -> list[str]:
        answer = self._client.get(self.path(kind))
        assert answer.ok, answer.body
        return sorted(item["metadata"]["name"] for item in answer.body["items"])

    def items(self, kind: str) -> list[dict[str, Any]]:
        answer = self._client.get(self.path(kind))
        assert answer.ok, answer.body
        return list(answer.body["items"])

    def create(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._client.post(self.path(kind), body)
        assert answer.ok, answer.body
        return dict(answer.body)

    def patch(self, kind: str, name: str, body: Any, *, manager: str = "another-client") -> dict[str, Any]:
        """Send a strategic merge patch (a merge patch for custom resources) as another field manager."""
        flavour = "merge" if kind in CUSTOM else "strategic-merge"
        path, _, subresource = name.partition("/")
        where = self.path(kind, path) + (f"/{subresource}" if subresource else "")
        answer = self._client.request(
            "PATCH", f"{where}?fieldManager={manager}", body, content_type=f"application/{flavour}-patch+json"
        )
        assert answer.ok, answer.body
        return dict(answer.body)

    def delete(self, kind: str, name: str, *, may_be_gone: bool = False) -> None:
        answer = self._client.delete(self.path(kind, name))
        assert answer.ok or (may_be_gone and answer.status == 404), answer.body

    def apply(self, name: str = "chat", **spec: Any) -> None:
        """Apply an LLMDeployment as kubectl does."""
        self._apply("LLMDeployment", name, {"model": {"source": "file:///models/demo"}} | spec)

    def apply_adapter(self, name: str, deployment: str = "chat", **spec: Any) -> None:
        """Apply an LLMAdapter as kubectl does."""
        self._apply("LLMAdapter", name, {"deploymentRef": {"name": deployment}, "source": "file:///a"} | spec)

    def _apply(self, kind: str, name: str, spec: Mapping[str, Any]) -> None:
        body = {
            "apiVersion": "quire.dev/v1alpha1",
            "kind": kind,
            "metadata": {"name": name, "namespace": self.name},
            "spec": dict(spec),
        }
        answer = self._client.request(
            "PATCH",
            f"{self.path(f'{kind.lower()}s', name)}?fieldManager=kubectl&force=true",
            body,
            content_type="application/apply-patch+yaml",
        )
        assert answer.ok, answer.body

    def run_pods(self, name: str, *, address: str = "10.0.0.1") -> list[str]:
        """Write the status of running pods, because there is no kubelet. Return their names."""
        state = {"name": "engine", "ready": True, "restartCount": 0, "image": "x", "imageID": ""}
        state["state"] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        conditions = [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")]
        status = {"phase": "Running", "podIP": address, "containerStatuses": [state], "conditions": conditions}
        return [pod for pod in self.pods(name) if self.write_pod_status(pod, status)]

    def write_pod_status(self, pod: str, status: Mapping[str, Any]) -> bool:
        """Return True if the pod still existed: controllers replace pods at any moment."""
        where = f"{self.path('pods', pod)}/status?fieldManager=another-client"
        answer = self._client.request(
            "PATCH", where, {"status": status}, content_type="application/strategic-merge-patch+json"
        )
        assert answer.ok or answer.status == 404, answer.body
        return answer.ok

    def pods(self, name: str) -> list[str]:
        """Return the pods that are not being deleted."""
        return [
            pod["metadata"]["name"]
            for pod in self.items("pods")
            if pod["metadata"].get("labels", {}).get("quire.dev/llmdeployment") == name
            and "deletionTimestamp" not in pod["metadata"]
        ]

    def touch(self, name: str, value: str) -> None:
        """Change something that requires nothing, so that the operator reconciles."""
        self.patch("llmdeployments", name, {"metadata": {"labels": {"touched": value}}})

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """Return a condition; empty while it does not exist."""
        resource = self.get("llmdeployments", name) or {}
        conditions = resource.get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {})

    def wait_reason(self, name: str, kind: str, reason: str, *, within: float = PATIENCE) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            condition = self.condition(name, kind)
            return condition if condition.get("reason") == reason else None

        return until(found, within=within, why=lambda: self.condition(name, kind))

    def wait_settled(self, name: str, *, within: float = PATIENCE) -> None:
        """Wait until the children exist, their controller has observed them, and status reports it."""

        def settled() -> bool:
            resource, deployment = self.get("llmdeployments", name), self.get("deployments", name)
            if resource is None or deployment is None:
                return False
            status = resource.get("status", {})
            asked = deployment["spec"]["replicas"]
            return bool(
                status.get("observedGeneration") == resource["metadata"]["generation"]
                and deployment["status"].get("observedGeneration") == deployment["metadata"]["generation"]
                and status.get("replicas", 0) == asked == status.get("desiredReplicas")
            )

        until(settled, within=within, why=lambda: self.get("llmdeployments", name))

    def holder(self) -> str:
        lease = self.get("leases", "quire-operator")
        return "" if lease is None else lease["spec"].get("holderIdentity") or ""

    def wait_holder(self, identity: str, *, within: float = PATIENCE) -> None:
        until(lambda: self.holder() == identity, within=within, why=self.holder)
