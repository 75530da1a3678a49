"""The work queue: merging of keys, one run per key, backoff, delays, and cancellation."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire_operator.deployment.workqueue import MAX_SECONDS, Queue, Workers, backoff_seconds

KEYS = st.sampled_from("abcd")


class QueueModel(RuleBasedStateMachine):
    """A model of the queue: no key runs twice at once, and every request is followed by a run in time.

    A run answers all requests made before it started, also those for a later time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue: Queue[str] = Queue()
        self.now = 0.0
        self.running: set[str] = set()
        self.due: dict[str, float] = {}
        self.held: dict[str, float] = {}

    def ask(self, key: str, due: float) -> None:
        self.due[key] = min(self.due.get(key, due), due)

    @rule(key=KEYS)
    def add(self, key: str) -> None:
        self.queue.add(key)
        self.ask(key, self.now)

    @rule(key=KEYS, after=st.floats(0, 10))
    def add_at(self, key: str, after: float) -> None:
        self.queue.add_at(key, self.now + after)
        self.ask(key, self.now + after)

    @rule(key=KEYS, after=st.floats(0, 10))
    def hold(self, key: str, after: float) -> None:
        self.queue.hold(key, self.now + after)
        self.ask(key, self.now + after)
        self.held[key] = self.now + after

    @rule(seconds=st.floats(0, 10))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    def must_run(self) -> set[str]:
        asked = {key for key, due in self.due.items() if due <= self.now} - self.running
        return {key for key in asked if self.held.get(key, 0.0) <= self.now}

    @rule()
    def take(self) -> None:
        waiting = self.must_run()
        key = self.queue.take(self.now)
        if key is None:
            assert not waiting
            return
        assert key not in self.running
        assert self.held.pop(key, 0.0) <= self.now
        self.due.pop(key, None)
        self.running.add(key)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failed=st.booleans())
    def finish(self, data: st.DataObject, failed: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(key)
        failures = self.queue.finish(key, failed=failed)
        assert (failures > 0) is failed

    @invariant()
    def counts_agree(self) -> None:
        assert self.queue.running == len(self.running)

    def teardown(self) -> None:
        """Assert that at the end every request is answered and nothing is left."""
        for key in self.running.copy():
            self.running.remove(key)
            self.queue.finish(key, failed=False)
        self.now += 1_000.0
        ran = set()
        while (key := self.queue.take(self.now)) is not None:
            ran.add(key)
            self.queue.finish(key, failed=False)
        assert ran >= set(self.due)
        assert self.queue.next_due() is None and len(self.queue) == 0


QueueModel.TestCase.settings = settings(stateful_step_count=40)
test_queue_never_runs_a_key_twice_at_once_and_forgets_none = QueueModel.TestCase


def test_keys_run_in_order_and_repeated_adds_are_merged():
    queue: Queue[str] = Queue()
    for key in ("a", "b", "a", "c", "b"):
        queue.add(key)
    assert [queue.take(0), queue.take(0), queue.take(0), queue.take(0)] == ["a", "b", "c", None]


def test_an_add_during_a_run_makes_one_more_run_after_it():
    queue: Queue[str] = Queue()
    queue.add("a")
    assert queue.take(0) == "a"
    queue.add("a")
    queue.add("a")
    assert queue.take(0) is None
    queue.finish("a", failed=False)
    assert queue.take(0) == "a"
    queue.finish("a", failed=False)
    assert queue.take(0) is None


def test_delayed_key_waits_despite_further_adds():
    queue: Queue[str] = Queue()
    queue.hold("a", 10.0)
    queue.add("a")
    queue.add_at("a", 5.0)
    assert [queue.take(0.0), queue.take(9.9)] == [None, None]
    assert queue.next_due() == 10.0
    assert queue.take(10.0) == "a"


def test_first_retry_precedes_the_keys_that_wait():
    """Only the first one, so that keys that fail forever do not keep others from running."""
    queue: Queue[str] = Queue()
    for retried_first in (True, False):
        queue.add("a")
        queue.take(0)
        queue.finish("a", failed=True)
        queue.hold("a", 1.0)
        queue.add("b")
        order = [queue.take(1.0), queue.take(1.0)]
        assert order == (["a", "b"] if retried_first else ["b", "a"])
        queue.finish("b", failed=False)
        queue.finish("a", failed=True)


def test_consecutive_failures_are_counted_until_a_success():
    queue: Queue[str] = Queue()
    counts = []
    for failed in (True, True, False, True):
        queue.add("a")
        queue.take(0)
        counts.append(queue.finish("a", failed=failed))
    assert counts == [1, 2, 0, 1]


@pytest.mark.parametrize(
    ("failures", "seconds"), [(1, 0.5), (2, 1.0), (3, 2.0), (6, MAX_SECONDS), (10_000, MAX_SECONDS)]
)
def test_backoff_doubles_up_to_its_ceiling(failures: int, seconds: float):
    assert backoff_seconds(failures, jitter=0.0) == seconds
    assert backoff_seconds(failures, jitter=1.0) == seconds * 0.75


class Recorder:
    """A reconcile whose runs wait for a signal to end."""

    def __init__(self) -> None:
        self.started: asyncio.Queue[str] = asyncio.Queue()
        self.errors: list[str] = []
        self.release: dict[str, asyncio.Future[float | None]] = {}

    async def reconcile(self, key: str) -> float | None:
        self.release[key] = asyncio.get_running_loop().create_future()
        self.started.put_nowait(key)
        return await self.release[key]

    def on_error(self, key: str, error: Exception) -> float | None:
        self.errors.append(f"{key}: {error}")
        return 0.0

    def workers(self, limit: int = 32) -> Workers[str]:
        return Workers(
            self.reconcile, on_error=self.on_error, now=asyncio.get_running_loop().time, random=lambda: 0.0, limit=limit
        )


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_workers_run_keys_concurrently_up_to_the_limit():
    recorder = Recorder()
    workers = recorder.workers(limit=2)
    for key in "abc":
        workers.add(key)
    task = asyncio.create_task(workers.run())
    assert [await recorder.started.get(), await recorder.started.get()] == ["a", "b"]
    assert workers.queue.running == 2 and len(workers.queue) == 1
    recorder.release["b"].set_result(None)
    assert await recorder.started.get() == "c"
    await stop(task)


async def test_failed_run_is_reported_and_retried():
    recorder = Recorder()
    workers = recorder.workers()
    workers.add("a")
    task = asyncio.create_task(workers.run())
    await recorder.started.get()
    recorder.release["a"].set_exception(OSError("no route"))
    assert await recorder.started.get() == "a"
    assert recorder.errors == ["a: no route"]
    await stop(task)


async def test_run_can_request_a_later_run():
    recorder = Recorder()
    workers = recorder.workers()
    workers.add("a")
    task = asyncio.create_task(workers.run())
    await recorder.started.get()
    recorder.release["a"].set_result(0.001)
    assert await recorder.started.get() == "a"
    await stop(task)


async def test_cancelled_run_is_repeated_by_the_next_runner_of_the_queue():
    recorder = Recorder()
    workers = recorder.workers()
    workers.add("a")
    task = asyncio.create_task(workers.run())
    await recorder.started.get()
    await stop(task)
    assert workers.queue.running == 0
    task = asyncio.create_task(workers.run())
    assert await recorder.started.get() == "a"
    await stop(task)


async def test_stop_waits_for_active_runs_within_the_grace():
    recorder = Recorder()
    workers = recorder.workers()
    workers.add("a")
    task = asyncio.create_task(workers.run(grace_seconds=5))
    await recorder.started.get()
    task.cancel()
    await asyncio.sleep(0)
    recorder.release["a"].set_result(None)
    await asyncio.gather(task, return_exceptions=True)
    assert len(workers.queue) == 0, "the run ended by itself, so nothing is owed"
