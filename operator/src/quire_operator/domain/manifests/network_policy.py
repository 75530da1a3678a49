"""The NetworkPolicy of one LLMDeployment: who may open a connection to its replicas. Pure; part of ``desired``.

Probes come from the node, which Kubernetes always lets in. What replicas themselves may reach is left open: hubs and
buckets have no pods to select and no lasting addresses. Policies add up, so that anybody who may write them in the
namespace can let others in, by the label quire.dev/llmdeployment.
"""

from collections.abc import Iterator, Mapping, Sequence

from quire_common.contract import engine
from quire_operator.domain.resource.fields import Problem, shown

JSON = Mapping[str, object]

_PEER_FIELDS = frozenset({"ipBlock", "namespaceSelector", "podSelector"})


def network_policy(peers: Sequence[JSON], *, selector: Mapping[str, str]) -> dict[str, object]:
    """The spec of a policy that lets these peers, and no others, reach the port that replicas serve."""
    assert peers, "a rule with no peers lets everybody in"
    return {
        "podSelector": {"matchLabels": dict(selector)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": list(peers), "ports": [{"port": engine.HTTP_PORT, "protocol": "TCP"}]}],
    }


def peer_problems(value: object) -> Iterator[Problem]:
    """Why this is no list of NetworkPolicyPeers; what is inside their selectors the API server judges."""
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
            yield Problem(path=where, message="has ipBlock beside selectors; make it two peers")


def _fields() -> str:
    return ", ".join(sorted(_PEER_FIELDS))
