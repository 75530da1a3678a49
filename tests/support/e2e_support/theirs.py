"""A user's cluster from KUBECONFIG as a target, with kubectl and helm from the PATH if available."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from e2e_support import objects
from e2e_support.errors import ApiError, TargetUnavailable
from e2e_support.kube import Kube
from e2e_support.target import Target, TheirCluster, found_on
from quire_cluster.binaries import ensure
from quire_cluster.progress import Progress


@contextmanager
def their_cluster(given: TheirCluster, progress: Progress) -> Iterator[Target]:
    programs = {name: Path(found) for name in ("kubectl", "helm") if (found := shutil.which(name))}
    programs |= ensure([name for name in ("kubectl", "helm") if name not in programs], progress)
    kube = Kube(given.kubeconfig, programs["kubectl"])
    try:
        nodes = [objects.node(body) for body in kube.items("/api/v1/nodes")]
    except ApiError as error:
        raise TargetUnavailable(f"the cluster of KUBECONFIG={given.kubeconfig} does not answer: {error}") from error
    values: dict[str, Any] = {"images": {"registry": given.registry, "tag": given.tag}}
    if given.prometheus_url:
        values["operator"] = {"prometheus": {"url": given.prometheus_url}}
    with _proxy(kube, programs["kubectl"]) as proxy:
        yield Target(
            kube=kube,
            helm_program=programs["helm"],
            name=f"that of KUBECONFIG={given.kubeconfig}, {kube.server}",
            machine=None,
            capabilities=found_on(nodes, prometheus_url=given.prometheus_url),
            engine_image=f"{given.registry}/quire-engine:{given.tag}",
            chart_values=values,
            proxy=proxy,
        )


@contextmanager
def _proxy(kube: Kube, kubectl: Path) -> Iterator[str]:
    """Start `kubectl proxy` on a free port and return its address."""
    command = [str(kubectl), "proxy", "--port=0"]
    with subprocess.Popen(command, env=kube.environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.search(r"127\.0\.0\.1:\d+", said)
            if found is None:
                raise TargetUnavailable(f"kubectl proxy did not say where it listens: {said.strip() or 'it ended'}")
            yield f"http://{found[0]}"
        finally:
            process.terminate()
