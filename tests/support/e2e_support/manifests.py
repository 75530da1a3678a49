"""LLMDeployments that start quickly on a small machine, and pods without rights. Pure."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

JSON = dict[str, Any]
DEMO_MODEL = "file://./models/quire-demo"
"""The model in the engine's image."""
_USER = 65532
_SMALL: JSON = {
    "model": {"source": DEMO_MODEL},
    "engine": {"maxSequences": 8, "maxBatchedTokens": 512, "maxModelLength": 2048, "kvCache": {"size": "64Mi"}},
    "resources": {"requests": {"cpu": "100m", "memory": "300Mi"}},
    "drain": {"timeout": "30s"},
}


def small_llmdeployment(name: str, **changes: Any) -> JSON:
    """Return an LLMDeployment of the demo model with `changes` merged into its spec; None removes a field.

    Without a servedName, ``Space.apply`` sets one that no other namespace uses.
    """
    return {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": merged(_SMALL, changes),
    }


def restricted_pod(name: str, container: JSON, spec: JSON) -> JSON:
    """Return a pod with one container that complies with the strictest Pod Security Standard."""
    security = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    of_pod = {"runAsNonRoot": True, "runAsUser": _USER, "seccompProfile": {"type": "RuntimeDefault"}}
    return {
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": of_pod,
            "containers": [container | {"securityContext": security}],
            **spec,
        },
    }


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> JSON:
    """Return the result of a JSON merge patch."""
    result = deepcopy(dict(base))
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            below = result.get(key)
            result[key] = merged(below if isinstance(below, Mapping) else {}, value)
        else:
            result[key] = deepcopy(value)
    return result
