"""Repair of our own cluster after a run that was killed."""

import io
from typing import Any, cast

import pytest

from e2e_support.kube import Kube
from e2e_support.own import undo_killed_run
from e2e_support.space import SPACE_SELECTOR
from quire_cluster.progress import Progress


class Left:
    """A cluster with two nodes, and with what a run has left in it."""

    def __init__(self, *, cordoned: bool, spaces: list[str]) -> None:
        nodes = [
            {"metadata": {"name": "node-1"}, "spec": {"unschedulable": cordoned}},
            {"metadata": {"name": "node-2"}},
        ]
        self._items: dict[str, list[dict[str, Any]]] = {"nodes": nodes}
        self._items["namespaces"] = [{"metadata": {"name": name}} for name in spaces]
        self.commands: list[tuple[str, ...]] = []

    def items(self, path: str, *, selector: str = "") -> list[dict[str, Any]]:
        assert selector == (SPACE_SELECTOR if path.endswith("namespaces") else "")
        return self._items[path.removeprefix("/api/v1/")]

    def kubectl(self, *command: str) -> None:
        self.commands.append(command)


@pytest.mark.parametrize(("cordoned", "spaces"), [(False, []), (True, []), (False, ["e2e-a", "e2e-b"])])
def test_nodes_are_uncordoned_and_namespaces_deleted(cordoned: bool, spaces: list[str]) -> None:
    cluster = Left(cordoned=cordoned, spaces=spaces)
    undo_killed_run(cast(Kube, cluster), Progress(io.StringIO()))
    commands = [command[: len(spaces) + 2] for command in cluster.commands]
    expected = [("uncordon", "node-1")] if cordoned else []
    assert commands == [*expected, *([("delete", "namespace", *spaces)] if spaces else [])]
