"""The Eviction API, which empties a node without violating a PodDisruptionBudget."""

from dataclasses import dataclass
from http import HTTPStatus

from e2e_support.errors import ApiError
from e2e_support.kube import Kube, namespaced
from e2e_support.objects import Pod


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of the API server to one eviction."""

    allowed: bool
    message: str
    """The reason for a rejection, or an empty string."""


def evict(kube: Kube, pod: Pod, *, dry_run: bool = False) -> Verdict:
    """Request an eviction; with ``dry_run`` only check it. Raise for any answer except success and 429."""
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
