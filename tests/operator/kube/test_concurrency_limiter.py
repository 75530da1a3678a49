"""The number of concurrent writes, with a server whose response time the test chooses."""

import asyncio
from collections.abc import Callable

import pytest

from quire_operator.kube.connection import FEWEST, FIRST, MOST, QUICK_SECONDS, SLOW_SECONDS, ConcurrencyLimiter, Pace


def test_fast_responses_raise_the_limit_up_to_its_maximum() -> None:
    limit = Pace()
    for second in range(int(MOST) ** 2):
        limit.answered(QUICK_SECONDS, float(second))
    assert limit.limit == MOST


def test_slow_responses_lower_the_limit_but_not_to_zero() -> None:
    limit = Pace()
    for second in range(0, 1000, 10):
        limit.answered(SLOW_SECONDS, float(second))
    assert limit.limit == FEWEST


def test_concurrent_slow_responses_lower_the_limit_once() -> None:
    limit = Pace()
    for _ in range(20):
        limit.answered(SLOW_SECONDS + 1, 100.0)
    assert limit.limit == pytest.approx(FIRST * 2 / 3)
    limit.answered(SLOW_SECONDS, 100.0 + SLOW_SECONDS - 0.1)
    assert limit.limit == pytest.approx(FIRST * 2 / 3), "this one began before the last lowering"


def test_responses_of_medium_latency_keep_the_limit() -> None:
    limit = Pace()
    limit.answered((QUICK_SECONDS + SLOW_SECONDS) / 2, 1.0)
    assert limit.limit == FIRST


class Server:
    """A server that executes one write at a time, each for a given time on its own clock."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self.most_inside = 0
        self.longest = 0.0
        self._seconds = seconds
        self._one = asyncio.Lock()
        self._inside = 0

    async def write(self) -> None:
        entered = self.now
        self._inside += 1
        self.most_inside = max(self.most_inside, self._inside)
        async with self._one:
            await asyncio.sleep(0)
            self.now += self._seconds
        self._inside -= 1
        self.longest = max(self.longest, self.now - entered)


async def run(server: Server, limiter: ConcurrencyLimiter, count: int) -> None:
    async def one() -> None:
        async with limiter.turn():
            await server.write()

    await asyncio.gather(*(one() for _ in range(count)))


async def test_calls_to_a_serial_server_never_time_out() -> None:
    server = Server(seconds=0.1)
    await run(server, ConcurrencyLimiter(lambda: server.now), 600)
    assert server.longest < SLOW_SECONDS + 0.5, "below the five seconds after which a call is given up"
    assert server.most_inside > FEWEST


async def test_fast_server_gets_the_maximum_concurrency() -> None:
    server = Server(seconds=0.001)
    await run(server, ConcurrencyLimiter(lambda: server.now), 2000)
    assert server.most_inside == MOST


@pytest.mark.parametrize("cancel_when", ["waiting", "let in"])
async def test_cancelled_call_passes_its_slot_to_the_next(cancel_when: str) -> None:
    limiter = ConcurrencyLimiter(lambda: 0.0)
    entered: list[int] = []
    leave = asyncio.Event()

    async def one(number: int) -> None:
        async with limiter.turn():
            entered.append(number)
            await leave.wait()

    tasks = [asyncio.create_task(one(number)) for number in range(int(FIRST) + 2)]
    await settled(lambda: len(entered) == int(FIRST))
    waiting = tasks[int(FIRST)]
    if cancel_when == "let in":
        leave.set()  # its turn comes at the same moment as the cancellation
        await asyncio.sleep(0)
    waiting.cancel()
    leave.set()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert int(FIRST) + 1 in entered, "the one behind it"
    async with asyncio.timeout(30), limiter.turn():
        pass


async def settled(so: Callable[[], bool]) -> None:
    while not so():
        await asyncio.sleep(0)
