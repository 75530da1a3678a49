"""The decision whether replicas can share the volume that caches their model. Pure.

A ReadWriteOnce volume can be mounted on one node only, so that replicas on other nodes never start. ``reconcile`` and
``admission`` refuse a spec that may lead to that. A spec that an older operator applied goes on, because its replicas
may all be on one node.
"""

from quire_operator.domain.resource import RolloutStrategy, Spec
from quire_operator.domain.resource.deployment import HOSTNAME
from quire_operator.domain.resource.fields import Problem
from quire_operator.domain.status.conditions import BlockingCondition


def unshared_cache(spec: Spec) -> Problem | None:
    """Return why replicas may be unable to mount the cache; None if they can."""
    if not spec.has_one_node_cache:
        return None
    most = spec.max_replicas
    if spec.parallelism.is_group and most:
        why = f"a replica has {spec.parallelism.nodes} pods: those on other nodes never start"
        remedy = "set spec.parallelism.nodes to 1"
    elif most >= 2:
        why = f"up to {most} replicas may run: those on other nodes never start"
        remedy = "allow only one replica"
    elif spec.rollout.strategy is RolloutStrategy.CANARY and most:
        why = "strategy Canary runs the old and the new replica at once: a canary on another node never starts"
        remedy = "set spec.rollout.strategy to RollingUpdate"
    else:
        return None
    return Problem(
        path="spec.model.cache.accessMode",
        message=(
            f"a ReadWriteOnce volume can be mounted on one node only, but {why}. Set ReadWriteMany, use an oci:// "
            f"model without a cache, {remedy}, or select one node by {HOSTNAME} in "
            "spec.podTemplate.spec.nodeSelector"
        ),
    )


def cache_refusal(spec: Spec, *, was_let_in: bool) -> tuple[BlockingCondition | None, BlockingCondition | None]:
    """Return the blocking and the non-blocking condition for a cache that replicas cannot share.

    A spec that was applied already is not refused: an upgrade of the operator must not stop what runs.
    """
    problem = unshared_cache(spec)
    if problem is None:
        return None, None
    if was_let_in:
        return None, BlockingCondition(reason="CacheNotShared", message=str(problem))
    return BlockingCondition.invalid([problem]), None
