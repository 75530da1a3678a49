"""Waiting until an API server serves custom resources.

``kubectl wait`` is not suitable, because it fails for a definition without conditions.
"""

from functools import partial
from typing import Any

from quire_cluster.client import ApiClient
from quire_cluster.waiting import eventually

_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def wait_established(client: ApiClient, *names: str) -> None:
    """Wait for definitions with names such as ``llmdeployments.quire.dev``."""
    for name in names:
        assert eventually(partial(_is_established, client, name)), f"the API server does not serve {name}"


def _is_established(client: ApiClient, name: str) -> bool:
    answer = client.get(f"{_PATH}/{name}")
    return answer.ok and is_established(answer.body)


def is_established(definition: dict[str, Any]) -> bool:
    """Return True if the conditions report that the definition is established."""
    conditions = definition.get("status", {}).get("conditions") or ()
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)
