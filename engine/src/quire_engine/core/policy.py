"""Scheduling policies: the order in which waiting sequences are admitted and running ones keep their blocks.

A policy owns the waiting sequences. ``fcfs`` and ``priority`` assign each request its place once, at arrival; ``fair``
decides again as tenants are served. ``arrival`` counts up, so no two places are equal.
"""

from collections import Counter
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from typing import Protocol

from quire_engine.core.options import PolicyName
from quire_engine.core.sequence import Order, Request, Sequence


class WaitingQueue:
    def __init__(self) -> None:
        self._heap: list[tuple[Order, Sequence]] = []
        self._length = 0
        self.num_tokens = 0
        """The tokens that these sequences have to compute before they sample another one."""

    def __len__(self) -> int:
        return self._length

    def push(self, sequence: Sequence) -> None:
        heappush(self._heap, (sequence.order, sequence))
        self._length += 1
        self.num_tokens += sequence.num_tokens - sequence.num_computed

    def first(self) -> Sequence | None:
        heap = self._heap
        while heap and heap[0][1].finished:
            heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Sequence:
        sequence = self.first()
        assert sequence is not None
        heappop(self._heap)
        self._forget(sequence)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Remove a waiting sequence that is ``finished``."""
        assert sequence.finished and sequence.row is None
        self._forget(sequence)
        if len(self._heap) > 2 * self._length + 64:
            self._heap = [entry for entry in self._heap if not entry[1].finished]
            heapify(self._heap)

    def grew(self, sequence: Sequence, count: int) -> None:
        """Count so many more tokens of a waiting sequence."""
        assert sequence.row is None
        self.num_tokens += count

    def _forget(self, sequence: Sequence) -> None:
        self._length -= 1
        self.num_tokens -= sequence.num_tokens - sequence.num_computed

    def sequences(self) -> list[Sequence]:
        """Return all of them, in no order; for checks and reports, not for the step."""
        return [sequence for _, sequence in self._heap if not sequence.finished]


# The paper's weights: a sampled token occupies the model for longer than a prompt token.
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2

_order = attrgetter("order")
_tenant_name = attrgetter("request.tenant")


class _Tenant:
    __slots__ = ("aside", "counter", "is_listed", "queue", "turn")

    def __init__(self, counter: int) -> None:
        self.counter = counter
        self.queue = WaitingQueue()
        self.aside = 0
        """The sequences that wait elsewhere: with some, the tenant is not idle."""
        self.turn = 0
        """The time at which it was last served or started to wait: among equal counters the oldest goes first."""
        self.is_listed = False
        """True if it has its entry in the heap of tenants that may have waiting requests."""


class FairShare:
    """A policy whose operations take O(log n) of sequences and tenants; ``arrange`` sorts the running ones.

    ``_level`` is the counter of the tenant served last, and never falls. A tenant without waiting requests that is not
    ahead of the level would be raised to it anyway, so it is forgotten.
    """

    def __init__(self) -> None:
        self._tenants: dict[str | None, _Tenant] = {}
        # Counter, turn and arrival at the time of entry: all three only grow.
        self._heap: list[tuple[int, int, int, _Tenant]] = []
        self._turns = 0
        self._level = 0
        self._length = 0
        self._forget_at = 64
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._length

    def order(self, request: Request, *, arrival: int) -> Order:
        return (0, arrival)

    def push(self, sequence: Sequence) -> None:
        sequence.order = (0, sequence.order[1])
        tenant = self._tenant(sequence.request.tenant)
        if not tenant.queue and not tenant.aside:
            leader = self._leader()
            tenant.counter = max(tenant.counter, self._level if leader is None else leader.counter)
            # Ahead of the tenant served last, behind those that have waited since.
            tenant.turn = 2 * self._turns
        self._enqueue(tenant, sequence)

    def _enqueue(self, tenant: _Tenant, sequence: Sequence) -> None:
        tenant.queue.push(sequence)
        if not tenant.is_listed:
            heappush(self._heap, (tenant.counter, tenant.turn, sequence.order[1], tenant))
            tenant.is_listed = True
        self._length += 1
        self.num_tokens += sequence.num_tokens - sequence.num_computed

    def first(self) -> Sequence | None:
        leader = self._leader()
        return None if leader is None else leader.queue.first()

    def pop(self) -> Sequence:
        leader = self._leader()
        assert leader is not None
        sequence = leader.queue.pop()
        sequence.order = (leader.counter, sequence.order[1])
        self._level = max(self._level, leader.counter)
        self._turns += 1
        leader.turn = 2 * self._turns + 1
        self._left(sequence)
        return sequence

    def set_aside(self) -> Sequence:
        leader = self._leader()
        assert leader is not None
        sequence = leader.queue.pop()
        sequence.order = (leader.counter, sequence.order[1])
        leader.aside += 1
        self._left(sequence)
        return sequence

    def put_back(self, sequence: Sequence) -> None:
        sequence.order = (0, sequence.order[1])
        tenant = self._tenants[sequence.request.tenant]
        tenant.aside -= 1
        self._enqueue(tenant, sequence)

    def discard_aside(self, sequence: Sequence) -> None:
        self._tenants[sequence.request.tenant].aside -= 1

    def discard(self, sequence: Sequence) -> None:
        self._tenants[sequence.request.tenant].queue.discard(sequence)
        self._left(sequence)

    def grew(self, sequence: Sequence, count: int) -> None:
        self._tenants[sequence.request.tenant].queue.grew(sequence, count)
        self.num_tokens += count

    def _left(self, sequence: Sequence) -> None:
        self._length -= 1
        self.num_tokens -= sequence.num_tokens - sequence.num_computed

    def sequences(self) -> list[Sequence]:
        return [sequence for tenant in self._tenants.values() for sequence in tenant.queue.sequences()]

    def _leader(self) -> _Tenant | None:
        """Return the tenant with the smallest counter among those with waiting requests."""
        heap = self._heap
        while heap:
            tenant = heap[0][-1]
            head = tenant.queue.first()
            if head is None:
                heappop(heap)
                tenant.is_listed = False
            elif heap[0] != (now := (tenant.counter, tenant.turn, head.order[1], tenant)):
                heapreplace(heap, now)
            else:
                return tenant
        return None

    def arrange(self, running: list[Sequence]) -> None:
        """Sort the running sequences: those of the tenant that was served most are last, and are preempted first."""
        for sequence in running:
            sequence.order = (self._counter(sequence), sequence.order[1])
        running.sort(key=_order)

    def displaces(self, waiting: Sequence, running: Sequence) -> bool:
        """Return whether the tenant would still be behind after it was served and the other one recomputed."""
        lost = PROMPT_WEIGHT * (waiting.num_tokens + running.num_computed)
        return self._counter(waiting) + lost < self._counter(running)

    def admitted(self, sequence: Sequence) -> None:
        tenant = self._tenant(sequence.request.tenant)
        tenant.counter += PROMPT_WEIGHT * (sequence.num_prompt - sequence.num_cached)
        if not self._length:
            self._level = max(self._level, tenant.counter)

    def record_sampled(self, sequences: list[Sequence]) -> None:
        for name, count in Counter(map(_tenant_name, sequences)).items():
            self._tenant(name).counter += OUTPUT_WEIGHT * count

    def _counter(self, sequence: Sequence) -> int:
        tenant = self._tenants.get(sequence.request.tenant)
        return self._level if tenant is None else tenant.counter

    def _tenant(self, name: str | None) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= self._forget_at:
                self._forget()
            tenant = self._tenants[name] = _Tenant(self._level)
        return tenant

    def _forget(self) -> None:
        kept = {
            name: tenant
            for name, tenant in self._tenants.items()
            if tenant.is_listed or tenant.aside or tenant.counter > self._level
        }
        self._tenants, self._forget_at = kept, 2 * len(kept) + 64


class Policy(Protocol):
    """A scheduling policy. No operation visits the whole queue."""

    @property
    def num_tokens(self) -> int:
        """The tokens that the waiting sequences have to compute before they sample another one."""
        ...

    def __len__(self) -> int: ...

    def order(self, request: Request, *, arrival: int) -> Order:
        """Return the sequence's place at its arrival."""
        ...

    def push(self, sequence: Sequence) -> None: ...

    def first(self) -> Sequence | None: ...

    def pop(self) -> Sequence: ...

    def discard(self, sequence: Sequence) -> None:
        """Remove a waiting sequence that is ``finished``."""
        ...

    def grew(self, sequence: Sequence, count: int) -> None:
        """Record that a waiting sequence has so many more tokens, from a step that was in flight at its preemption."""
        ...

    def sequences(self) -> list[Sequence]:
        """Return all waiting sequences, in no order; for checks and reports, not for the step."""
        ...

    def arrange(self, running: list[Sequence]) -> None:
        """Sort the running sequences before a step: the first is served first, the last is preempted first."""
        ...

    def displaces(self, waiting: Sequence, running: Sequence) -> bool:
        """Return whether a sequence without room may take that of a running one."""
        ...

    def admitted(self, sequence: Sequence) -> None:
        """Record the first admission of a sequence; ``num_cached`` tokens of its prompt were in the cache."""
        ...

    def record_sampled(self, sequences: list[Sequence]) -> None:
        """Record that each of these sequences sampled a token."""
        ...


