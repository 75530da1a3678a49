"""LLMDeployments for tests: the smallest valid one, with the fields that a test names."""

from collections.abc import Mapping
from typing import Any

from quire_operator.api import Invalid, Spec


def llmdeployment(metadata: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Return the smallest LLMDeployment with these fields of its metadata and its spec."""
    return {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat", "namespace": "prod"} | dict(metadata or {}),
        "spec": {"model": {"source": "file:///m"}} | fields,
    }


def parsed(*, name: str = "chat", namespace: str = "prod", **fields: Any) -> Spec | Invalid:
    """Return the result of parsing the smallest LLMDeployment with these fields of its spec."""
    return Spec.parse(llmdeployment({"name": name, "namespace": namespace}, **fields))


def valid_spec(**fields: Any) -> Spec:
    """Return the same, which must be valid."""
    spec = parsed(**fields)
    assert isinstance(spec, Spec), str(spec)
    return spec
