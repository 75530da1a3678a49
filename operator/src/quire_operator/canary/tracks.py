"""Which spec serves and which one is tried: ``tracks(…) -> Tracked | BlockingCondition``, pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from quire_operator.api import Canary, Invalid, Spec
from quire_operator.api.fields import parse_time
from quire_operator.api.rollout import equal_load
from quire_operator.canary.analysis import GateResult, Tracks, hang, judge
from quire_operator.canary.manifests import Revision, kept_revisions
from quire_operator.canary.progress import HAS_CANARY, Phase, Record, Situation, advance, read, section, with_gates
from quire_operator.deployment.conditions import BlockingCondition, is_overdue
from quire_operator.deployment.plan import Target
from quire_operator.kube.objects import Child, DeploymentState, Pod, Ref, Resource, own_deployment

TemplateDigest = Callable[[Spec], str | None]
"""Returns the digest of a spec's pod template; None if it has no valid one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """The specs to render, and the record to persist before they are applied."""

    main: Spec
    """The spec of the stable replicas."""
    canary: Spec | None = None
    canary_replicas: int = 0
    record: Record | None = None
    """None without strategy Canary."""
    section: Mapping[str, object] = field(default_factory=dict)
    """``status.rollout``."""
    revisions: Mapping[str, Revision] = field(default_factory=dict)
    """The specs to keep in ControllerRevisions."""

    def held_up(self, goal: Target, live: DeploymentState | None) -> Target:
        """Return the target without a scale-down while a canary has requests, which may all come back at once."""
        has_requests = self.record is not None and self.record.phase in (Phase.CANARY, Phase.PROMOTING)
        if live is None or not has_requests or self.main.autoscaling is None:
            return goal
        return replace(goal, replicas=max(goal.replicas, min(live.replicas_asked, self.main.max_replicas)))


def tracks(
    resource: Resource,
    spec: Spec,
    children: Mapping[Ref, Child],
    *,
    model_revision: str,
    replicas: int,
    canary_pods: Sequence[Pod],
    figures: Callable[[str], Tracks | None],
    template_digest: TemplateDigest,
    now: float,
) -> Tracked | BlockingCondition:
    """Return the tracks of a resource.

    ``model_revision`` is the commit of its model, or "". ``replicas`` is the target of the stable replicas.
    ``figures`` returns what the gateways report about a revision of the canary.
    """
    policy, raw = spec.rollout.canary_policy, resource.body.get("spec")
    if policy is None or not isinstance(raw, Mapping):
        return Tracked(main=spec)
    current, kept = Revision(spec=raw, model_revision=model_revision), kept_revisions(resource, children)
    before = read(resource.status)
    known = {**kept, current.name: current}
    stable_name = current.name if before is None else before.stable
    if stable_name not in known:
        return _lost(stable_name, resource)
    stable = spec if stable_name == current.name else known[stable_name].parse(resource)
    if isinstance(stable, Invalid):
        return _unreadable(stable_name, stable)
    if stable.model.served_name != spec.model.served_name:
        return _renamed(stable, spec)
    wanted = template_digest(stable)
    differs = stable_name != current.name and wanted != template_digest(spec)
    found = figures(current.name)
    results = None if found is None else judge(policy, found)
    failure = _failure(before, canary_pods, own_deployment(resource, children, of_canary=True))
    if failure is None and found is not None and before is not None and before.phase is Phase.CANARY:
        failure = hang(found, before.weight_percent)
    situation = Situation(
        revision=current.name,
        differs=differs,
        replicas=replicas,
        canary_ready=_is_ready(before, resource, children, policy=policy, replicas=replicas),
        failure=failure,
        results=results,
        requests=0 if found is None else found.canary.requests,
        is_promoted=_is_promoted(own_deployment(resource, children), wanted),
        is_paused=spec.paused,
    )
    record = advance(before, situation, policy, now=now)
    specs = {stable_name: stable, current.name: spec}
    canary = specs.get(record.canary) if record.phase in HAS_CANARY else None
    return Tracked(
        main=specs[record.stable],
        canary=canary,
        canary_replicas=0 if canary is None else _wanted(record, policy, replicas),
        record=record,
        section=_section(record, results, resource, current.name, policy),
        revisions={name: known[name] for name in {record.stable, *([record.canary] if canary else [])}},
    )


