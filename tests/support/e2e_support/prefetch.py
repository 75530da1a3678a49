"""Pull the engine's image on every node before the first scenario.

Pulling several GB takes minutes that would otherwise count against the first scenario. A pod without work on each node
does it, which is possible on any cluster.
"""

import uuid
from collections.abc import Sequence
from typing import Any, Final

from e2e_support import objects
from e2e_support.errors import NotInTime, TargetUnavailable
from e2e_support.kube import Kube, namespaced
from e2e_support.manifests import restricted_pod
from e2e_support.objects import Node, Pod
from e2e_support.waiting import Stopwatch, until
from quire_cluster.progress import Progress

PULL_SECONDS: Final = 900.0


def pull_everywhere(kube: Kube, nodes: Sequence[Node], image: str, progress: Progress) -> None:
    """Return when each schedulable node has the image. Raise ``TargetUnavailable`` on failure."""
    names = [node.name for node in nodes if node.is_ready and node.is_schedulable and not node.is_fake]
    if not names:
        raise TargetUnavailable("the cluster has no node that is ready and takes pods; kubectl get nodes says more")
    namespace = f"e2e-pull-{uuid.uuid4().hex[:4]}"
    kube.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    watch = Stopwatch()
    try:
        for name in names:
            kube.create(namespaced(namespace, "pods"), _pod(name, image))
        until(
            lambda: _are_done(kube, namespace, progress, watch), what=f"{image} is on every node", seconds=PULL_SECONDS
        )
    except NotInTime as error:
        raise TargetUnavailable(f"{error}\n{_told(_pods(kube, namespace))}") from error
    finally:
        kube.delete(f"/api/v1/namespaces/{namespace}")


def _are_done(kube: Kube, namespace: str, progress: Progress, watch: Stopwatch) -> bool:
    pods = _pods(kube, namespace)
    missing = [pod for pod in pods if pod.phase != "Succeeded"]
    hopeless = [pod for pod in missing if pod.phase == "Failed" or "ErrImage" in _told([pod])]
    if hopeless:
        raise TargetUnavailable(f"a node can't run the engine's image: {_told(hopeless)}")
    progress.update(f"    nodes pull the engine's image: {len(missing)} still do, {watch.seconds:.0f} s")
    return not missing


def _pods(kube: Kube, namespace: str) -> list[Pod]:
    return [objects.pod(body) for body in kube.items(namespaced(namespace, "pods"))]


def _told(pods: Sequence[Pod]) -> str:
    return "; ".join(f"{pod.node}: {pod.phase} {' '.join(pod.states)}" for pod in pods)


def _pod(node: str, image: str) -> dict[str, Any]:
    """Return a pod with a fixed node, because the scheduler might consider the node full."""
    container = {"name": "pull", "image": image, "command": ["true"]}
    more = {"nodeName": node, "restartPolicy": "Never", "tolerations": [{"operator": "Exists"}]}
    return restricted_pod(f"pull-{node}"[:63].rstrip("-."), container, more)
