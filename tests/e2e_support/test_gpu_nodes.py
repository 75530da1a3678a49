"""Placement and counting of pods that request GPUs, on a fake API server."""

import dataclasses
from typing import Any, cast

from e2e_support import objects
from e2e_support.gpu_nodes import POOL, GpuNodes
from e2e_support.target import Target


class Remembering:
    """A fake API server whose nodes are ready as soon as they are created."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self.kube = self

    def create(self, path: str, body: dict[str, Any]) -> None:
        assert path == "/api/v1/nodes"
        self.made.append(body | {"status": body["status"] | {"conditions": [{"type": "Ready", "status": "True"}]}})

    def delete(self, path: str) -> None:
        self.deleted.append(path)

    def nodes(self) -> list[objects.Node]:
        return [objects.node(body) for body in self.made]


def pool() -> tuple[GpuNodes, Remembering]:
    cluster = Remembering()
    return GpuNodes(cast(Target, cluster), "some"), cluster


def test_nodes_take_only_pods_that_are_meant_for_their_pool() -> None:
    nodes, cluster = pool()
    assert nodes.add(8, 4) == ["some-0", "some-1"]
    assert nodes.add(2) == ["some-2"]
    assert [body["status"]["allocatable"]["nvidia.com/gpu"] for body in cluster.made] == ["8", "4", "2"]
    (tolerated,) = nodes.place["tolerations"]
    for body in cluster.made:
        (taint,) = body["spec"]["taints"]
        assert (taint["key"], taint["effect"]) == (tolerated["key"], tolerated["effect"])
        assert nodes.place["nodeSelector"].items() <= body["metadata"]["labels"].items()
    assert nodes.place["nodeSelector"] == {POOL: "some"}


def test_pods_are_counted_by_node_including_empty_nodes() -> None:
    nodes, _ = pool()
    nodes.add(8, 8)
    pod = objects.pod({"metadata": {"name": "a", "namespace": "n", "uid": "u"}, "spec": {"nodeName": "some-1"}})
    elsewhere = dataclasses.replace(pod, node="node-1")
    assert nodes.taken([pod, pod, elsewhere]) == {"some-0": 0, "some-1": 2}


def test_nodes_are_removed_when_not_needed() -> None:
    nodes, cluster = pool()
    nodes.add(8)
    nodes.remove()
    assert cluster.deleted == ["/api/v1/nodes/some-0"] and nodes.names == []
