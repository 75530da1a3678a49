"""Which pods go first when a Deployment gets smaller: the deletion costs that make it so.

Pure; called by ``reconcile`` before the Deployment is changed.
"""

from collections.abc import Sequence

from quire_operator.domain.cluster_state.observed import Pod

_LOWEST = -1000


def deletion_costs(pods: Sequence[Pod], victims: Sequence[str]) -> dict[str, str | None]:
    """By pod, where it has another one: victims get the lowest costs, first to go lowest; old marks come off."""
    wanted = {name: str(_LOWEST + place) for place, name in enumerate(victims)}
    costs: dict[str, str | None] = {}
    for pod in pods:
        cost = wanted.get(pod.name)
        if not pod.deleting and (cost or "") != pod.deletion_cost:
            costs[pod.name] = cost
    return costs
