"""The decision what happens to the NetworkPolicy of an LLMDeployment that was deleted. Pure.

Its pods drain for as long as ``spec.drain.timeout``, and the policy must apply until the last one is gone. So the
policy has no controller. Once the LLMDeployment is gone, its Deployment and its pods become the policy's owners, and
the garbage collector removes it with the last of them, also if no operator runs by then (ADR 0069).
"""

from collections.abc import Mapping, Sequence

from quire_operator.domain.cluster_state.observed import Child, Key, Pod, Ref, workload_refs
from quire_operator.domain.convergence.plan import Delete, Update, is_adoptable
from quire_operator.domain.manifests.child_kinds import CHILDREN, POLICY, departed_policy
from quire_operator.domain.manifests.cluster_features import ClusterFeatures
from quire_operator.domain.resource.names import CANARY_SUFFIX
from quire_operator.domain.resource.parallelism import MAX_SIZE


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
    nodes = _nodes(key, children, pods)
    manifest = departed_policy(key.name, key.namespace, features, owners=owners, nodes=nodes)
    return Update(manifest=manifest, reason="its LLMDeployment is gone and pods are left")


def _owners(key: Key, children: Mapping[Ref, Child], pods: Sequence[Pod]) -> list[dict[str, object]]:
    refs = (*workload_refs(key.name), Ref("Deployment", f"{key.name}{CANARY_SUFFIX}"))
    workloads = [child for ref in refs if (child := children.get(ref)) is not None]
    versions = {child.kind: child.api_version for child in CHILDREN}
    left = [_owner(versions[child.ref.kind], child.ref.kind, child.ref.name, child.uid) for child in workloads]
    return left + [_owner("v1", "Pod", pod.name, pod.uid) for pod in pods]


def _nodes(key: Key, children: Mapping[Ref, Child], pods: Sequence[Pod]) -> int:
    """Return the number of pods of a replica; 64, the largest possible, if only pods of groups are left to show it."""
    groups = children.get(workload_refs(key.name)[1])
    if groups is not None and groups.deployment is not None:
        return groups.deployment.nodes
    return MAX_SIZE if any(pod.group for pod in pods) else 1


def _owner(api_version: str, kind: str, name: str, uid: str) -> dict[str, object]:
    return {"apiVersion": api_version, "kind": kind, "name": name, "uid": uid}
