"""Adapters in slots: who runs, who waits, who is overtaken, and what stays in host memory."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from quire_common.contract.adapters_file import AdapterFailure
from quire_engine.core.adapter_slots import OVERTAKEN_AT_MOST, AdapterQueue, AdapterSlots
from quire_engine.core.batch import AdapterLoad
from quire_engine.core.policy import FairShare
from quire_engine.core.ports import AdapterEvent
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request, Sequence

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]


@dataclass
class MemoryStore:
    """An ``AdapterStore`` whose reads end when the test says so, or at once."""

    capacity: int = 1000
    at_once: bool = True
    on_read: Callable[[], None] | None = None
    known: set[int] = field(default_factory=set)
    there: set[int] = field(default_factory=set)
    held: Counter[int] = field(default_factory=Counter)
    reading: list[int] = field(default_factory=list)
    events: list[AdapterEvent] = field(default_factory=list)

    def add(self, adapter: int, folder: str) -> None:
        self.known.add(adapter)
        self.fetch(adapter)

    def remove(self, adapter: int) -> None:
        self.known.discard(adapter)
        assert not self.held[adapter], "removed while it is held"
        self.there.discard(adapter)

    def knows(self, adapter: int) -> bool:
        return adapter in self.known

    def has(self, adapter: int) -> bool:
        return adapter in self.there

    def fetch(self, adapter: int) -> bool:
        if adapter in self.there or adapter in self.reading:
            return True
        unheld = [each for each in sorted(self.there) if not self.held[each]]
        if len(self.there) + len(self.reading) >= self.capacity:
            if not unheld:
                return False
            self.there.discard(unheld[0])
        self.reading.append(adapter)
        if self.at_once:
            self.read()
        return True

    def read(self) -> None:
        """End all reads."""
        for adapter in self.reading:
            self.there.add(adapter)
            self.events.append(AdapterEvent(adapter=adapter, rank=8))
        self.reading = []

    def hold(self, adapter: int) -> None:
        self.held[adapter] += 1

    def release(self, adapter: int) -> None:
        self.held[adapter] -= 1

    def take_events(self) -> list[AdapterEvent]:
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        pass


def adapted(make_world: Callable[..., Any], slots: int, adapters: int, **options: Any) -> Any:
    store = options.pop("store", None) or MemoryStore()
    world = make_world(adapter_slots=slots, adapters=store, **options)
    for adapter in range(1, adapters + 1):
        world.engine.load_adapter(adapter, "/adapters")
    return world


def run(world: Any) -> None:
    store = world.engine._adapter_store
    for _ in range(5000):
        world.engine.add_prepared()
        if world.engine.has_work:
            world.step()
        elif not store.events:
            return
    raise AssertionError("still at work")


def test_an_idle_adapter_stays_until_its_slot_is_needed() -> None:
    slots = AdapterSlots(2)
    assert [slots.acquire(adapter) for adapter in (7, 8, 7, None)] == [0, 1, 0, -1]
    assert not slots.admits(9) and slots.admits(7) and slots.admits(None)
    for adapter in (7, 7, 8):
        slots.release(adapter)
    slots.acquire(7)
    assert slots.acquire(9) == 1 and slots.loaded == [7, 9]
    assert slots.take_loads() == [AdapterLoad(slot=s, adapter=a) for s, a in ((0, 7), (1, 8), (1, 9))]


def test_least_recently_used_slot_is_evicted_first() -> None:
    slots = AdapterSlots(2)
    for adapter in (1, 2, 1):
        slots.acquire(adapter)
        slots.release(adapter)
    slots.acquire(3)
    assert slots.loaded == [1, 3]


def test_removed_adapter_frees_its_slot() -> None:
    slots = AdapterSlots(1)
    slots.acquire(1)
    slots.release(1)
    slots.forget(1)
    slots.forget(2)
    assert slots.loaded == [] and slots.acquire(3) == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_mixed_batch_answers_as_each_alone(make_world: Callable[..., Any], policy: str, overlap: bool) -> None:
    together = adapted(make_world, 3, 6, policy=policy, overlap=overlap, max_num_seqs=8, num_blocks=200)
    for key in range(40):
        together.add(key, PROMPT[: 4 + key % 9], adapter=key % 7 or None, tenant=f"t{key % 3}")
    run(together)
    for key in range(40):
        alone = adapted(make_world, 1, 6)
        alone.add(key, PROMPT[: 4 + key % 9], adapter=key % 7 or None)
        run(alone)
        assert alone.tokens[key] == together.tokens[key]
    assert together.scheduler.counters.adapter_loads >= 6


def test_random_traffic_with_preemption_and_cancels(make_world: Callable[..., Any]) -> None:
    random = Random(5)
    world = adapted(make_world, 2, 9, num_blocks=20, max_num_seqs=6, policy="fair")
    for key in range(120):
        world.add(
            key,
            [1 + random.randrange(40) for _ in range(1 + random.randrange(20))],
            adapter=random.randrange(10) or None,
        )
        for _ in range(random.randrange(3)):
            world.engine.add_prepared()
            if world.engine.has_work:
                world.step()
        if random.random() < 0.3:
            world.engine.cancel(random.randrange(key + 1))
            world.engine.check_integrity()
    run(world)
    assert world.engine.gauges().num_waiting == 0 and world.engine.gauges().running_adapters == []


def test_requests_overtake_one_that_waits_for_an_adapter_slot(make_world: Callable[..., Any]) -> None:
    world = adapted(make_world, 1, 2, max_num_seqs=4)
    world.add(1, [5, 6], adapter=1, max_tokens=30)
    world.add(2, [5, 6], adapter=2)
    world.add(3, [5, 6])
    world.add(4, [5, 6], adapter=1)
    world.engine.add_prepared()
    for _ in range(12):
        world.step()
    assert set(world.finished) == {3, 4} and world.engine.gauges().waiting_adapters == [2]
    run(world)
    assert set(world.finished) == {1, 2, 3, 4}


def test_request_waiting_for_a_slot_is_overtaken_a_bounded_number(make_world: Callable[..., Any]) -> None:
    world = adapted(make_world, 1, 2, max_num_seqs=2, num_blocks=200)
    for key in range(1, 200):
        world.add(key, [5, 6], adapter=2 if key == 3 else 1, max_tokens=2 + key % 3)
    run(world)
    before = list(world.finished).index(3)
    assert before <= 2 + OVERTAKEN_AT_MOST + 2


def test_popular_adapters_do_not_starve_the_others(make_world: Callable[..., Any]) -> None:
    """With Zipf traffic that never ends, every request runs before those that came much later."""
    random = Random(11)
    world = adapted(make_world, 4, 60, max_num_seqs=8, num_blocks=400)
    ranks = [1.0 / (place + 1) for place in range(60)]
    for key in range(600):
        world.add(key, [5, 6], adapter=random.choices(range(1, 61), ranks)[0], max_tokens=3)
    run(world)
    order = list(world.finished)
    assert len(order) == 600
    assert max(place - key for place, key in enumerate(order)) < 300


def test_a_request_waits_until_its_adapter_was_read(make_world: Callable[..., Any]) -> None:
    store = MemoryStore(at_once=False)
    world = adapted(make_world, 2, 2, store=store)
    world.add(1, [5, 6], adapter=1)
    world.add(2, [5, 6])
    run(world)
    assert set(world.finished) == {2} and world.engine.gauges().num_waiting == 1
    assert world.engine.gauges().waiting_adapters == [1]
    store.read()
    run(world)
    assert set(world.finished) == {1, 2}


def test_requests_share_host_memory_in_turn(make_world: Callable[..., Any]) -> None:
    world = adapted(make_world, 1, 30, store=MemoryStore(capacity=2))
    for key in range(90):
        world.add(key, [5, 6], adapter=1 + key % 30, max_tokens=3)
    run(world)
    assert len(world.finished) == 90


def test_an_adapter_that_cannot_be_read_fails_its_requests(make_world: Callable[..., Any]) -> None:
    store = MemoryStore(at_once=False)
    world = adapted(make_world, 1, 2, store=store)
    world.add(1, [5, 6], adapter=1)
    world.add(2, [5, 6], adapter=2)
    store.events.append(AdapterEvent(adapter=1, reason=AdapterFailure.INVALID, message="its file is gone"))
    store.reading.remove(1)
    store.read()
    run(world)
    assert world.engine.take_failed() == {1: "the adapter cannot be served: its file is gone"}
    assert set(world.finished) == {2}


def test_unloading_waits_for_the_last_request(make_world: Callable[..., Any]) -> None:
    store = MemoryStore()
    world = adapted(make_world, 1, 2, store=store)
    world.add(1, [5, 6], adapter=1, max_tokens=10)
    world.engine.add_prepared()
    world.step()
    world.engine.unload_adapter(1)
    assert store.knows(1)
    assert world.add(2, [5, 6], adapter=1) == "the adapter was unloaded"
    run(world)
    assert len(world.tokens[1]) == 10 and not store.knows(1) and world.engine.gauges().loaded_adapters == []


def test_cancelling_the_last_request_of_an_unloaded_adapter(make_world: Callable[..., Any]) -> None:
    store = MemoryStore()
    world = adapted(make_world, 1, 2, store=store)
    world.add(1, [5, 6], adapter=1, max_tokens=10)
    world.add(2, [5, 6], adapter=2, max_tokens=3)
    world.engine.add_prepared()
    world.step()
    world.engine.unload_adapter(1)
    assert world.engine.cancel(1) and not world.engine.cancel(1)
    assert not store.knows(1)
    run(world)
    assert len(world.tokens[2]) == 3 and world.engine.gauges().loaded_adapters == [2]


def waiting(key: int, tenant: str, adapter: int | None) -> Sequence:
    request = Request(
        key=key, prompt_token_ids=[5, 6], params=SamplingParams(max_tokens=3), seed=0, tenant=tenant, adapter=adapter
    )
    return Sequence(request, order=(0, key), limit=5, eos_token_ids=(), num_groups=1)


def test_tenant_waiting_for_a_slot_keeps_its_credit() -> None:
    """It is not idle: after the wait, it goes before a tenant that was served more."""
    slots, fair = AdapterSlots(1), FairShare()
    queue = AdapterQueue(fair, slots)
    slots.acquire(2)
    for key, tenant, adapter in ((1, "served little", 1), (2, "served much", None), (3, "served little", 1)):
        queue.push(waiting(key, tenant, adapter))
    fair._tenants["served much"].counter = 500
    first = queue.first()
    assert first is not None and first.key == 2, "the others wait for a slot"
    queue.push(waiting(4, "served little", None))
    slots.release(2)
    assert [queue.pop().key for _ in range(4) if queue.first()] == [1, 3, 4, 2]
    assert fair._tenants["served little"].counter == 0


def test_a_reload_finds_no_prefix_of_the_load_before(make_world: Callable[..., Any]) -> None:
    world = adapted(make_world, 2, 2)
    for key, adapter in ((1, 1), (2, 1), (3, 2), (4, None)):
        world.add(key, PROMPT, adapter=adapter)
        run(world)
    assert [world.cached[key] > 0 for key in (1, 2, 3, 4)] == [False, True, False, False]


def test_an_engine_without_adapters_refuses_them(make_world: Callable[..., Any]) -> None:
    assert "--enable-lora" in make_world().add(1, [5, 6], adapter=1)
