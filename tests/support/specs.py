"""LLMDeployments for tests: the smallest valid one, with the fields that a test names."""

from typing import Any

from quire_operator.domain.resource import Invalid, Spec


def parsed(*, name: str = "chat", namespace: str = "prod", **fields: Any) -> Spec | Invalid:
    """Return the result of parsing the smallest LLMDeployment with these fields of its spec."""
    return Spec.parse(
        {
            "apiVersion": "quire.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"model": {"source": "file:///m"}} | fields,
        }
    )


def valid_spec(**fields: Any) -> Spec:
    """Return the same, which must be valid."""
    spec = parsed(**fields)
    assert isinstance(spec, Spec), str(spec)
    return spec
