"""The Eviction API, which empties a node without violating a PodDisruptionBudget."""

from http import HTTPStatus

from e2e_support.errors import ApiError
from e2e_support.kube import Kube, namespaced
from e2e_support.objects import Pod


def evict(kube: Kube, pod: Pod, *, dry_run: bool = False) -> str:
    """Request an eviction; with ``dry_run`` only check it. Return the reason of a refusal, or an empty string."""
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
            return str(error)
        raise
    return ""
