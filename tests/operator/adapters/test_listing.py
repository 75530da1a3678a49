"""Lists over several namespaces: one without permission hides no other."""

from typing import Any

import pytest

from quire_operator.adapters.kubernetes.cluster import KubeCluster
from quire_operator.ports import Forbidden, PartlyForbidden


class Connection:
    """A connection that rejects some namespaces; the others have one LLMDeployment each."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused

    async def read(self, path: str, *, query: Any = ()) -> dict[str, Any]:
        namespace = path.split("/")[5]
        if namespace in self.refused:
            raise Forbidden(f"cannot list in {namespace}")
        return {"items": [{"metadata": {"name": "chat", "namespace": namespace}}], "metadata": {}}


async def listed(namespaces: tuple[str, ...], *refused: str) -> list[str]:
    connection: Any = Connection(*refused)
    found: list[str] = []
    try:
        async for resource in KubeCluster(connection, namespaces=namespaces).list_resources():
            found.append(resource.key.namespace)
    except PartlyForbidden as error:
        found.append(f"without {', '.join(error.namespaces)}")
    return found


@pytest.mark.parametrize(
    ("refused", "found"),
    [((), ["a", "b", "c"]), (("a",), ["b", "c", "without a"]), (("c",), ["a", "b", "without c"])],
)
async def test_namespaces_with_permission_are_listed(refused: tuple[str, ...], found: list[str]) -> None:
    assert await listed(("a", "b", "c"), *refused) == found


async def test_listing_without_any_permission_raises_forbidden() -> None:
    with pytest.raises(Forbidden, match="cannot list in a"):
        await listed(("a", "b"), "a", "b")
