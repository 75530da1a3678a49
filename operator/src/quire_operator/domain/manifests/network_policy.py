"""The NetworkPolicy of one LLMDeployment, which limits connections to its replicas. Pure; part of ``desired``.

Probes come from the node, which Kubernetes always admits. Connections from replicas are not limited, because hubs and
buckets have no pods to select and no fixed addresses. Policies add up, so users with the permission to create them in
the namespace can admit other peers by the label quire.dev/llmdeployment.
"""

from collections.abc import Iterator, Mapping, Sequence

from quire_common.contract import engine
from quire_operator.domain.resource.fields import Problem, shown

JSON = Mapping[str, object]

_PEER_FIELDS = frozenset({"ipBlock", "namespaceSelector", "podSelector"})


def network_policy(
    peers: Sequence[JSON], *, selector: JSON, nodes: int = 1, on_gpus: bool = False
) -> dict[str, object]:
    """Return the spec of a policy that lets only these peers reach the port of replicas.

    The pods of groups with several ``nodes`` also reach the ports on which they join each other. Policies cannot name
    one group, so that the pods of all groups of the LLMDeployment may connect; the group's secret keeps them apart.
    With GPUs they reach all ports of each other, because NCCL listens on ports that the kernel chooses.
    """
    assert peers, "a rule with no peers lets everybody in"
    rules: list[JSON] = [{"from": list(peers), "ports": [{"port": engine.HTTP_PORT, "protocol": "TCP"}]}]
    if nodes > 1:
        last = engine.GROUP_PORT + nodes - 1
        ports: list[JSON] = [{"port": engine.GROUP_PORT, "endPort": last, "protocol": "TCP"}]
        if on_gpus:
            ports = [{"protocol": "TCP"}]
        rules.append({"from": [{"podSelector": dict(selector)}], "ports": ports})
    return {"podSelector": dict(selector), "policyTypes": ["Ingress"], "ingress": rules}


def peer_problems(value: object) -> Iterator[Problem]:
    """Yield why this is not a list of NetworkPolicyPeers. The API server checks the contents of their selectors."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        yield Problem(path="", message=f"must be a list of NetworkPolicyPeers, got {shown(value)}")
        return
    if not value:
        yield Problem(path="", message="must name at least one peer: an empty list would let everybody in")
    for number, peer in enumerate(value):
        where = f"[{number}]"
        if not isinstance(peer, Mapping) or not peer:
            yield Problem(path=where, message=f"must be a mapping with {_fields()}, got {shown(peer)}")
            continue
        for name in sorted(map(str, peer.keys() - _PEER_FIELDS)):
            yield Problem(path=f"{where}.{name}", message=f"unknown field; there are: {_fields()}")
        if "ipBlock" in peer and len(peer) > 1:
            yield Problem(path=where, message="has both ipBlock and selectors; make it two peers")


def _fields() -> str:
    return ", ".join(sorted(_PEER_FIELDS))