class NestedPolicy(Policy, Protocol):
    """A policy inside ``AdapterQueue``, in which sequences wait for a slot."""

    def set_aside(self) -> Sequence:
        """Remove the first sequence without serving it: it waits elsewhere, for ``put_back`` or ``discard_aside``."""
        ...

    def put_back(self, sequence: Sequence) -> None:
        """Return a sequence that was set aside."""
        ...

    def discard_aside(self, sequence: Sequence) -> None:
        """Record the end of a sequence that was set aside."""
        ...


class FirstComeFirstServed(WaitingQueue):
    def order(self, request: Request, *, arrival: int) -> Order:
        return (0, arrival)

    def set_aside(self) -> Sequence:
        return self.pop()

    def put_back(self, sequence: Sequence) -> None:
        self.push(sequence)

    def discard_aside(self, sequence: Sequence) -> None:
        """Do nothing: no place depends on it."""

    def arrange(self, running: list[Sequence]) -> None:
        """Do nothing: the running sequences are in order."""

    def displaces(self, waiting: Sequence, running: Sequence) -> bool:
        return False

    def admitted(self, sequence: Sequence) -> None:
        """Do nothing: no place depends on it."""

    def record_sampled(self, sequences: list[Sequence]) -> None:
        """Do nothing: no place depends on it."""


class ByPriority(FirstComeFirstServed):
    """A policy that serves the smallest number first, as in vLLM, and equal numbers in order of arrival."""

    def order(self, request: Request, *, arrival: int) -> Order:
        return (request.priority, arrival)


def make_policy(name: PolicyName) -> NestedPolicy:
    match name:
        case "fcfs":
            return FirstComeFirstServed()
        case "priority":
            return ByPriority()
        case "fair":
            return FairShare()
