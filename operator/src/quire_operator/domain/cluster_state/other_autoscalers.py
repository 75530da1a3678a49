"""Who else sets the number of replicas of a Deployment of ours: in words, from the field manager's name.

Used by ``conditions`` and ``reconcile``. ``managedFields`` names the process that wrote, which for a
HorizontalPodAutoscaler is the controller manager, so that few would know what to look for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire_operator.domain.cluster_state.observed import Child, Ref

REPLICAS = ("f:spec", "f:replicas")
_CONTESTED_SECONDS = 1200.0
"""Longer than what comes back is ever left as it is."""
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
    """Somebody else set the number of replicas so many ``times``; to be told of until ``until``."""

    manager: str
    times: int
    until: float

    @classmethod
    def after(cls, last: "OtherAutoscaler | None", *, manager: str, now: float) -> "OtherAutoscaler":
        """The evidence is gone with our next apply, but what fights for the field comes back."""
        times = last.times + 1 if last is not None and now < last.until else 1
        return cls(manager=manager, times=times, until=now + _CONTESTED_SECONDS)

    def is_on(self, now: float) -> bool:
        """Once is a hand; again is a machine that will not stop."""
        return self.times > 1 and now < self.until


def other_autoscaler_message(manager: str, deployment: str, *, autoscaling: bool) -> str:
    """Whom ``manager`` stands for, what it does, and what would end it."""
    who, look = _SCALERS.get(manager, (f"Another client ({manager})", ""))
    found = f" (it writes as {manager}; {look} shows it)" if look else ""
    instead = "remove spec.autoscaling and have it scale the LLMDeployment"
    return (
        f"{who} also sets the replicas of the Deployment {deployment}{found}: only one of them may. Remove it, or "
        + (instead if autoscaling else "have it scale the LLMDeployment instead")
    )


def following_replicas(children: Mapping[Ref, Child]) -> dict[Ref, Child]:
    """The children as they are to one who only recommends: that others set the replicas is no drift."""
    return {
        ref: replace(child, foreign=tuple(field for field in child.foreign if field.path != REPLICAS))
        for ref, child in children.items()
    }
