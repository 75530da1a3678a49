"""Functions that find objects among rendered documents."""

from typing import Any

Documents = list[dict[str, Any]]


def find(documents: Documents, kind: str, name: str) -> dict[str, Any]:
    """Return the only object with that name."""
    (found,) = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    return found


def of_kind(documents: Documents, *kinds: str) -> Documents:
    return [document for document in documents if document["kind"] in kinds]


def pod_spec(documents: Documents, deployment: str) -> dict[str, Any]:
    spec: dict[str, Any] = find(documents, "Deployment", deployment)["spec"]["template"]["spec"]
    return spec


def container(documents: Documents, deployment: str) -> dict[str, Any]:
    """Return a Deployment's only container."""
    (only,) = pod_spec(documents, deployment)["containers"]
    result: dict[str, Any] = only
    return result
