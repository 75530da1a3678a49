"""The queue of waiting sequences keeps order and counts when any of them leaves."""

from hypothesis import given
from hypothesis import strategies as st

from quire_engine.core.policy import WaitingQueue
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request, Sequence


def sequence(key: int, *, priority: int = 0, length: int = 1) -> Sequence:
    request = Request(key=key, prompt_token_ids=[1] * length, params=SamplingParams(max_tokens=1), seed=0)
    return Sequence(request, order=(priority, key), limit=length + 1, eos_token_ids=(), num_groups=1)


def test_discarded_sequences_are_removed_from_the_heap() -> None:
    queue = WaitingQueue()
    stays = sequence(0)
    queue.push(stays)
    for key in range(1, 10_000):
        gone = sequence(key)
        queue.push(gone)
        gone.finished = True
        queue.discard(gone)
    assert len(queue) == 1 and queue.first() is stays
    assert len(queue._heap) < 200


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "discard"]), st.integers(0, 9)), max_size=200))
def test_counts_match_the_queued_sequences(script: list[tuple[str, int]]) -> None:
    queue, inside = WaitingQueue(), list[Sequence]()
    for key, (kind, number) in enumerate(script):
        if kind == "push":
            inside.append(sequence(key, priority=number % 3, length=1 + number))
            queue.push(inside[-1])
        elif kind == "pop" and inside:
            inside.remove(queue.pop())
        elif kind == "discard" and inside:
            gone = inside.pop(number % len(inside))
            gone.finished = True
            queue.discard(gone)
        assert len(queue) == len(inside)
        assert queue.num_tokens == sum(entry.num_tokens for entry in inside)
        assert queue.first() is min(inside, key=lambda entry: entry.order, default=None)
