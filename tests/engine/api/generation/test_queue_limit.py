import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.api.generation import QueueLimit
from quire_engine.errors import InvalidRequest, Overloaded


def retry_after(queue: QueueLimit, lengths: list[int], now: float) -> int:
    with pytest.raises(Overloaded) as caught:
        queue.reserve(lengths, now)
    assert caught.value.retry_after_seconds is not None
    return caught.value.retry_after_seconds


def test_empty_queue_accepts_a_prompt_of_any_length() -> None:
    queue = QueueLimit(max_requests=2, max_tokens=10)
    queue.reserve([1000], 0.0)
    assert retry_after(queue, [1], 0.0) >= 1


def test_the_queue_is_bounded_in_requests() -> None:
    queue = QueueLimit(max_requests=2, max_tokens=1000)
    queue.reserve([5, 5], 0.0)
    retry_after(queue, [5], 0.0)
    queue.release(5, 0.5, ran=True)
    queue.reserve([5], 1.0)
    assert (queue.requests, queue.tokens) == (2, 10)


def test_more_sequences_than_the_queue_accepts_are_invalid() -> None:
    with pytest.raises(InvalidRequest, match="^3 sequences .* 2 "):
        QueueLimit(max_requests=2, max_tokens=10).reserve([1, 1, 1], 0.0)


@pytest.mark.parametrize(
    ("left_at", "now", "seconds"),
    [
        ([], 100.0, 10),  # nothing measured yet
        ([90.0, 92.0, 94.0, 96.0, 98.0], 100.0, 2),  # one leaves in two seconds
        ([99.0, 99.2, 99.4, 99.6], 100.0, 1),
        ([0.0, 1.0], 100.0, 10),  # sequences that left long ago do not count
        ([71.0], 100.0, 29),
    ],
)
def test_retry_after_follows_the_measured_drain_rate(left_at: list[float], now: float, seconds: int) -> None:
    queue = QueueLimit(max_requests=10, max_tokens=10**6)
    for time in left_at:
        queue.reserve([10], time)
        queue.release(10, time, ran=True)
    queue.reserve([10] * 10, now)
    assert retry_after(queue, [10], now) == seconds


def test_retry_after_uses_tokens_if_they_drain_more_slowly() -> None:
    queue = QueueLimit(max_requests=100, max_tokens=1000)
    queue.reserve([100], 90.0)
    queue.release(100, 90.0, ran=True)
    queue.reserve([1000], 100.0)
    assert retry_after(queue, [200], 100.0) == 20  # 100 tokens in 10 s


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=60))
def test_queue_reservations_are_released(events: list[tuple[int, bool]]) -> None:
    queue = QueueLimit(max_requests=5, max_tokens=100)
    waiting: list[int] = []
    for now, (length, leave) in enumerate(events):
        if leave and waiting:
            queue.release(waiting.pop(), float(now), ran=leave)
            continue
        try:
            queue.reserve([length], float(now))
            waiting.append(length)
        except Overloaded as error:
            assert 1 <= (error.retry_after_seconds or 0) <= 120
    assert (queue.requests, queue.tokens) == (len(waiting), sum(waiting))
    assert queue.requests <= 5
