"""The decision what happens to the NetworkPolicy of an LLMDeployment that was deleted. Pure.

Its pods drain for as long as ``spec.drain.timeout``, and the policy must apply until the last one is gone. So the
policy has no controller. Once the LLMDeployment is gone, its Deployment and its pods become the policy's owners, and
the garbage collector removes it with the last of them, also if no operator runs by then (ADR 0069).
"""

from collections.abc import Mapping, Sequence

from quire_operator.domain.cluster_state.observed import Child, Key, Pod, Ref
from quire_operator.domain.convergence.plan import Delete, Update, is_adoptable
from quire_operator.domain.manifests.child_kinds import POLICY, departed_policy
from quire_operator.domain.manifests.cluster_features import ClusterFeatures
from quire_operator.domain.resource.names import CANARY_SUFFIX

JSON = Mapping[str, object]


def departure(
    key: Key, children: Mapping[Ref, Child], pods: Sequence[Pod], features: ClusterFeatures
) -> Update | Delete | None:
    """Return what has to be done with the policy that an LLMDeployment left behind; None if nothing has."""
    policy = children.get(POLICY.ref(key.name))
    if policy is None or policy.deleting or not is_adoptable(policy):
        return None
    owners = _owners(key, children, pods)
    if not owners or features.network_peers is None:
        return Delete(ref=policy.ref, uid=policy.uid, reason="its LLMDeployment and all pods are gone")
    if {str(owner["uid"]) for owner in owners} <= policy.owner_uids:
        return None
    manifest = departed_policy(key.name, key.namespace, features, owners=owners)
    return Update(manifest=manifest, reason="its LLMDeployment is gone and pods are left")


def _owners(key: Key, children: Mapping[Ref, Child], pods: Sequence[Pod]) -> list[dict[str, object]]:
    found = (children.get(Ref("Deployment", f"{key.name}{suffix}")) for suffix in ("", CANARY_SUFFIX))
    deployments = [child for child in found if child is not None]
    left = [_owner("apps/v1", "Deployment", child.ref.name, child.uid) for child in deployments]
    return left + [_owner("v1", "Pod", pod.name, pod.uid) for pod in pods]


def _owner(api_version: str, kind: str, name: str, uid: str) -> dict[str, object]:
    return {"apiVersion": api_version, "kind": kind, "name": name, "uid": uid}
