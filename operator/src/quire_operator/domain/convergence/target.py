"""The number of replicas that the Deployment shall request: ``target(…) -> Target``, pure.

It stands between ``spec`` and ``desired``. Without autoscaling it is the number in the spec, or the last decision of an
autoscaler that was removed while spec.replicas stayed. With autoscaling it is the decision in force, else the persisted
one, else the current number, so that switching it on or restarting changes nothing by itself.
"""

from dataclasses import dataclass

from quire_operator.domain.autoscaling.history import ScalingRecord
from quire_operator.domain.autoscaling.schedules import recorded_bounds
from quire_operator.domain.cluster_state.observed import DeploymentState
from quire_operator.domain.resource import AutoscalingMode, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A number of replicas. ``persist`` is the number that status must record first; None if it already does."""

    replicas: int
    persist: int | None


def target(
    spec: Spec,
    *,
    decided: int | None,
    record: ScalingRecord | None,
    deployment: DeploymentState | None,
    kept: int | None = None,
    now: float,
) -> Target:
    """Return the target at ``now``, which decides the schedule that is in force.

    ``decided`` is the last decision of this process; None after a restart. ``kept`` is the decision that stays in force
    after the autoscaler was removed from the spec.
    """
    autoscaling = spec.autoscaling
    if autoscaling is None:
        return Target(replicas=spec.replicas if kept is None else kept, persist=None)
    running = spec.initial_replicas if deployment is None else deployment.replicas_asked
    if autoscaling.mode is AutoscalingMode.RECOMMEND:
        return Target(replicas=running, persist=None)
    persisted = None if record is None else record.desired_replicas
    wanted = next(number for number in (decided, persisted, running) if number is not None)
    bounds = recorded_bounds(autoscaling, record, now)
    replicas = bounds.clamp(wanted)
    if deployment is not None and deployment.is_rolling and replicas < running <= bounds.max_replicas:
        # While old replicas are replaced, the new ones must be able to take over the load of both.
        replicas = running
    # A number outside the bounds must not come back when the autoscaler is removed before its next decision.
    is_recorded = persisted is not None and bounds.clamp(persisted) == persisted
    return Target(replicas=replicas, persist=None if is_recorded else replicas)
