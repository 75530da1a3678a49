"""The elector with a Lease in memory: who leads, when it stops, and that two never write at once; in simulated time."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from quire_operator.kube.errors import Conflict, Unavailable
from quire_operator.kube.lease import FENCE_SECONDS, Elector, Lease, Timing, WriteFence

TIMING = Timing(duration=0.3, retry=0.02, call=0.1)
GATE = 0.2
PATIENT = Timing(duration=600, retry=0.02, call=0.1)
"""With these times, events within seconds have other causes than an expired Lease."""


class FakeLeases:
    """A Lease that all candidates share, with optimistic locking and faults."""

    def __init__(self) -> None:
        self.lease = Lease(version=None)
        self.duration = 0.0
        self.unreachable: set[str] = set()

    def of(self, identity: str) -> "View":
        return View(self, identity)


class View:
    """The Lease as one candidate reaches it."""

    def __init__(self, shared: FakeLeases, identity: str) -> None:
        self._shared, self._identity = shared, identity

    async def read(self) -> Lease:
        await self._travel()
        return self._shared.lease

    async def write(self, lease: Lease, *, duration_seconds: float) -> Lease:
        await self._travel()
        if lease.version != self._shared.lease.version:
            raise Conflict("changed")
        version = str(int(lease.version or 0) + 1)
        self._shared.lease, self._shared.duration = replace(lease, version=version), duration_seconds
        return self._shared.lease

    async def _travel(self) -> None:
        await asyncio.sleep(0)
        if self._identity in self._shared.unreachable:
            raise Unavailable("no route")


def now() -> float:
    return asyncio.get_running_loop().time()


def fence(open_seconds: float = GATE) -> WriteFence:
    return WriteFence(now=now, open_seconds=open_seconds)


class Candidate:
    """An elector, and whether its work runs."""

    def __init__(self, leases: FakeLeases, identity: str, timing: Timing = TIMING) -> None:
        self.identity = identity
        self.fence = fence(GATE * timing.duration / TIMING.duration)
        self.leading, self.stopped = asyncio.Event(), asyncio.Event()
        self.times_led = 0
        self.elector = Elector(
            leases=leases.of(identity), identity=identity, fence=self.fence, lead=self._lead, timing=timing
        )
        self.task = asyncio.create_task(self.elector.run())

    async def _lead(self) -> None:
        assert self.fence.is_open()
        self.times_led += 1
        self.leading.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.leading.clear()
            self.stopped.set()

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
def leases() -> FakeLeases:
    return FakeLeases()


@pytest.fixture
async def candidates(leases: FakeLeases):  # type: ignore[no-untyped-def]
    """Yield a factory of candidates, which are stopped at the end."""
    made: list[Candidate] = []

    def make(identity: str, timing: Timing = TIMING) -> Candidate:
        made.append(Candidate(leases, identity, timing))
        return made[-1]

    yield make
    for candidate in made:
        await candidate.stop()


Make = Callable[..., Candidate]


async def soon(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 3)


async def test_first_candidate_leads_and_second_is_standby(candidates: Make, leases: FakeLeases) -> None:
    first = candidates("a")
    await soon(first.leading)
    second = candidates("b")
    await asyncio.sleep(2 * TIMING.duration)
    assert first.leading.is_set() and not second.leading.is_set()
    assert (leases.lease.holder, leases.lease.transitions) == ("a", 0)
    assert first.times_led == 1


async def test_stopped_leader_releases_the_lease_at_once(candidates: Make, leases: FakeLeases) -> None:
    first = candidates("a", PATIENT)
    await soon(first.leading)
    second = candidates("b", PATIENT)
    await first.stop()
    assert (leases.lease.holder, leases.duration) == ("", 1.0)
    await soon(second.leading)
    assert leases.lease.transitions == 1


async def test_standby_acquires_a_released_lease_at_once(candidates: Make, leases: FakeLeases) -> None:
    leases.lease = Lease(version="1", holder="a")
    second = candidates("b", Timing(duration=600, retry=600, call=1))
    await asyncio.sleep(0.05)  # its first round, which finds the holder
    leases.lease = Lease(version="2", holder="")
    second.elector.notice("")
    await soon(second.leading)


async def test_silent_leader_is_replaced_after_its_lease_expires(candidates: Make, leases: FakeLeases) -> None:
    first = candidates("a")
    await soon(first.leading)
    second = candidates("b")
    await asyncio.sleep(2 * TIMING.retry)
    leases.unreachable.add("a")
    began = now()
    await soon(first.stopped)
    assert not first.fence.is_open() and not second.leading.is_set(), "it stops before the other begins"
    await soon(second.leading)
    assert now() - began >= TIMING.duration - 2 * TIMING.retry
    leases.unreachable.clear()
    await asyncio.sleep(4 * TIMING.retry)
    assert not first.leading.is_set(), "it campaigns again, and sees that another leads"


async def test_leader_after_an_outage_leads_again_if_no_other_does(candidates: Make, leases: FakeLeases) -> None:
    first = candidates("a")
    await soon(first.leading)
    leases.unreachable.add("a")
    await soon(first.stopped)
    leases.unreachable.clear()
    await soon(first.leading)
    assert (first.times_led, leases.lease.transitions) == (2, 0)


async def test_another_holder_ends_leading_at_the_next_renewal(candidates: Make, leases: FakeLeases) -> None:
    first = candidates("a", PATIENT)
    await soon(first.leading)
    leases.lease = replace(leases.lease, version="99", holder="b")
    await soon(first.stopped)
    assert not first.fence.is_open()


async def test_watch_of_another_holder_closes_the_write_fence(candidates: Make) -> None:
    first = candidates("a", PATIENT)
    await soon(first.leading)
    first.elector.notice("b")
    assert not first.fence.is_open()
    await soon(first.stopped)


async def test_own_lease_is_reacquired_at_once_after_a_restart(candidates: Make, leases: FakeLeases) -> None:
    leases.lease = Lease(version="5", holder="a", transitions=3)
    await soon(candidates("a", PATIENT).leading)
    assert leases.lease.transitions == 3


async def test_holder_with_a_wrong_clock_is_judged_by_lease_changes(candidates: Make, leases: FakeLeases) -> None:
    first = candidates("a")
    await soon(first.leading)
    assert leases.lease.renewed is not None
    leases.lease = replace(leases.lease, renewed=leases.lease.renewed - timedelta(days=1))
    second = candidates("b")
    await asyncio.sleep(2 * TIMING.duration)
    assert not second.leading.is_set()


async def test_times_in_the_lease_are_utc(candidates: Make, leases: FakeLeases) -> None:
    await soon(candidates("a").leading)
    assert leases.lease.renewed is not None and leases.lease.renewed.utcoffset() == timedelta(0)


async def test_error_in_the_work_ends_election_and_frees_the_lease(leases: FakeLeases) -> None:
    async def lead() -> None:
        raise ZeroDivisionError("ours")

    own = fence()
    elector = Elector(leases=leases.of("a"), identity="a", fence=own, lead=lead, timing=TIMING)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(elector.run(), 3)
    assert leases.lease.holder == "" and not own.is_open()


async def test_write_fence_stays_open_during_shutdown(leases: FakeLeases) -> None:
    """On SIGTERM, active work may still write; the Lease is released afterwards."""
    seen: list[tuple[bool, str]] = []
    own = fence()
    started = asyncio.Event()

    async def lead() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            seen.append((own.is_open(), leases.lease.holder))

    task = asyncio.create_task(Elector(leases=leases.of("a"), identity="a", fence=own, lead=lead, timing=TIMING).run())
    await soon(started)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert seen == [(True, "a")]
    assert (own.is_open(), leases.lease.holder) == (False, "")


def test_write_fence_counts_from_the_sent_time_of_a_renewal() -> None:
    time = 100.0
    fence = WriteFence(now=lambda: time)
    assert not fence.is_open()
    fence.renewed(sent=95.0)  # the answer came five seconds later
    assert fence.is_open()
    time = 95.0 + FENCE_SECONDS
    assert not fence.is_open(), "a process that was suspended finds it closed"
    fence.renewed(sent=time)
    fence.close()
    assert not fence.is_open()


def test_last_write_ends_before_another_leader_may_write() -> None:
    timing = Timing()
    assert FENCE_SECONDS + timing.call <= timing.duration


async def test_candidates_with_bad_connections_never_lead_together(leases: FakeLeases) -> None:
    made = [Candidate(leases, name) for name in "abcd"]

    async def watch() -> None:
        while True:
            assert sum(candidate.fence.is_open() for candidate in made) <= 1
            await asyncio.sleep(0.001)

    async def trouble() -> None:
        for round_ in range(5):
            leases.unreachable = {made[round_ % 4].identity, leases.lease.holder}
            await asyncio.sleep(1.5 * TIMING.duration)
            leases.unreachable = set()
            await asyncio.sleep(2 * TIMING.retry)

    steps: list[Awaitable[None]] = [watch(), trouble()]
    tasks = [asyncio.ensure_future(step) for step in steps]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    tasks[0].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for candidate in made:
        await candidate.stop()
    assert not isinstance(results[0], AssertionError) and results[1] is None
    assert leases.lease.transitions >= 1
