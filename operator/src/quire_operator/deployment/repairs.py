"""The delay before changes of other clients are reverted, and the description of those that set replicas. Pure.

The delay grows each time a change comes back. Without it, two controllers of one field, or two operators that were
started by mistake with different Leases, would write as fast as their watches report changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire_operator.kube.objects import Child, Ref

STATUS = Ref("status", "")
"""The status of the LLMDeployment itself, which is repaired like its children."""
_AT_ONCE = 3
_MAX_SECONDS = 600.0
_FORGOTTEN_SECONDS = 2 * _MAX_SECONDS
_BY_A_TWIN = "another process writes as field manager quire; check for a second operator with another Lease name"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repairs:
    """The recent repairs of one change of one object."""

    times: int
    last: float

    def wait_seconds(self, now: float) -> float:
        if self.are_forgotten(now) or self.times < _AT_ONCE:
            return 0.0
        pause = min(_MAX_SECONDS, 2.0 ** (self.times - _AT_ONCE + 1))
        return max(0.0, self.last + pause - now)

    def are_forgotten(self, now: float) -> bool:
        # After the clock was set back, the wait must not be longer than its maximum.
        return not 0.0 <= now - self.last < _FORGOTTEN_SECONDS


class RepairLog:
    """The repairs of one LLMDeployment, in memory only: after a restart the first repairs are immediate.

    A change is identified by the object, the fields and their manager, if these are known. So a person who tries
    different values is not mistaken for a controller that repeats one change.
    """

    def __init__(self) -> None:
        self._repairs: dict[tuple[Ref, str], _Repairs] = {}

    def wait_seconds(self, ref: Ref, what: str, now: float) -> float:
        """Return how many seconds the next repair of this change has to wait; 0 for none."""
        known = self._repairs.get((ref, what))
        return 0.0 if known is None else known.wait_seconds(now)

    def note(self, ref: Ref, what: str, now: float) -> None:
        """Record a repair at this time."""
        self._repairs = {change: known for change, known in self._repairs.items() if not known.are_forgotten(now)}
        known = self._repairs.get((ref, what))
        self._repairs[ref, what] = _Repairs(times=1 if known is None else known.times + 1, last=now)

    def contests(self, now: float) -> str:
        """Return a message about changes that come back repeatedly, or "". One or two are taken for manual changes."""
        found = []
        for (ref, what), known in self._repairs.items():
            if known.times >= _AT_ONCE and not known.are_forgotten(now):
                whose = "its status" if ref == STATUS else str(ref)
                found.append(f"{whose} is repeatedly changed by another client and reverted: {what or _BY_A_TWIN}")
        return "; ".join(found)


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
