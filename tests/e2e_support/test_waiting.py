"""Waiting with a simulated clock."""

import pytest

from e2e_support.errors import ApiError, NotInTime
from e2e_support.waiting import Stopwatch, until


class Time:
    """A clock that advances when code sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


def test_until_returns_the_first_true_value(time: Time) -> None:
    found = until(
        lambda: "x" if time.now >= 3 else None, what="x", seconds=10, every=1, clock=time.clock, sleep=time.sleep
    )
    assert (found, time.now) == ("x", 3)


def test_timeout_error_has_the_last_value_and_explanation(time: Time) -> None:
    with pytest.raises(NotInTime) as error:
        until(lambda: 0, what="pods", seconds=2, explain=lambda: "no node", every=1, clock=time.clock, sleep=time.sleep)
    assert str(error.value) == "not within 2 s: pods\nlast seen: 0\nno node"


def test_until_retries_while_the_api_server_is_unreachable(time: Time) -> None:
    def look() -> bool:
        if time.now < 5:
            raise ApiError("no answer", status=None)
        return True

    assert until(look, what="it", seconds=10, every=1, clock=time.clock, sleep=time.sleep)
    assert time.now == 5


def test_unreachable_api_server_is_the_timeout_reason(time: Time) -> None:
    def away() -> str:
        raise ApiError("no answer", status=None)

    with pytest.raises(NotInTime, match=r"last seen: no answer\nno more is known: no answer"):
        until(away, what="it", seconds=1, explain=away, every=1, clock=time.clock, sleep=time.sleep)


def test_other_errors_are_raised_at_once(time: Time) -> None:
    with pytest.raises(KeyError):
        until(lambda: {}["x"], what="it", seconds=9, clock=time.clock, sleep=time.sleep)


def test_stopwatch_measures_seconds_since_creation(time: Time) -> None:
    time.sleep(5)
    watch = Stopwatch(time.clock)
    time.sleep(2)
    assert watch.seconds == 2
