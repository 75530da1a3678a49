"""The claims of LLMDeployments to served names: conflicts, and the notification of others about changes.

``reconciler`` calls it around each pass: the claim of one LLMDeployment determines the conditions of others.
"""

from collections.abc import Callable, Sequence

from quire_common.served_names import Claim, NameScope
from quire_operator.domain.cluster_state.observed import Key
from quire_operator.domain.manifests.served_names import conflict, key_of
from quire_operator.reconcile.store import Store


class ServedNameClaims:
    """The claims at the last check of each LLMDeployment."""

    def __init__(
        self,
        store: Store,
        enqueue: Callable[[Key], None],
        scope: Callable[[], NameScope | None],
        adapters: Callable[[str], Sequence[Claim]] = lambda name: (),
    ) -> None:
        """``scope`` is None without gateways; ``adapters`` returns the claims of LLMAdapters to a served name."""
        self._store, self._enqueue, self._scope, self._adapters = store, enqueue, scope, adapters
        self._known: dict[Key, Claim] = {}

    def forget(self) -> None:
        """Forget everything, because another process led and nothing was checked."""
        self._known.clear()

    def check(self, key: Key) -> None:
        """Enqueue all LLMDeployments that a change of this one's claim affects."""
        claim, before = self._store.claim(key), self._known.get(key)
        if claim == before:
            return
        if claim is None:
            del self._known[key]
        else:
            self._known[key] = claim
        for name in {known.name for known in (claim, before) if known is not None}:
            for other in self._store.claims(name):
                if key_of(other) != key:
                    self._enqueue(key_of(other))

    def conflict(self, mine: Claim | None) -> str | None:
        """Return why requests for a claimed name go to another object; None if they do not."""
        scope = self._scope()
        if mine is None or scope is None:
            return None
        return conflict(mine, (*self._store.claims(mine.name), *self._adapters(mine.name)), scope)

    def requested_name(self, key: Key) -> str | None:
        """Return the model name with which gateways send requests here; None if they send none."""
        claim = self._store.claim(key)
        if claim is None or self.conflict(claim) is not None:
            return None
        return claim.requested_as(self._scope() or NameScope.CLUSTER)
