"""The decision whether replicas can share the volume that caches their model. Pure.

A ReadWriteOnce volume can be mounted on one node only, so that replicas on other nodes never start. ``reconcile`` and
``admission`` refuse a spec that may lead to that. A spec that an older operator applied goes on, because its replicas
may all be on one node.
"""

from collections.abc import Mapping

from quire_operator.domain.cluster_state.observed import Resource
from quire_operator.domain.resource import AccessMode, Spec
from quire_operator.domain.resource.fields import Problem
from quire_operator.domain.status.capacity_check import is_let_in
from quire_operator.domain.status.conditions import BlockingCondition

JSON = Mapping[str, object]
_HOSTNAME = "kubernetes.io/hostname"


def unshared_cache(spec: Spec) -> Problem | None:
    """Return why replicas may be unable to mount the cache; None if they can."""
    cache = spec.model.cache
    most = spec.max_replicas
    if cache is None or not cache.is_created or cache.access_mode is not AccessMode.READ_WRITE_ONCE or most < 2:
        return None
    if _is_on_one_node(spec):
        return None
    return Problem(
        path="spec.model.cache.accessMode",
        message=(
            f"a ReadWriteOnce volume can be mounted on one node only, but up to {most} replicas may run: those on "
            "other nodes never start. Set ReadWriteMany, use an oci:// model without a cache (an image volume), allow "
            f"only one replica, or select one node by {_HOSTNAME} in spec.podTemplate.spec.nodeSelector"
        ),
    )


def cache_refusal(resource: Resource, spec: Spec) -> tuple[BlockingCondition | None, BlockingCondition | None]:
    """Return the blocking and the non-blocking condition for a cache that replicas cannot share.

    A spec that was applied already is not refused: an upgrade of the operator must not stop what runs.
    """
    problem = unshared_cache(spec)
    if problem is None:
        return None, None
    if is_let_in(resource):
        return None, BlockingCondition(reason="CacheNotShared", message=str(problem))
    return BlockingCondition.invalid([problem]), None


def _is_on_one_node(spec: Spec) -> bool:
    """Return whether the pod template names the node of all replicas."""
    pod = _map(spec.pod_template, "spec")
    return bool(_map(pod, "nodeSelector").get(_HOSTNAME))


def _map(body: JSON, key: str) -> JSON:
    value = body.get(key)
    return value if isinstance(value, Mapping) else {}
