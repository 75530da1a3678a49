"""Evidence of a failed scenario: logs, events and objects in a separate folder.

Errors of the cluster are ignored, because a failed scenario often leaves one that answers only in part.
"""

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from e2e_support.errors import E2EError
from e2e_support.kube import Kube, namespaced
from e2e_support.release import NAMESPACE
from e2e_support.target import Target

LOG_LINES: Final = "2000"
MACHINE_LOG_BYTES: Final = 400_000


def collect(target: Target, folder: Path, *, namespaces: list[str], failure: str) -> None:
    """Collect the evidence of the release's namespace and the given ones, and the logs of our own machine."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "failure.txt").write_text(failure)
    kube = target.kube
    _keep(folder / "nodes.txt", lambda: kube.kubectl("get", "nodes", "-o", "wide") + kube.kubectl("describe", "nodes"))
    for namespace in dict.fromkeys([NAMESPACE, *namespaces]):
        into = folder / namespace
        into.mkdir(exist_ok=True)
        _objects(kube, namespace, into)
        _logs(kube, namespace, into)
    if target.machine is not None:
        for process in target.machine.processes:
            _keep(folder / "machine" / process.log_path.name, partial(_tail, process.log_path))


def _objects(kube: Kube, namespace: str, folder: Path) -> None:
    def kubectl(*arguments: str) -> str:
        return kube.kubectl("--namespace", namespace, *arguments, seconds=30)

    kinds = "llmd,deployments,replicasets,pods,services,endpointslices,poddisruptionbudgets,networkpolicies"
    _keep(folder / "objects.txt", lambda: kubectl("get", kinds, "-o", "wide"))
    _keep(folder / "llmdeployments.yaml", lambda: kubectl("get", "llmd", "-o", "yaml"))
    _keep(folder / "pods.txt", lambda: kubectl("describe", "pods"))
    _keep(folder / "events.txt", lambda: kubectl("get", "events", "--sort-by=.lastTimestamp", "-o", "wide"))


def _logs(kube: Kube, namespace: str, folder: Path) -> None:
    try:
        pods = kube.items(namespaced(namespace, "pods"))
    except E2EError as error:
        (folder / "logs.txt").write_text(f"no pods to ask for logs: {error}\n")
        return
    for body in pods:
        name, spec = body["metadata"]["name"], body["spec"]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            path = f"{namespaced(namespace, 'pods', name)}/log"
            for which, query in (("", {}), ("-before", {"previous": "true"})):
                asked = {"container": container["name"], "tailLines": LOG_LINES, "timestamps": "true", **query}
                file = folder / f"{name}.{container['name']}{which}.log"
                _keep(file, partial(kube.text, path, **asked), or_why=not which)


def _keep(file: Path, content: Callable[[], str], *, or_why: bool = True) -> None:
    """Store the result, or the reason for its absence."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        file.write_text(content())
    except (E2EError, OSError, subprocess.SubprocessError) as error:
        if or_why:
            file.write_text(f"none: {error}\n")


def _tail(path: Path) -> str:
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - MACHINE_LOG_BYTES))
        return log.read().decode(errors="replace")
