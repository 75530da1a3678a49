"""Changed specs that are tried as canaries, and what the status says about one.

The faults are those of ``canary_faults``: a ConfigMap has the file, and the changed spec mounts it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from e2e_support import canary_faults
from e2e_support.kube import namespaced
from e2e_support.space import LLMDeployment, Space

JSON = dict[str, Any]
_CONFIG_MAP: Final = "faults"
_FOLDER: Final = "/faults"
_FILE: Final = "sitecustomize.py"
"""The name by which Python finds it."""
ERROR_RATE: Final = "ErrorRate"


def provide_faults(space: Space) -> None:
    """Create the ConfigMap that ``with_fault`` mounts."""
    text = Path(canary_faults.__file__).read_text()
    space.kube.create(namespaced(space.name, "configmaps"), {"metadata": {"name": _CONFIG_MAP}, "data": {_FILE: text}})


def with_fault(fault: str) -> JSON:
    """Return the change of a spec that gives replicas a fault."""
    engine = {
        "name": "engine",
        "env": [{"name": "PYTHONPATH", "value": _FOLDER}, {"name": "CANARY_FAULT", "value": fault}],
        "volumeMounts": [{"name": _CONFIG_MAP, "mountPath": _FOLDER, "readOnly": True}],
    }
    volume = {"name": _CONFIG_MAP, "configMap": {"name": _CONFIG_MAP}}
    return {"podTemplate": {"spec": {"containers": [engine], "volumes": [volume]}}}


def canary_rollout(*gates: JSON, weight: int, min_requests: int, max_requests: int, **more: Any) -> JSON:
    """Return ``spec.rollout`` with one short step."""
    policy = {
        "steps": [{"weightPercent": weight, "duration": "10s"}],
        "gates": list(gates),
        "minRequests": min_requests,
        "maxRequests": max_requests,
        **more,
    }
    return {"strategy": "Canary", "canary": policy}


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The part of ``status.rollout`` that scenarios read."""

    phase: str
    message: str
    weight_percent: int
    stable: str
    canary: str
    rejected: str
    requests: int
    """The requests that the gate of error rates has counted for the canary."""

    @property
    def has_requests(self) -> bool:
        return self.phase == "Canary" and self.weight_percent > 0


def progress(chat: LLMDeployment) -> Progress:
    """Return the progress of the rollout."""
    return progress_of(chat.status())


def progress_of(status: Mapping[str, Any]) -> Progress:
    """Read ``status.rollout``. Pure."""
    found = status.get("rollout", {})
    errors: JSON = next((gate for gate in found.get("gates", []) if gate["metric"] == ERROR_RATE), {})
    return Progress(
        phase=found.get("phase", ""),
        message=found.get("message", ""),
        weight_percent=found.get("weightPercent", 0),
        stable=found.get("stableRevision", ""),
        canary=found.get("canaryRevision", ""),
        rejected=found.get("rejectedRevision", ""),
        requests=errors.get("canary", {}).get("count", 0),
    )


def is_of_canary(chat: LLMDeployment, replica: str | None) -> bool:
    """Return whether a replica, as the gateway names it, is one of the canary."""
    return replica is not None and replica.startswith(f"{chat.namespace}/{chat.name}-canary-")
