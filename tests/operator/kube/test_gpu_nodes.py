"""Nodes are listed page by page, and only those with known GPU memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire_operator.kube.client import KubeClient


class Connection:
    """A connection that answers lists of metadata."""

    def __init__(self, *pages: Sequence[Mapping[str, Any]]) -> None:
        self._pages = pages
        self.queries: list[dict[str, str]] = []

    async def read_metadata(self, path: str, *, query: Sequence[tuple[str, str]]) -> Mapping[str, Any]:
        assert path == "/api/v1/nodes"
        self.queries.append(dict(query))
        number = len(self.queries)
        if self.queries[-1]["labelSelector"] != "nvidia.com/gpu.memory":
            return {"metadata": {}, "items": [{"metadata": {"labels": {"c": "3"}}}]}
        rest = str(number) if number < len(self._pages) else ""
        return {"metadata": {"continue": rest}, "items": self._pages[number - 1]}


async def test_all_pages_are_read() -> None:
    connection = Connection(
        [{"metadata": {"labels": {"a": "1"}}}, {"metadata": {}}], [{"metadata": {"labels": {"b": "2"}}}]
    )
    assert await KubeClient(connection).node_labels() == ({"a": "1"}, {}, {"b": "2"}, {"c": "3"})  # type: ignore[arg-type]
    assert [query["continue"] for query in connection.queries] == ["", "1", ""]
    assert {query["labelSelector"] for query in connection.queries} == {"nvidia.com/gpu.memory", "amd.com/gpu.vram"}
