"""The clusters that can be a target: our own on this machine, or the one of a user from KUBECONFIG.

The run that starts our own builds its images and stops it. For the cluster of a user, kubectl and helm come from the
PATH if available.
"""

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
from e2e_support.space import SPACE_SELECTOR
from e2e_support.target import EVERYTHING, Target, TheirCluster, found_on
from quire_cluster.binaries import ensure
from quire_cluster.errors import ClusterError
from quire_cluster.images.ensure import ensure_images
from quire_cluster.images.inputs import Images
from quire_cluster.programs import Programs
from quire_cluster.progress import Progress
from quire_cluster.real_cluster import RealCluster, default_state, stop


@contextmanager
def own_cluster(progress: Progress, *, keep: bool) -> Iterator[Target]:
    """Provide the running cluster. An existing one is repaired if necessary and kept."""
    found = RealCluster.load(default_state())
    if found is not None:
        _start(found, progress)
        target = _target(found, _images(found, progress), progress)
        undo_killed_run(target.kube, progress)
        yield target
        return
    cluster = RealCluster.create(default_state(), Programs.ensure(progress))
    _start(cluster, progress)
    try:
        images = _images(cluster, progress)
        yield _target(cluster, images, progress)
        _forget_other_images(images, cluster, progress)
    finally:
        if keep:
            progress.say("==> the cluster is left up; make cluster-down takes it down")
        else:
            progress.say("==> taking the cluster down (KEEP=1 leaves it up)")
            stop(cluster.state)


def _start(cluster: RealCluster, progress: Progress) -> None:
    """Start the cluster.

    If the start fails, do not stop it: another cluster may be running, and `stop` would end that one.
    """
    try:
        cluster.start(progress)
    except ClusterError as error:
        raise TargetUnavailable(f"{error}\nTo run on a cluster that you have, set KUBECONFIG.") from error


def undo_killed_run(kube: Kube, progress: Progress) -> None:
    """Uncordon nodes, and delete namespaces whose pods would disturb drains and evictions."""
    nodes = [objects.node(body) for body in kube.items("/api/v1/nodes")]
    if cordoned := [node.name for node in nodes if not node.is_schedulable]:
        progress.say(f"==> uncordoning nodes of a run that did not end: {', '.join(cordoned)}")
        kube.kubectl("uncordon", *cordoned)
    left = [body["metadata"]["name"] for body in kube.items("/api/v1/namespaces", selector=SPACE_SELECTOR)]
    if left:
        progress.say(f"==> deleting {len(left)} namespaces of a run that did not end: {', '.join(left)}")
        kube.kubectl("delete", "namespace", *left, "--ignore-not-found", "--timeout=180s")


def _images(cluster: RealCluster, progress: Progress) -> Images:
    return ensure_images(registry=cluster.registry_address, progress=progress)


def _forget_other_images(images: Images, cluster: RealCluster, progress: Progress) -> None:
    """Remove images of earlier versions from the nodes of a cluster that this run started.

    On another cluster they may be in use. This is done at the end, because nodes with the previous version pull only
    the changed layers.
    """
    kept = frozenset(image.reference for image in images.by_target().values())
    try:
        forgotten = {name for node in cluster.nodes.values() for name in node.forget_images_but(kept)}
    except ClusterError as error:
        progress.say(f"==> images of earlier versions stay on the nodes: {error}")
        return
    if tagged := [name for name in forgotten if "sha256:" not in name]:
        progress.say(f"==> removed {len(tagged)} images of earlier versions from the nodes")


def _target(cluster: RealCluster, images: Images, progress: Progress) -> Target:
    programs = ensure(("kubectl", "helm"), progress)
    kube = Kube(str(cluster.admin_kubeconfig), programs["kubectl"])
    return Target(
        kube=kube,
        helm_program=programs["helm"],
        name=f"this machine's own, {kube.server}",
        machine=cluster,
        capabilities=EVERYTHING,
        engine_image=images.engine.reference,
        chart_values={**images.chart_values(), "operator": {"prometheus": {"url": cluster.prometheus_url}}},
    )


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
