"""Other autoscalers that set the replicas of our Deployments, described by the name of their field manager.

``conditions`` and ``reconcile`` use it. ``managedFields`` names the process that wrote. For a HorizontalPodAutoscaler
that is the controller manager, which would not tell users what to look for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire_operator.domain.cluster_state.observed import Child, Ref

REPLICAS = ("f:spec", "f:replicas")
_CONTESTED_SECONDS = 1200.0
"""Longer than the longest pause before a repeated repair."""
_MANY = "A HorizontalPodAutoscaler, perhaps one that a KEDA ScaledObject made,"
_SCALERS = {
    "kube-controller-manager": (_MANY, "kubectl get hpa,scaledobject"),
    "horizontal-pod-autoscaler": (_MANY, "kubectl get hpa,scaledobject"),
    "keda": ("A KEDA ScaledObject", "kubectl get scaledobject"),
    "keda-operator": ("A KEDA ScaledObject", "kubectl get scaledobject"),
    "autoscaler": ("A Knative PodAutoscaler", "kubectl get podautoscaler"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherAutoscaler:
    """Another client that set the number of replicas ``times`` times; it is reported until ``until``."""

    manager: str
    times: int
    until: float

    @classmethod
    def after(cls, last: "OtherAutoscaler | None", *, manager: str, now: float) -> "OtherAutoscaler":
        """Return the count after another finding. Our next apply removes the evidence, so it is counted here."""
        times = last.times + 1 if last is not None and now < last.until else 1
        return cls(manager=manager, times=times, until=now + _CONTESTED_SECONDS)

    def is_on(self, now: float) -> bool:
        """Return True if the replicas are contested: a single change may be manual, a repeated one is an autoscaler."""
        return self.times > 1 and now < self.until


def other_autoscaler_message(manager: str, deployment: str, *, autoscaling: bool) -> str:
    """Return what ``manager`` is, what it does, and how to stop it."""
    who, look = _SCALERS.get(manager, (f"Another client ({manager})", ""))
    found = f" (it writes as {manager}; {look} shows it)" if look else ""
    instead = "remove spec.autoscaling and have it scale the LLMDeployment"
    return (
        f"{who} also sets the replicas of the Deployment {deployment}{found}: only one of them may. Remove it, or "
        + (instead if autoscaling else "have it scale the LLMDeployment instead")
    )


def following_replicas(children: Mapping[Ref, Child]) -> dict[Ref, Child]:
    """Return the children for mode Recommend, in which replicas that others set are no drift."""
    return {
        ref: replace(child, foreign=tuple(field for field in child.foreign if field.path != REPLICAS))
        for ref, child in children.items()
    }
