"""LLMDeployments that start quickly on a small machine. Pure."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

JSON = dict[str, Any]
DEMO_MODEL = "file://./models/quire-demo"
"""The engine's image carries it."""

_SMALL: JSON = {
    "model": {"source": DEMO_MODEL},
    "engine": {"maxSequences": 8, "maxBatchedTokens": 512, "maxModelLength": 2048, "kvCache": {"size": "64Mi"}},
    "resources": {"requests": {"cpu": "100m", "memory": "300Mi"}},
    "drain": {"timeout": "30s"},
}


def small_llmdeployment(name: str, **changes: Any) -> JSON:
    """One of the demo model; `changes` are merged into its spec, and None removes what is there.

    Without a servedName of its own it is given one by ``Space.apply``, that no other namespace has.
    """
    return {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": merged(_SMALL, changes),
    }


def autoscaled(*, low: int, high: int, **changes: Any) -> JSON:
    """spec.autoscaling with windows so short that a scenario sees both ways."""
    quick: JSON = {"minReplicas": low, "maxReplicas": high, "scaleDown": {"window": "20s", "period": "10s"}}
    return merged(quick, changes)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> JSON:
    """A JSON merge patch, carried out."""
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
