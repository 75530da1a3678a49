"""The release of the chart under test, the notes of helm, and the metrics pages of its pods."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from e2e_support import objects
from e2e_support.errors import ApiError, TargetUnavailable
from e2e_support.kube import JSON, Kube, namespaced
from e2e_support.manifests import merged
from e2e_support.objects import Pod
from e2e_support.waiting import Stopwatch, until
from quire_cluster.helm import Helm


def commands_of(notes: str) -> list[str]:
    """Return the commands: lines indented by five spaces, joined with their continuation lines."""
    found: list[str] = []
    is_open = False
    for line in notes.splitlines():
        typed = line.removeprefix("     ")
        if typed == line:
            is_open = False
            continue
        if is_open:
            found[-1] += f"\n{typed}"
        elif typed.startswith(("kubectl", "curl")):
            found.append(typed)
        is_open = bool(found) and (typed.endswith("\\") or ("<<'YAML'" in found[-1] and typed != "YAML"))
    return found


class Page:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def values(self, name: str, /, **labels: str) -> list[float]:
        """Return the values of all series with this name (counters with _total) and these labels."""
        return [
            float(sample.value)
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def total(self, name: str, /, **labels: str) -> float:
        """Return the sum of the values, or 0."""
        return sum(self.values(name, **labels))


NAMESPACE: Final = "quire-system"
NAME: Final = "quire"
OPERATOR_PORT: Final = 8080
GATEWAY_PORT: Final = 8000
WORKING_SECONDS: Final = 240.0
LEADER_SECONDS: Final = 60.0
_LABEL: Final = "e2e=true"


class Release:
    """The installed release; `values` are its latest values."""

    def __init__(self, kube: Kube, helm: Helm, values: Mapping[str, Any]) -> None:
        self.kube, self.namespace, self.values = kube, NAMESPACE, dict(values)
        self._helm = helm
        self.installed_in: float | None = None
        """The duration of the last installation in seconds, or None if the release existed before."""

    def found(self) -> bool:
        """Return True if an earlier run left the release. Raise ``TargetUnavailable`` if it belongs to a user."""
        listed = json.loads(self._helm.run("list", "--namespace", NAMESPACE, "--output", "json"))
        if NAME not in (release["name"] for release in listed):
            return False
        ours = self._helm.run("list", "--namespace", NAMESPACE, "--selector", _LABEL, "--output", "json")
        if not json.loads(ours):
            raise TargetUnavailable(
                f"the cluster has a release {NAME} in {NAMESPACE} that these tests did not install, and they would "
                f"change it. Uninstall it first (helm uninstall {NAME} --namespace {NAMESPACE}), or take another."
            )
        return True

    def install(self) -> float:
        """Install as in the README. Return the seconds until an operator leads and the gateway is ready."""
        watch = Stopwatch()
        self._helm.on_chart(
            "install",
            NAME,
            f"--namespace={NAMESPACE}",
            "--create-namespace",
            f"--labels={_LABEL}",
            values=self.values,
        )
        self.wait_working()
        self.installed_in = watch.seconds
        return self.installed_in

    def upgrade(self, changes: Mapping[str, Any] | None = None) -> None:
        """Upgrade to the chart of this checkout, with these values in addition to the existing ones."""
        self.values = merged(self.values, changes or {})
        self._helm.on_chart("upgrade", NAME, f"--namespace={NAMESPACE}", f"--labels={_LABEL}", values=self.values)

    def rollback(self) -> None:
        """Roll back to the state before the last upgrade."""
        self._helm.run("rollback", NAME, f"--namespace={NAMESPACE}")
        self.values = json.loads(self._helm.run("get", "values", NAME, f"--namespace={NAMESPACE}", "--output", "json"))

    def uninstall(self) -> None:
        self._helm.run("uninstall", NAME, f"--namespace={NAMESPACE}")

    def notes(self) -> str:
        """Return the notes that helm prints after an installation."""
        return self._helm.run("get", "notes", NAME, f"--namespace={NAMESPACE}")

    def wait_working(self, *, seconds: float = WORKING_SECONDS) -> None:
        """Wait until an operator leads and exactly the pods of the newest revision exist and are ready."""
        until(self._works, what="operator and gateway work", seconds=seconds, explain=self._explain)

    def operator_pods(self) -> list[Pod]:
        return self._pods("operator")

    def gateway_pods(self) -> list[Pod]:
        return self._pods("gateway")

    def leader(self) -> Pod | None:
        """Return the leading operator by its Lease, or None."""
        lease = self.kube.find(
            namespaced(NAMESPACE, "leases", f"{NAME}-operator", group="/apis/coordination.k8s.io/v1")
        )
        holder = (lease or {}).get("spec", {}).get("holderIdentity") or ""
        return next((pod for pod in self.operator_pods() if f"{pod.name}_{pod.uid}" == holder), None)

    def wait_leader(self, *, after: Pod | None = None, seconds: float = LEADER_SECONDS) -> Pod:
        """Return the leading operator when there is one, which must be another one than `after`."""

        def look() -> Pod | None:
            leader = self.leader()
            return None if leader is None or after is not None and leader.uid == after.uid else leader

        what = "an operator leads" if after is None else f"another operator than {after.name} leads"
        return until(look, what=what, seconds=seconds, explain=self._explain)

    def operator_metrics(self) -> Page:
        """Return the metrics of the leading operator."""
        return self.page(self.wait_leader(), OPERATOR_PORT)

    def gateway_metrics(self) -> list[Page]:
        """Return the metrics of each ready gateway."""
        return [self.page(pod, GATEWAY_PORT) for pod in self.gateway_pods() if pod.is_serving]

    def page(self, pod: Pod, port: int, path: str = "/metrics") -> Page:
        """Return a scrape of any pod through the API server."""
        return Page(self.kube.text(f"{namespaced(pod.namespace, 'pods', pod.name)}:{port}/proxy{path}"))

    def operator_log(self, lines: int = 12, *, since: datetime | None = None) -> list[str]:
        """Return the last lines of each operator's log since then, with the leader's log last."""
        leader = self.leader()
        pods = sorted(self.operator_pods(), key=lambda pod: leader is not None and pod.uid == leader.uid)
        return [f"{pod.name}: {line}" for pod in pods for line in self._log(pod, lines, since)]

    def _log(self, pod: Pod, lines: int, since: datetime | None) -> list[str]:
        wanted = {"tailLines": str(lines)} | ({} if since is None else {"sinceTime": since.isoformat()})
        try:
            return self.kube.text(f"{namespaced(NAMESPACE, 'pods', pod.name)}/log", **wanted).splitlines()
        except ApiError as error:
            return [f"(no log: {error})"]

    def _pods(self, component: str) -> list[Pod]:
        selector = f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component={component}"
        return [objects.pod(body) for body in self.kube.items(namespaced(NAMESPACE, "pods"), selector=selector)]

    def _works(self) -> bool:
        path = namespaced(NAMESPACE, "deployments", group="/apis/apps/v1")
        deployments = self.kube.items(path, selector=f"app.kubernetes.io/instance={NAME}")
        leader = self.leader()
        return bool(deployments) and all(map(_is_rolled_out, deployments)) and leader is not None and leader.is_serving

    def _explain(self) -> str:
        pods = [*self.operator_pods(), *self.gateway_pods()]
        lines = [f"{pod.name}: {pod.phase}, ready={pod.is_ready}; {'; '.join(pod.states)}" for pod in pods]
        return "\n".join([*self.operator_log(), *(lines or [f"no pods in {NAMESPACE}"])])


def _is_rolled_out(deployment: JSON) -> bool:
    status, wanted = deployment.get("status", {}), deployment["spec"]["replicas"]
    is_seen = status.get("observedGeneration") == deployment["metadata"]["generation"]
    counts = (status.get(name, 0) for name in ("replicas", "updatedReplicas", "readyReplicas"))
    return is_seen and all(count == wanted for count in counts)
