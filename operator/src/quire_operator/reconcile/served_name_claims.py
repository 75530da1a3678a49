"""The notification of LLMDeployments with one served name about each other's changes.

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
        self, store: Store, enqueue: Callable[[Key], None], adapters: Callable[[str], Sequence[Claim]] = lambda name: ()
    ) -> None:
        """``adapters`` returns the claims of LLMAdapters to a served name."""
        self._store, self._enqueue, self._adapters = store, enqueue, adapters
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

    def conflict(self, mine: Claim | None, scope: NameScope | None) -> str | None:
        """Return why requests for a claimed name go to another object; None if they do not."""
        if mine is None or scope is None:
            return None
        return conflict(mine, (*self._store.claims(mine.name), *self._adapters(mine.name)), scope)
