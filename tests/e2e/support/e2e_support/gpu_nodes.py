"""Nodes with GPUs that only pretend (kwok's), beside the cluster's own: pods that want GPUs come to them, nothing runs.

They are tainted and labelled, so that only pods of the scenario that made them come, and go with it.
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
    """Those of one pool."""

    def __init__(self, target: Target, pool: str) -> None:
        self._target, self._pool = target, pool
        self.names: list[str] = []

    @property
    def place(self) -> dict[str, Any]:
        """For `spec.podTemplate.spec`: here, and nowhere else."""
        return {
            "nodeSelector": {POOL: self._pool},
            "tolerations": [{"key": TAINT, "operator": "Exists", "effect": "NoSchedule"}],
        }

    def add(self, *counts: int) -> list[str]:
        """One node for each number of GPUs; their names, once they are ready."""
        added = [f"{self._pool}-{number}" for number in range(len(self.names), len(self.names) + len(counts))]
        for name, gpus in zip(added, counts, strict=True):
            body = manifest(name, gpus=gpus, labels={POOL: self._pool}, is_tainted=True)
            self._target.kube.create("/api/v1/nodes", body)
            self.names.append(name)
        until(lambda: self._are_ready(added), what=f"nodes {', '.join(added)} are ready", seconds=READY_SECONDS)
        return added

    def taken(self, pods: Sequence[Pod]) -> dict[str, int]:
        """How many of these pods each node has."""
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
    """A pool of them, with whatever makes them alive; on somebody else's cluster that is there."""
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
    """No kubelet will say that they have ended once their node has gone."""
    for body in kube.items("/api/v1/pods"):
        if body.get("spec", {}).get("nodeName") in nodes.names:
            metadata = body["metadata"]
            kube.delete(namespaced(metadata["namespace"], "pods", metadata["name"]), grace_seconds=0)
