"""Gateway pods in which nothing runs, and the EndpointSlices that lead Services to them."""

from typing import Any, Final

from kube_support.operators import Namespace

LABELS: Final = {"app": "gateway"}
WAKE_FLAGS: Final = ("--gateway-selector", "app=gateway", "--wake-by-service", "on")


def run_gateway(space: Namespace) -> None:
    """Create a ready gateway. It has only the port for requests to Services, so the operator connects to nothing."""
    ports = [{"name": "wake", "containerPort": 8001}]
    pod = {
        "metadata": {"name": "gateway-0", "labels": LABELS},
        "spec": {
            "automountServiceAccountToken": False,
            "containers": [{"name": "gateway", "image": "x", "ports": ports}],
        },
    }
    space.create("pods", pod)
    ready = [{"type": "Ready", "status": "True"}]
    space.patch("pods", "gateway-0/status", {"status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": ready}})


def wake_slice(space: Namespace, name: str) -> dict[str, Any] | None:
    """Return the EndpointSlice that leads the Service of an LLMDeployment to gateways; None without one."""
    return space.get("endpointslices", f"{name}-wake")
