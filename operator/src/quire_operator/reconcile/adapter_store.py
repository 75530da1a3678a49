"""The LLMAdapters that the watches have shown, by the LLMDeployment that they name."""

from collections.abc import Collection, Sequence
from typing import TypeVar

from quire_common.served_names import Claim
from quire_operator.domain.cluster_state.observed import Key, Resource, is_newer
from quire_operator.domain.manifests.adapters import deployment_key
from quire_operator.domain.manifests.served_names import recorded_adapter_claim

_At = TypeVar("_At", Key, str)


class AdapterStore:
    """The LLMAdapters by their own keys."""

    def __init__(self) -> None:
        self._adapters: dict[Key, Resource] = {}
        self._by_deployment: dict[Key, set[Key]] = {}
        self._by_name: dict[str, set[Key]] = {}
        self.is_listed = False
        """True if all were listed at least once: before that, an absent adapter may exist."""

    def uids(self) -> dict[Key, str]:
        """Return the uids of all LLMAdapters."""
        return {key: resource.uid for key, resource in self._adapters.items()}

    def get(self, key: Key) -> Resource | None:
        return self._adapters.get(key)

    def deployments(self) -> Collection[Key]:
        """Return the LLMDeployments that LLMAdapters name, which need not exist."""
        return list(self._by_deployment)

    def of(self, deployment: Key) -> Sequence[Resource]:
        """Return the LLMAdapters that name an LLMDeployment, by name."""
        return [self._adapters[key] for key in sorted(self._by_deployment.get(deployment, ()), key=str)]

    def claims(self, served_name: str) -> tuple[Claim, ...]:
        """Return the recorded claims of LLMAdapters to a served name."""
        found = (recorded_adapter_claim(self._adapters[key]) for key in self._by_name.get(served_name, ()))
        return tuple(claim for claim in found if claim is not None)

    def put(self, resource: Resource) -> bool:
        """Store an LLMAdapter and return True if it is newer than the stored one."""
        old = self._adapters.get(resource.key)
        if old is not None and not is_newer(resource.version, old.version):
            return False
        if old is not None:
            self._remove(old)
        self._adapters[resource.key] = resource
        self._by_deployment.setdefault(deployment_key(resource), set()).add(resource.key)
        if (claim := recorded_adapter_claim(resource)) is not None:
            self._by_name.setdefault(claim.name, set()).add(resource.key)
        return True

    def drop(self, key: Key, uid: str) -> None:
        """Remove a deleted LLMAdapter; a newer one with the same name stays."""
        old = self._adapters.get(key)
        if old is not None and old.uid == uid:
            self._remove(old)

    def _remove(self, resource: Resource) -> None:
        del self._adapters[resource.key]
        claim = recorded_adapter_claim(resource)
        _discard(self._by_deployment, deployment_key(resource), resource.key)
        if claim is not None:
            _discard(self._by_name, claim.name, resource.key)


def _discard(index: dict[_At, set[Key]], at: _At, key: Key) -> None:
    keys = index[at]
    keys.discard(key)
    if not keys:
        del index[at]
