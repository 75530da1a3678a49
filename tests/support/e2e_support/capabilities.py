"""Capabilities of a cluster that a scenario may need besides pods, and the message if one is missing. Pure.

A scenario declares its needs with ``@pytest.mark.needs("machine")``. Our own cluster has all capabilities.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from e2e_support.errors import TargetUnavailable
from e2e_support.objects import Node


class Capability(StrEnum):
    """A capability; its value is the argument of the marker."""

    MACHINE = "machine"
    PROMETHEUS = "prometheus"
    TWO_NODES = "two-nodes"
    FAKE_NODES = "fake-nodes"


LACK = {
    Capability.MACHINE: "it stops the API server, Prometheus or a kubelet, which only our own cluster lets it do",
    Capability.PROMETHEUS: "it needs a Prometheus that scrapes the pods; name it by QUIRE_E2E_PROMETHEUS_URL",
    Capability.TWO_NODES: "it needs two nodes that are ready and take pods",
    Capability.FAKE_NODES: "it needs nodes of kwok with nvidia.com/gpu",
}
EVERYTHING = frozenset(Capability)


def capability(name: str) -> Capability:
    """Return the capability of that name. Raise ``TargetUnavailable`` for an unknown name."""
    try:
        return Capability(name)
    except ValueError:
        known = ", ".join(Capability)
        raise TargetUnavailable(f"needs({name!r}): there is no such capability; there are {known}") from None


def lacking(needs: Iterable[Capability], *, has: frozenset[Capability]) -> str:
    """Return why a scenario with these needs cannot run, or an empty string."""
    missing = [need for need in dict.fromkeys(needs) if need not in has]
    return "; ".join(LACK[need] for need in missing)


def found_on(nodes: Sequence[Node], *, prometheus_url: str) -> frozenset[Capability]:
    """Return the capabilities of a user's cluster."""
    able = [node for node in nodes if node.is_ready and node.is_schedulable and not node.is_fake]
    found = {
        Capability.PROMETHEUS: bool(prometheus_url),
        Capability.TWO_NODES: len(able) >= 2,
        Capability.FAKE_NODES: any(node.is_fake for node in nodes),
    }
    return frozenset(name for name, is_there in found.items() if is_there)
