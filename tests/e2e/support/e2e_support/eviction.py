"""The Eviction API: how a node is emptied without going below a PodDisruptionBudget."""

from dataclasses import dataclass
from http import HTTPStatus

from e2e_support.errors import ApiError
from e2e_support.kube import Kube, namespaced
from e2e_support.objects import Pod


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the API server said of one eviction."""

    allowed: bool
    message: str
    """Why not; empty if it is allowed."""


def evict(kube: Kube, pod: Pod, *, dry_run: bool = False) -> Verdict:
    """Ask for it; with ``dry_run`` only whether it would be granted. Raises for any answer but yes and 429."""
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "deleteOptions": {"preconditions": {"uid": pod.uid}, **({"dryRun": ["All"]} if dry_run else {})},
    }
    try:
        kube.create(f"{namespaced(pod.namespace, 'pods', pod.name)}/eviction", body)
    except ApiError as error:
        if error.status == HTTPStatus.TOO_MANY_REQUESTS:
            return Verdict(allowed=False, message=str(error))
        raise
    return Verdict(allowed=True, message="")
