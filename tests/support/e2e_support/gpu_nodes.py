"""Simulated GPU nodes (kwok) in addition to the cluster's own nodes: pods are scheduled, but no containers run.

The nodes are tainted and labelled, so only pods of their own scenario are scheduled there. They are removed with it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from e2e_support.kube import Kube, namespaced
from e2e_support.objects import Pod
from e2e_support.target import Target
from e2e_support.waiting import until
from quire_cluster.fake_nodes import TAINT, manifest

POOL: Final = "quire.dev/e2e-pool"
READY_SECONDS: Final = 60.0


class GpuNodes:
    """A pool of simulated GPU nodes."""

    def __init__(self, target: Target, pool: str) -> None:
        self._target, self._pool = target, pool
        self.names: list[str] = []

    @property
    def place(self) -> dict[str, Any]:
        """Return settings for `spec.podTemplate.spec` that select only this pool."""
        return {
            "nodeSelector": {POOL: self._pool},
            "tolerations": [{"key": TAINT, "operator": "Exists", "effect": "NoSchedule"}],
        }

    def add(self, *counts: int) -> list[str]:
        """Add one node for each number of GPUs, wait until they are ready, and return their names."""
        added = [f"{self._pool}-{number}" for number in range(len(self.names), len(self.names) + len(counts))]
        for name, gpus in zip(added, counts, strict=True):
            body = manifest(name, gpus=gpus, labels={POOL: self._pool}, is_tainted=True)
            self._target.kube.create("/api/v1/nodes", body)
            self.names.append(name)
        until(lambda: self._are_ready(added), what=f"nodes {', '.join(added)} are ready", seconds=READY_SECONDS)
        return added

    def taken(self, pods: Sequence[Pod]) -> dict[str, int]:
        """Return how many of these pods each node has."""
        counted = Counter(pod.node for pod in pods)
        return {name: counted[name] for name in self.names}

    def remove(self) -> None:
        for name in self.names:
            self._target.kube.delete(f"/api/v1/nodes/{name}")
        self.names.clear()

    def _are_ready(self, names: Sequence[str]) -> bool:
        ready = {node.name for node in self._target.nodes() if node.is_ready}
        return ready.issuperset(names)


@contextmanager
def gpu_nodes(target: Target, pool: str) -> Iterator[GpuNodes]:
    """Provide a pool of nodes and, on our own cluster, the controller that simulates them."""
    nodes = GpuNodes(target, pool)
    if target.machine is not None:
        target.machine.fake_nodes.start(0)
    try:
        yield nodes
    finally:
        _end_pods(target.kube, nodes)
        nodes.remove()
        if target.machine is not None:
            target.machine.fake_nodes.stop()


def _end_pods(kube: Kube, nodes: GpuNodes) -> None:
    """End the pods, because no kubelet reports their end when their node is gone."""
    for body in kube.items("/api/v1/pods"):
        if body.get("spec", {}).get("nodeName") in nodes.names:
            metadata = body["metadata"]
            kube.delete(namespaced(metadata["namespace"], "pods", metadata["name"]), grace_seconds=0)
