"""The pods to remove first when a Deployment gets smaller, expressed as pod deletion costs.

Pure; ``reconcile`` calls it before it changes the Deployment.
"""

from collections.abc import Sequence

from quire_operator.domain.cluster_state.observed import Pod

_LOWEST = -1000


def deletion_costs(pods: Sequence[Pod], victims: Sequence[str]) -> dict[str, str | None]:
    """Return the pods whose cost must change, with the new cost; None removes it. Earlier victims get lower costs."""
    wanted = {name: str(_LOWEST + place) for place, name in enumerate(victims)}
    costs: dict[str, str | None] = {}
    for pod in pods:
        cost = wanted.get(pod.name)
        if not pod.deleting and (cost or "") != pod.deletion_cost:
            costs[pod.name] = cost
    return costs