def _section(
    record: Record, results: Sequence[GateResult] | None, resource: Resource, revision: str, policy: Canary
) -> Mapping[str, object]:
    # The figures of another revision are not those of this canary.
    is_about = revision in (record.canary, record.rejected) and record.phase is not Phase.STARTING
    found = section(record, results if is_about else None, compared_percent=policy.compared_percent)
    return with_gates(found, resource.status, record=record)


def _wanted(record: Record, policy: Canary, replicas: int) -> int:
    return equal_load(record.current_step(policy).weight_percent, replicas)[0]


def _is_ready(
    before: Record | None, resource: Resource, children: Mapping[Ref, Child], *, policy: Canary, replicas: int
) -> bool:
    """Return whether the Deployment of the canary has applied this revision and is ready for its step."""
    live = own_deployment(resource, children, of_canary=True)
    if before is None or live is None or live.template_digest != before.canary:
        return False
    wanted = _wanted(before, policy, replicas)
    return not live.is_rolling and live.replicas_asked >= wanted and live.ready >= wanted > 0


def _is_promoted(live: DeploymentState | None, wanted: str | None) -> bool:
    """Return whether all stable replicas run the template of the stable revision."""
    if live is None or live.is_held or live.is_rolling or live.template_digest != wanted:
        return False
    return live.ready >= live.replicas_asked and live.replicas == live.replicas_asked


def _failure(before: Record | None, pods: Sequence[Pod], live: DeploymentState | None) -> str | None:
    """Return why the replicas of a canary are broken; None if they are not.

    While a canary starts, replicas of an earlier one may still be there.
    """
    if before is None or live is None or live.template_digest != before.canary:
        return None
    is_starting = before.phase is Phase.STARTING
    for pod in pods:
        if is_starting and (parse_time(pod.created) or 0.0) < int(before.started):
            continue
        for container in pod.containers:
            if container.restarts and not container.init and not pod.deleting:
                why = container.ended_reason or "it ended"
                code = f" with exit code {container.ended_code}" if container.ended_code else ""
                return f"container {container.name} of pod {pod.name} restarted: {why}{code}"
        if pod.phase == "Failed" and not pod.deleting:
            return f"pod {pod.name} failed: {pod.failed or 'see its log'}"
    if live.observed_generation >= live.generation and is_overdue(live):
        return "its replicas did not become ready within spec.rollout.progressDeadline"
    return None


_WITHOUT = "set spec.rollout.strategy to RollingUpdate to apply this spec without a canary"


def _lost(revision: str, resource: Resource) -> BlockingCondition:
    name = f"{resource.key.name}-{revision}"
    return BlockingCondition(
        reason="StableRevisionLost",
        message=f"ControllerRevision {name} with the stable spec was deleted, so that the replicas stay as they are; "
        f"restore it, change the spec back, or {_WITHOUT}",
    )


def _unreadable(revision: str, found: Invalid) -> BlockingCondition:
    return BlockingCondition(
        reason="StableRevisionInvalid",
        message=f"this operator rejects the stable revision {revision}, so that the replicas stay as they are: "
        f"{found}; {_WITHOUT}",
    )


def _renamed(stable: Spec, spec: Spec) -> BlockingCondition:
    return BlockingCondition(
        reason="InvalidSpec",
        message=f"spec.model.servedName: a canary serves the same name as the stable revision, "
        f"{stable.model.served_name!r}, got {spec.model.served_name!r}; {_WITHOUT}",
    )
