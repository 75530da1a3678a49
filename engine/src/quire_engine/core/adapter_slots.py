"""The slots for adapters on the device: which adapter is in which slot, and who may go on when all are in use.

A running sequence keeps its adapter in its slot. A slot whose adapter no sequence uses is idle: the adapter stays there
for later requests, and the one that has been idle longest goes first when another adapter needs a slot.
``AdapterQueue`` lets other waiting sequences overtake one that lacks a slot. A sequence that was overtaken too often
makes a slot *drain*: no further sequence is admitted for the adapter there until its running ones have ended.

Nothing here knows tensors: the runner copies what ``take_loads`` names.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence as Many

from quire_engine.core.batch import AdapterLoad
from quire_engine.core.policy import NestedPolicy, WaitingQueue
from quire_engine.core.ports import AdapterEvent, AdapterStore
from quire_engine.core.sequence import Request, Sequence

OVERTAKEN_AT_MOST = 16
"""The sequences that may overtake one that lacks a slot before a slot drains for it."""


class AdapterSlots:
    """The slots of one device. Adapters are known by their numbers; None is the base model, which needs no slot."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._slots: dict[int, int] = {}
        self._running: Counter[int] = Counter()
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._draining: frozenset[int] = frozenset()
        self._loads: list[AdapterLoad] = []
        self.count = count
        self.version = 0
        """It changes whenever an adapter that could not be admitted might be."""

    @property
    def loaded(self) -> list[int]:
        """Return the adapters that are in slots."""
        return list(self._slots)

    @property
    def running(self) -> list[int]:
        """Return the adapters that running sequences use."""
        return list(self._running)

    def admits(self, adapter: int | None) -> bool:
        """Return whether a sequence with this adapter may run now."""
        if adapter is None:
            return True
        if adapter in self._draining:
            return False
        return adapter in self._slots or bool(self._free) or bool(self._idle)

    def acquire(self, adapter: int | None) -> int:
        """Return the slot of the adapter of a sequence that runs from now on, -1 for the base model."""
        if adapter is None:
            return -1
        self._running[adapter] += 1
        slot = self._slots.get(adapter)
        if slot is not None:
            self._idle.pop(adapter, None)
            return slot
        if not self._free:
            longest_idle, _ = self._idle.popitem(last=False)
            self._free.append(self._slots.pop(longest_idle))
        slot = self._slots[adapter] = self._free.pop()
        self._loads.append(AdapterLoad(slot=slot, adapter=adapter))
        return slot

    def release(self, adapter: int | None) -> None:
        """Record that a sequence with this adapter no longer runs."""
        if adapter is None:
            return
        self._running[adapter] -= 1
        if not self._running[adapter]:
            del self._running[adapter]
            self._idle[adapter] = None
            self._draining -= {adapter}
            self.version += 1

    def forget(self, adapter: int) -> None:
        """Empty the slot of an adapter that no sequence has any more."""
        assert adapter not in self._running
        if adapter in self._slots:
            del self._idle[adapter]
            self._free.append(self._slots.pop(adapter))
            self.version += 1

    def drain(self, count: int) -> None:
        """Drain ``count`` slots, those with the fewest running sequences, and stop to drain the others."""
        before = self._draining
        fewest = sorted(self._running, key=lambda adapter: (self._running[adapter], adapter not in before, adapter))
        self._draining = frozenset(fewest[:count])
        if before - self._draining:
            self.version += 1

    def take_loads(self) -> list[AdapterLoad]:
        """Return the adapters to copy into slots before the next step, in order."""
        loads, self._loads = self._loads, []
        return loads

    def check_integrity(self, running: Many[Sequence]) -> None:
        """Raise AssertionError unless slots are neither lost nor in use twice, and the counts are right."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(self.count)), "slots are lost"
        used = Counter(sequence.request.adapter for sequence in running if sequence.request.adapter is not None)
        assert used == self._running
        assert set(self._slots) == {*self._running, *self._idle} and not self._running.keys() & self._idle.keys()


class AdapterQueue:
    """A ``Policy`` around another one: its first sequence has a slot, or needs none.

    Sequences that lack one wait by adapter, and return to the other policy, with their place, when their adapter gets a
    slot. No operation visits the whole queue.
    """

    def __init__(self, policy: NestedPolicy, slots: AdapterSlots) -> None:
        self._policy = policy
        self._slots = slots
        self._blocked: dict[int, WaitingQueue] = {}
        self._overtaken: dict[int, int] = {}
        """The number of sequences that overtook the first one that waits, by adapter."""
        self._adapter_of: dict[int, int] = {}
        """The adapters of the blocked sequences, by key."""
        self._seen = slots.version
        # The other policy alone decides these.
        self.order = policy.order
        self.push = policy.push
        self.arrange = policy.arrange
        self.displaces = policy.displaces
        self.admitted = policy.admitted
        self.record_sampled = policy.record_sampled

    def __len__(self) -> int:
        return len(self._policy) + len(self._adapter_of)

    @property
    def num_tokens(self) -> int:
        """The tokens that the waiting sequences have to compute before they sample another one."""
        return self._policy.num_tokens + sum(queue.num_tokens for queue in self._blocked.values())

    def first(self) -> Sequence | None:
        if self._seen != self._slots.version:
            self._return_admissible()
        while (sequence := self._policy.first()) is not None:
            adapter = sequence.request.adapter
            if adapter is None or self._slots.admits(adapter):
                return sequence
            self._policy.set_aside()
            self._blocked.setdefault(adapter, WaitingQueue()).push(sequence)
            self._overtaken.setdefault(adapter, 0)
            self._adapter_of[sequence.key] = adapter
        return None

    def _return_admissible(self) -> None:
        """Return the sequences of the adapter that may run and whose first sequence is the earliest."""
        heads = [
            (head.order, adapter)
            for adapter, queue in self._blocked.items()
            if self._slots.admits(adapter) and (head := queue.first()) is not None
        ]
        if not heads:
            self._seen = self._slots.version
            return
        _, adapter = min(heads)
        queue = self._blocked.pop(adapter)
        del self._overtaken[adapter]
        while len(queue):
            sequence = queue.pop()
            del self._adapter_of[sequence.key]
            self._policy.put_back(sequence)

    def pop(self) -> Sequence:
        sequence = self._policy.pop()
        for adapter, queue in self._blocked.items():
            head = queue.first()
            if head is not None and head.order[1] < sequence.order[1]:
                self._overtaken[adapter] += 1
        self._drain()
        return sequence

    def _drain(self) -> None:
        """Drain a slot for each adapter that was overtaken too often."""
        self._slots.drain(sum(count >= OVERTAKEN_AT_MOST for count in self._overtaken.values()))

    def discard(self, sequence: Sequence) -> None:
        adapter = self._adapter_of.pop(sequence.key, None)
        if adapter is None:
            self._policy.discard(sequence)
            return
        self._policy.discard_aside(sequence)
        queue = self._blocked[adapter]
        queue.discard(sequence)
        if not len(queue):
            del self._blocked[adapter], self._overtaken[adapter]
            self._drain()

    def grew(self, sequence: Sequence, count: int) -> None:
        adapter = self._adapter_of.get(sequence.key)
        (self._policy if adapter is None else self._blocked[adapter]).grew(sequence, count)

    def sequences(self) -> list[Sequence]:
        blocked = [sequence for queue in self._blocked.values() for sequence in queue.sequences()]
        return [*self._policy.sequences(), *blocked]


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
