"""The requests with adapters: those that wait until their adapter is in host memory, and the use of each adapter.

Requests go on in the order of their arrival while host memory has no room for the adapter of an earlier one, so that
none waits for ever; otherwise each goes on as soon as its adapter is there. An adapter that is removed stays until its
last request has ended.
"""

from collections import Counter

from quire_engine.core.adapter_slots import AdapterSlots
from quire_engine.core.ports import AdapterEvent, AdapterStore
from quire_engine.core.sequence import Request


class AdapterRequests:
    """The requests with adapters of one engine."""

    def __init__(self, store: AdapterStore, slots: AdapterSlots) -> None:
        self._store = store
        self._slots = slots
        self._waiting: dict[int, Request] = {}
        """The requests by key, in the order of their arrival."""
        self._adapters: dict[int, int] = {}
        """The adapters that are held for requests that have not ended, by key."""
        self._live: Counter[int] = Counter()
        self._removed: set[int] = set()
        self._changed = False

    @property
    def waiting(self) -> list[Request]:
        """Return the requests whose adapter is not in host memory yet."""
        return list(self._waiting.values())

    def load(self, adapter: int, folder: str) -> None:
        self._store.add(adapter, folder)

    def unload(self, adapter: int) -> None:
        """Remove an adapter when its last request has ended."""
        self._removed.add(adapter)
        self._remove_unused(adapter)

    def add(self, request: Request) -> str | None:
        """Let a request wait for its adapter; return why it cannot, or None."""
        assert request.adapter is not None
        if not self._store.knows(request.adapter) or request.adapter in self._removed:
            return "the adapter was unloaded"
        self._waiting[request.key] = request
        self._live[request.adapter] += 1
        self._changed = True
        return None

    def advance(self) -> list[Request]:
        """Return the requests whose adapter is in host memory now, and stays there until they end."""
        if not self._changed or not self._waiting:
            return []
        self._changed = False
        ready = []
        for key, request in list(self._waiting.items()):
            adapter = request.adapter
            assert adapter is not None
            if key not in self._adapters:
                if not self._store.fetch(adapter):
                    break
                self._store.hold(adapter)
                self._adapters[key] = adapter
            if self._store.has(adapter):
                del self._waiting[key]
                ready.append(request)
        return ready

    def take_events(self) -> tuple[list[AdapterEvent], dict[int, str]]:
        """Return what was read since the last call, and the requests that fail because their adapter cannot be read."""
        events = self._store.take_events()
        failed: dict[int, str] = {}
        for event in events:
            self._changed = True
            if event.reason is None:
                continue
            for key, request in list(self._waiting.items()):
                if request.adapter == event.adapter:
                    failed[key] = f"the adapter cannot be served: {event.message}"
                    self.ended(key)
        return events, failed

    def ended(self, key: int) -> bool:
        """Record the end of a request; return whether it was still waiting for its adapter."""
        request = self._waiting.pop(key, None)
        adapter = self._adapters.pop(key, None)
        if adapter is not None:
            self._store.release(adapter)
        elif request is not None:
            adapter = request.adapter
        if adapter is not None:
            self._leave(adapter)
        return request is not None

    def _leave(self, adapter: int) -> None:
        self._changed = True
        self._live[adapter] -= 1
        if not self._live[adapter]:
            del self._live[adapter]
        self._remove_unused(adapter)

    def _remove_unused(self, adapter: int) -> None:
        if adapter in self._removed and not self._live[adapter]:
            self._removed.discard(adapter)
            self._slots.forget(adapter)
            self._store.remove(adapter)
