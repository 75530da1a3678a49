"""Several stages: as many steps are in flight, of which each has other sequences and its share of the work."""

from collections.abc import Callable
from typing import Any

import pytest
from fake_runner import FakeForward, FakePending

from quire_engine.core.batch import Batch

Make = Callable[..., Any]


class Flights:
    """A runner that records which steps are in flight, and checks that they share no sequence that samples."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.flying: list[Batch] = []
        self.most = 0
        self.widths: list[int] = []

    def execute(self, batch: Batch) -> "Flight":
        assert not batch.feedback_tokens, "every token is known"
        for other in self.flying:
            sampling = {row for row, samples in zip(other.rows, other.samples, strict=True) if samples}
            assert not sampling & set(batch.rows)
        self.flying.append(batch)
        self.most = max(self.most, len(self.flying))
        self.widths.append(len(batch.rows))
        return Flight(self, self.runner.execute(batch))

    def close(self) -> None:
        self.runner.close()


class Flight:
    def __init__(self, flights: Flights, forward: FakeForward) -> None:
        self._flights, self._forward = flights, forward

    @property
    def token_ids(self) -> list[int]:
        return self._forward.token_ids

    def sample(self, masks: Any = None) -> "Flight":
        self._pending: FakePending = self._forward.sample(masks)
        return self

    def wait(self) -> Any:
        assert self._flights.flying.pop(0) is self._forward.batch, "steps end in order"
        return self._pending.wait()


@pytest.fixture
def watched(make_world: Make) -> Make:
    def make(**options: Any) -> tuple[Any, Flights]:
        here = make_world(**options)
        flights = Flights(here.runner)
        here.engine._runner = flights
        return here, flights

    return make


@pytest.mark.parametrize("stages", [2, 3])
def test_steps_in_flight_equal_the_number_of_stages(watched: Make, stages: int) -> None:
    here, flights = watched(stages=stages, max_num_seqs=12, budget=48)
    for key in range(12):
        here.add(key, [1 + key], max_tokens=20)
    here.run()
    assert flights.most == stages
    assert not flights.flying
    steady = flights.widths[2 * stages : -2 * stages]
    assert set(steady) == {12 // stages}, "each step has its share of the sequences"


def test_single_sequence_has_one_step_in_flight(watched: Make) -> None:
    here, flights = watched(stages=2)
    here.add(1, [5], max_tokens=6)
    here.run()
    assert flights.most == 1
    assert len(here.tokens[1]) == 6


def test_parts_of_one_prompt_follow_each_other_without_waiting(watched: Make) -> None:
    here, flights = watched(stages=2, budget=16)
    here.add(1, list(range(1, 41)), max_tokens=1)
    here.run()
    assert flights.most == 2
    assert flights.widths == [1] * 5, "40 tokens, 8 in each step"
