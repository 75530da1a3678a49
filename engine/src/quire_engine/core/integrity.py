"""The invariants of all sequences between two calls of the scheduler, for tests and the engine's debug switch."""

from collections.abc import Mapping
from operator import attrgetter

from quire_engine.core.policy import Policy
from quire_engine.core.sequence import Sequence


def check_sequences(
    alive: Mapping[int, Sequence], *, running: list[Sequence], queue: Policy, parked: list[Sequence]
) -> None:
    """Raise AssertionError unless each sequence is in one place and the counts are right."""
    waiting = queue.sequences()
    assert len(waiting) == len(queue)
    assert sum(sequence.num_tokens - sequence.num_computed for sequence in waiting) == queue.num_tokens
    assert sorted(sequence.key for sequence in [*running, *waiting, *parked]) == sorted(alive)
    assert running == sorted(running, key=attrgetter("order"))
    assert all(sequence.row is not None for sequence in running)
    assert all(sequence.row is None and sequence.parent is None for sequence in waiting)
    for sequence in alive.values():
        assert len(sequence.token_ids) + sequence.num_pending == sequence.num_tokens <= sequence.limit
        assert sequence.num_computed < sequence.num_tokens
