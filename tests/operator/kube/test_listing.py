"""Lists over several namespaces, and deletions of what they show: one without permission hides no other."""

from typing import Any

import pytest

from quire_operator.kube.client import WAKE_SLICES, KubeClient
from quire_operator.kube.errors import Forbidden, NotFound, PartlyForbidden


class Connection:
    """A connection that rejects some namespaces; the others have one LLMDeployment each."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.queries: list[Any] = []
        self.deleted: list[tuple[str, str]] = []

    async def read(self, path: str, *, query: Any = ()) -> dict[str, Any]:
        namespace = path.split("/")[5]
        self.queries.append(query)
        if namespace in self.refused:
            raise Forbidden(f"cannot list in {namespace}")
        return {"items": [{"metadata": {"name": "chat", "namespace": namespace, "uid": "1"}}], "metadata": {}}

    async def write(self, verb: str, kind: str, method: str, path: str, *, body: Any) -> None:
        if path.split("/")[5] == "b":
            raise NotFound("it is gone")
        self.deleted.append((path, body["preconditions"]["uid"]))


async def listed(namespaces: tuple[str, ...], *refused: str) -> list[str]:
    connection: Any = Connection(*refused)
    found: list[str] = []
    try:
        async for resource in KubeClient(connection, namespaces=namespaces).list_resources():
            found.append(resource.key.namespace)
    except PartlyForbidden as error:
        found.append(f"without {', '.join(error.namespaces)}")
    return found


@pytest.mark.parametrize(
    ("refused", "found"), [((), ["a", "b", "c"]), (("a",), ["b", "c", "without a"]), (("c",), ["a", "b", "without c"])]
)
async def test_namespaces_with_permission_are_listed(refused: tuple[str, ...], found: list[str]) -> None:
    assert await listed(("a", "b", "c"), *refused) == found


async def test_listing_without_any_permission_raises_forbidden() -> None:
    with pytest.raises(Forbidden, match="cannot list in a"):
        await listed(("a", "b"), "a", "b")


async def test_wake_slices_are_deleted_where_they_may_be_listed() -> None:
    connection: Any = Connection("a")
    with pytest.raises(PartlyForbidden):
        await KubeClient(connection, namespaces=("a", "b", "c")).delete_wake_slices()
    assert connection.deleted == [("/apis/discovery.k8s.io/v1/namespaces/c/endpointslices/chat", "1")]
    assert all(("labelSelector", WAKE_SLICES) in query for query in connection.queries)
