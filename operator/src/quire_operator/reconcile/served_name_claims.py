"""Tells those who ask for one served name of each other's coming and going.

Called by ``reconcile`` around each pass: what one LLMDeployment's Service claims decides on the conditions of others.
"""

from collections.abc import Callable

from quire_operator.domain.cluster_state.observed import Key
from quire_operator.domain.manifests.served_names import Claim, conflict
from quire_operator.reconcile.store import Store


class ServedNameClaims:
    """Knows what each claimed when it was looked at last."""

    def __init__(self, store: Store, enqueue: Callable[[Key], None]) -> None:
        self._store, self._enqueue = store, enqueue
        self._known: dict[Key, Claim] = {}

    def forget(self) -> None:
        """While another process led nobody looked: who went meanwhile would be known for ever."""
        self._known.clear()

    def look(self, key: Key) -> None:
        """Enqueue those for whom something changed, if what ``key`` claims did."""
        claim, before = self._store.claim(key), self._known.get(key)
        if claim == before:
            return
        if claim is None:
            del self._known[key]
        else:
            self._known[key] = claim
        for name in {known.served_name for known in (claim, before) if known is not None}:
            for rival in self._store.claims(name):
                if rival.key != key:
                    self._enqueue(rival.key)

    def conflict(self, key: Key) -> str | None:
        """Why requests for its served name go to another; None if they don't."""
        claim = self._store.claim(key)
        return None if claim is None else conflict(claim, self._store.claims(claim.served_name))
