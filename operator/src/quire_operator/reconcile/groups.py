"""The part of a pass that only replicas which are groups of pods need: their Secret, and a trial of their template.

``reconciler`` uses it before it applies a LeaderWorkerSet. The Secret is created and never read, so that the operator
needs no permission to see Secrets. Its name changes with the pod template, so each revision has a secret of its own.
"""

import secrets
from collections.abc import Sequence

from quire_operator.domain.cluster_state.observed import Pod, Ref, Resource
from quire_operator.domain.manifests.desired import group_secret_name
from quire_operator.domain.manifests.objects import Manifest, Manifests, labels, owner_reference
from quire_operator.domain.manifests.pod_template import GROUP_SECRET_KEY
from quire_operator.domain.status.conditions import BlockingCondition
from quire_operator.ports import Cluster, Forbidden, QuotaExceeded, Refused
from quire_operator.reconcile.state import ReconcileState, rejection

_SECRET_BYTES = 32


class Groups:
    """The preparation of LeaderWorkerSets."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def prepare(
        self, resource: Resource, state: ReconcileState, manifests: Manifests, workers: Sequence[Pod]
    ) -> BlockingCondition | None:
        """Create the Secret of this revision and try its template. Return why the groups cannot be created, or None.

        ``workers`` show whether the Secret was deleted. Raises ``ClusterError``.
        """
        name = group_secret_name(manifests)
        if name is None:
            return None
        try:
            if state.tried_template != manifests.template_digest:
                what = "a dry run of the pods of this spec"
                await self._cluster.check_template(resource.key, manifests.trial)
                state.tried_template = manifests.template_digest
            if state.group_secret != name or any(_lacks(pod, name) for pod in workers):
                what = f"Secret {name}, which the pods of a group share"
                await self._cluster.create_secret(resource.key, _secret(resource, name))
                state.group_secret = name
        except (Refused, QuotaExceeded, Forbidden) as error:
            return rejection(what, error)
        return None


def _lacks(pod: Pod, secret: str) -> bool:
    """Return True if a container waits for this Secret."""
    return any(secret in c.waiting_message and "not found" in c.waiting_message for c in pod.containers)


def _secret(resource: Resource, name: str) -> Manifest:
    body: dict[str, object] = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "namespace": resource.key.namespace,
            "labels": labels(resource.key.name),
            "ownerReferences": [owner_reference(resource.key.name, resource.uid)],
        },
        "type": "Opaque",
        "immutable": True,
        "stringData": {GROUP_SECRET_KEY: secrets.token_urlsafe(_SECRET_BYTES)},
    }
    return Manifest(ref=Ref("Secret", name), body=body)
