import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.errors import InvalidRequest, Overloaded
from quire_engine.server.generation.queue_limit import Admission


def retry_after(admission: Admission, lengths: list[int], now: float) -> int:
    with pytest.raises(Overloaded) as caught:
        admission.enter(lengths, now)
    assert caught.value.retry_after_seconds is not None
    return caught.value.retry_after_seconds


def test_an_empty_queue_takes_a_prompt_of_any_length() -> None:
    admission = Admission(max_requests=2, max_tokens=10)
    admission.enter([1000], 0.0)
    assert retry_after(admission, [1], 0.0) >= 1


def test_the_queue_is_bounded_in_requests() -> None:
    admission = Admission(max_requests=2, max_tokens=1000)
    admission.enter([5, 5], 0.0)
    retry_after(admission, [5], 0.0)
    admission.leave(5, 0.5, ran=True)
    admission.enter([5], 1.0)
    assert (admission.requests, admission.tokens) == (2, 10)


def test_more_sequences_than_could_ever_wait_are_the_clients_fault() -> None:
    with pytest.raises(InvalidRequest, match="may wait here"):
        Admission(max_requests=2, max_tokens=10).enter([1, 1, 1], 0.0)


@pytest.mark.parametrize(
    ("left_at", "now", "seconds"),
    [
        ([], 100.0, 10),  # nothing measured yet
        ([90.0, 92.0, 94.0, 96.0, 98.0], 100.0, 2),  # one in two seconds
        ([99.0, 99.2, 99.4, 99.6], 100.0, 1),
        ([0.0, 1.0], 100.0, 10),  # what left long ago says nothing
        ([71.0], 100.0, 29),
    ],
)
def test_the_time_to_come_back_follows_the_measured_drain(left_at: list[float], now: float, seconds: int) -> None:
    admission = Admission(max_requests=10, max_tokens=10**6)
    for time in left_at:
        admission.enter([10], time)
        admission.leave(10, time, ran=True)
    admission.enter([10] * 10, now)
    assert retry_after(admission, [10], now) == seconds


def test_tokens_decide_where_they_drain_more_slowly() -> None:
    admission = Admission(max_requests=100, max_tokens=1000)
    admission.enter([100], 90.0)
    admission.leave(100, 90.0, ran=True)
    admission.enter([1000], 100.0)
    assert retry_after(admission, [200], 100.0) == 20  # 100 tokens in 10 s


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=60))
def test_places_are_given_back(events: list[tuple[int, bool]]) -> None:
    admission = Admission(max_requests=5, max_tokens=100)
    waiting: list[int] = []
    for now, (length, leave) in enumerate(events):
        if leave and waiting:
            admission.leave(waiting.pop(), float(now), ran=leave)
            continue
        try:
            admission.enter([length], float(now))
            waiting.append(length)
        except Overloaded as error:
            assert 1 <= (error.retry_after_seconds or 0) <= 120
    assert (admission.requests, admission.tokens) == (len(waiting), sum(waiting))
    assert admission.requests <= 5
