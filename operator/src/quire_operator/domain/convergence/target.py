"""How many replicas the Deployment shall ask for: ``target(…) -> Target``, pure.

Between ``spec`` and ``desired``. Without autoscaling it is what the spec says, or what an
autoscaler decided that was removed while spec.replicas stayed. With it: the decision in force, else the
one that was persisted, else what runs now, so that switching it on or restarting changes nothing by itself.
"""

from dataclasses import dataclass

from quire_operator.domain.autoscaling.history import ScalingRecord
from quire_operator.domain.autoscaling.schedules import recorded_bounds
from quire_operator.domain.cluster_state.observed import DeploymentState
from quire_operator.domain.resource import AutoscalingMode, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """``persist`` is what status has to say before the Deployment is changed; None where it says so already."""

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

    ``decided`` is what this process last decided; None after a restart. ``kept`` is what stays in force of an
    autoscaler that was removed from the spec.
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
        # While old replicas are replaced, the new ones are counted on for what both do.
        replicas = running
    return Target(replicas=replicas, persist=replicas if persisted is None else None)
