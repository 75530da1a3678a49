"""The policy ``fair``: the tenant that was served least goes first, however much each of them queues.

It uses virtual token counters, as in Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). A tenant's
counter grows by its computed prompt tokens and by its sampled tokens, which have a larger weight. The tenant with the
smallest counter goes next, and within a tenant the earliest request. When a tenant without waiting requests returns,
its counter is raised to the smallest one of the waiting tenants, so that idle tenants do not accumulate credit.
Requests without a tenant form one tenant.
"""

from collections import Counter
from heapq import heappop, heappush, heapreplace
from operator import attrgetter

from quire_engine.core.sequence import Order, Request, Sequence
from quire_engine.core.waiting import WaitingQueue

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
